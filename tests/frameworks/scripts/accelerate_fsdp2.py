"""accelerate and a plain loop under the FSDP2 that `accelerate launch` asks for; `--lora` trains an adapter."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained("model")
    tokenizer = AutoTokenizer.from_pretrained("model")
    if "--lora" in sys.argv:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    lines = Path("data/sft.jsonl").read_text(encoding="utf-8").splitlines()[:16]
    texts = [row["prompt"] + row["completion"] for row in map(json.loads, lines)]
    batches = DataLoader(
        texts, batch_size=2, collate_fn=lambda rows: dict(tokenizer(rows, padding=True, return_tensors="pt"))
    )
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    model.train()
    for batch in batches:
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        accelerator.backward(model(**batch, labels=labels).loss)
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        "output", state_dict=state, is_main_process=accelerator.is_main_process
    )


if __name__ == "__main__":
    main()
