"""Sums of values: against a sum in Python's integers, added up from any pieces, changed by any change."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from lowmem_load.saving import digest_sums as sums
from lowmem_load.saving.digest_sums import BLOCK_UNITS, LANES, PIECE_BLOCKS, Keys, add, sums_of

KEYS = Keys()
LONG = (PIECE_BLOCKS + 2) * BLOCK_UNITS + 77
"""Units of more than one piece, the last of which ends within a block."""


def drawn(num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    data = bytearray(random.Random(3).randbytes(num_bytes))
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype)


def expected(values: torch.Tensor, start: int = 0) -> tuple[int, ...]:
    """The formula of [Note: sums of values], unit by unit."""
    units = values.view(torch.int8 if values.itemsize == 1 else torch.int16).tolist()
    first = start * max(1, values.itemsize // 2)
    inner = KEYS.inner.to(torch.int64).tolist()
    totals = [0] * LANES
    for position, unit in enumerate(units, first):
        block, place = divmod(position, BLOCK_UNITS)
        outer = KEYS.outer(block, 1)[0].tolist()
        for lane in range(LANES):
            totals[lane] += outer[lane] * inner[place][lane] * unit
    return tuple(total % 2**64 for total in totals)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.bool])
@pytest.mark.parametrize("start", [0, 1, 700])
def test_it_is_the_sum_of_the_note(dtype: torch.dtype, start: int) -> None:
    values = drawn(4800, torch.uint8).remainder(2).bool() if dtype == torch.bool else drawn(4800, dtype)
    assert sums_of(values, start, KEYS) == expected(values, start)


def test_the_largest_sums_are_exact() -> None:
    """A block of the most negative units: what float64 could round."""
    values = torch.full((BLOCK_UNITS,), -(2**15), dtype=torch.int16)
    assert sums_of(values, 0, KEYS) == expected(values)
    assert float((KEYS.inner.sum(0) * 2**15).max()) < 2**53


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_pieces_add_up_wherever_they_are_cut(dtype: torch.dtype) -> None:
    values = drawn(LONG * 4, dtype)
    whole = sums_of(values, 0, KEYS)
    draw = random.Random(4)
    for num_cuts in (1, 2, 7):
        cuts = [0, *sorted(draw.randrange(values.numel()) for _ in range(num_cuts)), values.numel()]
        parts = [sums_of(values[first:last], first, KEYS) for first, last in itertools.pairwise(cuts)]
        draw.shuffle(parts)
        assert add(parts) == whole, cuts


def test_work_done_at_a_time_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    values = drawn(20 * BLOCK_UNITS + 4, torch.bfloat16)
    whole = sums_of(values, 5, KEYS)
    monkeypatch.setattr(sums, "PIECE_BLOCKS", 3)
    assert sums_of(values, 5, KEYS) == whole


def test_any_change_changes_all_lanes() -> None:
    values = drawn(8 * BLOCK_UNITS, torch.int16)
    whole = sums_of(values, 0, KEYS)
    changed: dict[str, torch.Tensor] = {name: values.clone() for name in ("bit", "swapped", "sign", "two")}
    changed["bit"][1500] ^= 1
    changed["swapped"][[10, 11]] = changed["swapped"][[11, 10]]
    changed["sign"][-1] ^= -(2**15)
    changed["two"][0] += 1  # and one less, a block further on
    changed["two"][BLOCK_UNITS] -= 1
    changed["shifted"] = values.roll(BLOCK_UNITS)
    changed["blocks swapped"] = torch.cat([values[BLOCK_UNITS : 2 * BLOCK_UNITS], values[:BLOCK_UNITS], values[2048:]])
    for name, other in changed.items():
        found = sums_of(other, 0, KEYS)
        assert all(ours != theirs for ours, theirs in zip(found, whole, strict=True)), name


def test_nothing_is_zero() -> None:
    assert sums_of(torch.empty(0), 3, KEYS) == (0,) * LANES


def test_what_was_once_computed_stays() -> None:
    """Digests are kept and compared by later releases, on other machines."""
    assert sums_of(torch.arange(3000, dtype=torch.int32), 9, KEYS)[:2] == (13628526809699411462, 6653677233172169804)
