"""Fine-tune with the Hugging Face Trainer under FSDP2: all parameters, or (--lora) a PEFT adapter.

torchrun --nproc-per-node 2 examples/trainer_fsdp2.py --model /tmp/tiny --output /tmp/out
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from common import finish, fsdp2_config, parse, read_jsonl, report, tokenize
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
    set_seed,
)

import lowmem_load


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train and save; return the loss of each step of this run."""
    options = parse(argv, __doc__)
    if not options.default_loader:
        lowmem_load.install()  # the one line

    training_args = TrainingArguments(  # before from_pretrained: it asks for FSDP2
        output_dir=options.output,
        fsdp=True,
        fsdp_config={
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": "FULL_STATE_DICT",
            "cpu_ram_efficient_loading": True,  # else weights are read one by one while accelerate shards
        },
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=2,
        max_steps=options.steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=options.save_steps,
        report_to="none",
        disable_tqdm=True,
        accelerator_config=fsdp2_config(),
    )
    set_seed(training_args.seed)  # adapters are random, and made before the Trainer seeds
    model = AutoModelForCausalLM.from_pretrained(options.model)  # reads headers; the weights once it is sharded
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    if options.lora:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=[tokenize(row, tokenizer) for row in read_jsonl("sft.jsonl")],
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(f"{options.output}/final")  # one Hugging Face folder (--lora: the adapter)
    return report([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model)


if __name__ == "__main__":
    main()
    finish()
