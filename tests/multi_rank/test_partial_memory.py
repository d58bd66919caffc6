"""What a partly partitioned load holds: the partition, one copy of the rest, and what of the files was read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import builders
from tests.multi_rank.test_partial_vision_language import PARTITION
from tests.parity import FP32
from tests.ranks import run_ranks

SLACK = 48 << 20
"""Imports, modules, the reader's staging, and what the allocator does not give back."""


def memory(path: str) -> dict[str, Any]:
    """Rank function."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    from lowmem_load import load_model, load_report, streaming

    report = load_report(load_model(path, FP32, partition=PARTITION))
    with streaming(FP32, partition=PARTITION):
        random = load_report(AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(path)))
    return {
        "random": random.peak_memory.anonymous_bytes - random.start_memory.anonymous_bytes,
        "partition": report.partition_bytes,
        "whole": report.whole_bytes,
        "read": report.read_bytes,
        "needed": report.needed_bytes,
        "peak": report.peak_memory.anonymous_bytes - report.start_memory.anonymous_bytes,
        "file": report.peak_memory.file_bytes - report.start_memory.file_bytes,
        "text": str(report),
    }


def test_the_language_model_is_shared_and_the_rest_is_held_once_per_rank(checkpoints: Path) -> None:
    path = builders.tiny_llava(
        checkpoints, hidden_size=512, intermediate_size=2048, num_hidden_layers=10, vocab_size=8000
    )
    total = (path / "model.safetensors").stat().st_size
    for world_size in (2, 3):
        for found in run_ranks(memory, str(path), world_size=world_size, timeout_s=120):
            print(found["text"])
            assert found["whole"] < 2 << 20
            assert abs(world_size * found["partition"] + found["whole"] - total) < 1 << 20
            assert found["read"] == found["needed"]
            assert abs(found["read"] - found["partition"] - found["whole"]) < 1 << 16
            assert found["random"] < found["partition"] + found["whole"] + SLACK, found
            assert found["peak"] < found["partition"] + found["whole"] + SLACK, found
            assert f"{found['whole'] / (1 << 20):.1f} MiB whole on every rank" in found["text"]
