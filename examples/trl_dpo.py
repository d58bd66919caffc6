"""Preference tuning with TRL's DPOTrainer and its reference model under ZeRO-3.

With --lora there is no second model: the reference is the model with its adapter switched off.

torchrun --nproc-per-node 2 examples/trl_dpo.py --model /tmp/tiny --output /tmp/out
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from common import DS_CONFIG, accelerator_config, finish, parse, read_jsonl, report
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

import lowmem_load


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train and save; return the loss of each step of this run."""
    options = parse(argv, __doc__)
    if not options.default_loader:
        lowmem_load.install()  # the one line

    config = DPOConfig(
        output_dir=options.output,
        deepspeed=str(DS_CONFIG),
        bf16=torch.cuda.is_available(),
        per_device_train_batch_size=2,
        max_steps=options.steps,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=options.save_steps,
        report_to="none",
        disable_tqdm=True,
        accelerator_config=accelerator_config(),
    )
    trainer = DPOTrainer(
        model=options.model,  # a name: the trainer loads it and its reference model, both through lowmem_load
        args=config,
        train_dataset=Dataset.from_list(read_jsonl("dpo.jsonl")),
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]) if options.lora else None,
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(f"{options.output}/final")
    return report([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer.model)


if __name__ == "__main__":
    main()
    finish()
