"""A complete pipeline in LLaMA-Factory v1's shape: YAML -> DistributedInterface -> ModelEngine -> SFTTrainer.

torchrun --nproc-per-node 2 examples/llamafactory_style/train.py examples/llamafactory_style/train.yaml \
    model=/tmp/tiny output_dir=/tmp/out max_steps=12
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from data_engine import DataEngine
from sft_trainer import SFTTrainer, TrainingArguments

from lowmem_load import get_load_report
from lowmem_load.llamafactory import DistributedInterface, ModelEngine


def read_config(argv: Sequence[str]) -> dict[str, Any]:
    """Return the YAML file named first, with `key=value` after it on top; its files are next to it."""
    path, *overrides = argv
    config: dict[str, Any] = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    folder = Path(path).resolve().parent
    config["train_dataset"] = str(folder / config["train_dataset"])
    config["dist_config"]["config_file"] = str(folder / config["dist_config"]["config_file"])
    for override in overrides:
        key, _, value = override.partition("=")
        config[key] = yaml.safe_load(value)
    return config


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train as the YAML file says; return the loss of each step of this run."""
    config = read_config(sys.argv[1:] if argv is None else argv)

    distributed = DistributedInterface()  # the process group, before anything asks for it
    engine = ModelEngine(config)  # processor, configuration, model: each rank reads its own partitions
    training_args = TrainingArguments.from_mapping(engine.extra)
    dataset = DataEngine(training_args.train_dataset, engine.processor, training_args.cutoff_len)

    trainer = SFTTrainer(training_args, engine, dataset)
    losses = trainer.fit()
    trainer.save_model()
    if distributed.rank == 0:
        print("losses:", " ".join(f"{loss:.6f}" for loss in losses))
        print(get_load_report(engine.model))
    return losses


if __name__ == "__main__":
    main()
    DistributedInterface().destroy()
