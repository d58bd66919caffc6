"""What a partly partitioned load holds: the partition, one copy of the rest, and what of the files was read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import builders
from tests.multi_rank.test_partial_vision_language import PARTITION
from tests.parity import FP32
from tests.ranks import run_ranks

SLACK = 48 << 20
"""Imports, modules, the reader's staging, and what the allocator does not give back."""


def load_in_part(path: str, file_nbytes: int) -> None:
    """Rank function."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    from lowmem_load import LoadReport, load_model, load_report, streaming

    def grown(report: LoadReport) -> int:
        return report.peak_memory.anonymous_bytes

    report = load_report(load_model(path, FP32, partition=PARTITION))
    with streaming(FP32, partition=PARTITION):
        random = load_report(AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(path)))
    print(report)
    partition, whole = report.partition_bytes, report.whole_bytes
    assert whole < 2 << 20
    assert abs(report.world_size * partition + whole - file_nbytes) < 1 << 20
    assert report.read_bytes == report.needed_bytes
    assert abs(report.read_bytes - partition - whole) < 1 << 16
    assert grown(random) < partition + whole + SLACK
    assert grown(report) < partition + whole + SLACK
    assert " MiB whole on every rank" in str(report)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.release)])
def test_the_language_model_is_shared_and_the_rest_is_held_once_per_rank(world_size: int, checkpoints: Path) -> None:
    path = builders.tiny_llava(
        checkpoints, hidden_size=512, intermediate_size=2048, num_hidden_layers=10, vocab_size=8000
    )
    file_nbytes = (path / "model.safetensors").stat().st_size
    run_ranks(load_in_part, str(path), file_nbytes, world_size=world_size, timeout_s=120)
