"""The Trainer under FSDP2, which nothing but TrainingArguments asks for; `--lora` trains an adapter."""

import json
import sys
from pathlib import Path

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)


def main() -> None:
    arguments = TrainingArguments(
        output_dir="output",
        fsdp=True,
        fsdp_config={"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"},
        per_device_train_batch_size=2,
        max_steps=4,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained("model")
    tokenizer = AutoTokenizer.from_pretrained("model")
    if "--lora" in sys.argv:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    lines = Path("data/sft.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [tokenizer(row["prompt"] + row["completion"]) for row in map(json.loads, lines)]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(model, arguments, collator, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model("output/final")


if __name__ == "__main__":
    main()
