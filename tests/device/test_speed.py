"""Reads and copies overlap: a load takes as long as storage or the copy engine, whichever is slower, not both."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest
import torch

from lowmem_load.files.source import LocalFile
from tests import builders
from tests.parity import BF16
from tests.ranks import SIMULATED, run_ranks

BYTES_PER_S = 0.1e9
"""Of storage and of the copy engine."""


class Storage:
    """A bandwidth that all readers share."""

    def __init__(self) -> None:
        self._lock, self._free_at, self._ordinary = threading.Lock(), 0.0, LocalFile.read_into

    def read_into(self, file: LocalFile, offset: int, memory: memoryview) -> None:
        with self._lock:
            self._free_at = due = max(self._free_at, time.perf_counter()) + memory.nbytes / BYTES_PER_S
        self._ordinary(file, offset, memory)
        time.sleep(max(0.0, due - time.perf_counter()))


def load(path: str) -> float:
    """Rank function: returns how long the reads took, by what storage alone takes."""
    from transformers import AutoModelForCausalLM

    from lowmem_load import DistributedInterface, load_model, load_report
    from tests.device.simulated import counters, reset, set_speed

    DistributedInterface()
    load_model(path, BF16)  # a real device has its memory; here the system has to find pages for it first
    gc.collect()
    storage = Storage()

    def read_into(file: LocalFile, offset: int, memory: memoryview) -> None:
        storage.read_into(file, offset, memory)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(LocalFile, "read_into", read_into)
        reset()
        set_speed(BYTES_PER_S / 1e9, BYTES_PER_S / 1e9)
        model = load_model(path, BF16)
        set_speed()
    counted, report = counters(), load_report(model)
    assert not [kind for kind in counted if "pageable" in kind]
    assert counted["stream synchronised"][0] == 1
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.ds_tensor.cpu(), theirs.flatten())
    return report.seconds["read"] * BYTES_PER_S / report.needed_bytes


def test_reads_and_copies_overlap(checkpoints: Path) -> None:
    path = builders.tiny_llama(checkpoints, vocab_size=40_000, hidden_size=240, num_attention_heads=4)
    for _ in range(3):  # the machine may have something else to do
        (took,) = run_ranks(load, str(path), world_size=1, timeout_s=180, env=SIMULATED)
        if took < 1.5:  # one after the other: 2
            break
    assert took < 1.5
