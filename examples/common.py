"""What the examples share, apart from loading: arguments, data, and ranks without GPUs."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
DS_CONFIG = HERE / "ds_z3.json"
IGNORED_LABEL = -100


def parse(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Return the arguments that every example takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="a folder, such as make_model.py writes, or a Hub id")
    parser.add_argument("--output", required=True, help="where checkpoints and the trained model go")
    parser.add_argument(
        "--steps", type=int, default=8, help="total number of training steps, including those before a resume"
    )
    parser.add_argument("--save-steps", type=int, default=4, help="save a checkpoint every N steps")
    parser.add_argument("--lora", action="store_true", help="train a LoRA adapter instead of all parameters")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in --output")
    parser.add_argument("--default-loader", action="store_true", help="load without lowmem_load, for comparison")
    return parser.parse_args(argv)


def read_jsonl(name: str) -> list[dict[str, str]]:
    """Return the rows of a file in examples/data."""
    return [json.loads(line) for line in (HERE / "data" / name).read_text(encoding="utf-8").splitlines()]


def tokenize(row: dict[str, str], tokenizer: Any) -> dict[str, list[int]]:
    """Return input ids and labels of one prompt and completion; the prompt is not learned."""
    prompt = tokenizer(row["prompt"])["input_ids"]
    completion = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
    ids = prompt + completion
    return {
        "input_ids": ids,
        "attention_mask": [1] * len(ids),
        "labels": [IGNORED_LABEL] * len(prompt) + completion,
    }


def accelerator_config() -> dict[str, Any] | None:
    """Return TrainingArguments' `accelerator_config`. Only ranks without GPUs need one.

    Without a GPU accelerate takes each rank for a lone process (with `use_cpu=True` it sees all ranks, but then makes
    the process group without DeepSpeed). Told the backend beforehand, it counts them right.
    """
    if torch.cuda.is_available():
        return None
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    return {"use_configured_state": True}


def fsdp2_config() -> dict[str, Any] | None:
    """Return TrainingArguments' `accelerator_config` for FSDP2. Only ranks without GPUs need one.

    accelerate shards by FSDP2 only where ranks have GPUs, and by DDP elsewhere. Told that they have, it shards.
    """
    if torch.cuda.is_available():
        return None
    from accelerate import DistributedType, PartialState

    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    return {"use_configured_state": True}


def report(losses: list[float], model: Any) -> list[float]:
    """Print, on rank 0, the losses and how the model was loaded; return the losses."""
    from lowmem_load import get_load_report

    if int(os.environ.get("RANK", "0")) == 0:
        print("losses:", " ".join(f"{loss:.6f}" for loss in losses))
        try:
            print(get_load_report(model))
        except ValueError as error:  # --default-loader
            print(error)
    return losses


def finish() -> None:
    """Leave the process group: a rank that exits with it open may abort the others."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
