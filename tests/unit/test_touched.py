"""What reads touch is counted against units that are marked one by one; a measurement that fails is a result."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.apart import FailedError, run_apart
from benchmarks.touched import Span, Touched, count_units, touched_by
from lowmem_load.planning import expression as ex
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.ranges import FlatRange


@given(st.lists(st.builds(Span, st.sampled_from("ab"), st.integers(0, 50), st.integers(0, 20))), st.integers(1, 8))
def test_units_count_once(spans: list[Span], unit: int) -> None:
    marked = {(path, byte // unit) for path, start, nbytes in spans for byte in range(start, start + nbytes)}
    assert count_units(spans, unit) == len(marked)


def test_reads_of_operations_count_too() -> None:
    one = ex.Source("a", "one", 4090, (1000,), torch.float32)  # bytes 4090 to 8090: two pages
    other = ex.Source("a", "other", 20000, (1000,), torch.int8)
    added = ex.Elementwise("added", sum, (ex.cast(other, torch.float32), one), (1000,), torch.float32)
    fills = [Planner().plan_fill("w", each, FlatRange(0, 1000)) for each in (one, added)]
    plan = SimpleNamespace(targets=[SimpleNamespace(fills=fills)], buffers=[SimpleNamespace(fill=None)])
    assert touched_by(plan) == Touched(3, 4000, 4 * 4096, 1 << 20)  # other: bytes 20000 to 21000, two more pages


def test_a_function_that_fails_apart_says_why() -> None:
    with pytest.raises(FailedError, match=r"ValueError: .*(math domain|nonnegative)"):
        run_apart(math.sqrt, -1.0, package=None, limit_s=60, limit_bytes=4 << 30)
    with pytest.raises(FailedError, match="ended with code 7"):
        run_apart(os._exit, 7, package=None, limit_s=60, limit_bytes=4 << 30)
