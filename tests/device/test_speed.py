"""Reads and copies overlap; `make test-device` holds the load to the bandwidths of a modelled machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lowmem_load.io.uploads import NUM_STREAMS, SLOT_BYTES
from tests import builders
from tests.device.speed import MACHINES, SIZES, Machine, measure
from tests.ranks import IS_SIMULATED


def test_reads_and_copies_overlap(checkpoints: Path) -> None:
    path = builders.tiny_llama(checkpoints, vocab_size=40_000, hidden_size=240, num_attention_heads=4)
    machine = Machine(0.1, 0.1, 0.02)
    without, found = (measure(path, machine, has_ring=has_ring) for has_ring in (False, True))
    assert without.is_right and found.is_right
    assert (without.pageable_copies > 0, found.pageable_copies, found.waits) == (True, 0, 1)
    assert found.seconds < without.seconds


@pytest.mark.skipif(not IS_SIMULATED, reason="make test-device")
@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_a_load_takes_as_long_as_storage_or_copies(checkpoints: Path, machine: Machine) -> None:
    path = builders.tiny_llama(checkpoints, **SIZES)
    for _ in range(3):  # the machine may have something else to do
        found = measure(path, machine, has_ring=True)
        if found.seconds <= 1.15 * found.limit_s:
            break
    if found.seconds > 1.15 * found.limit_s and os.getloadavg()[0] > 2 * len(os.sched_getaffinity(0)):
        pytest.skip(f"this machine has much else to do: {found}")
    assert found.seconds <= 1.15 * found.limit_s, found
    if machine.copy <= machine.storage:
        assert found.copy_busy >= 0.9, found
    assert found.is_right
    assert (found.pageable_copies, found.waits) == (0, 1)
    assert 0 <= found.staging_bytes <= (NUM_STREAMS * SLOT_BYTES if machine.casts else 0)
