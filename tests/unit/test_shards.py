"""Which elements a rank holds of a DTensor, against torch's own cutting of real tensors."""

from __future__ import annotations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from lowmem_load.dtensor.mesh import CUTS_AS_HERE
from lowmem_load.planning.splits import Split, grid_of


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Split]]:
    shape = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=3)))
    splits = []
    for _ in range(draw(st.integers(0, 3))):
        num_chunks = draw(st.integers(1, 4))
        index, factor = draw(st.integers(0, num_chunks - 1)), draw(st.integers(1, 3))
        splits.append(Split(draw(st.integers(0, len(shape) - 1)), num_chunks, index, factor))
    return shape, splits


@settings(max_examples=300, deadline=None)
@given(cuts())
def test_a_grid_has_the_elements_that_torch_cuts_out(case: tuple[tuple[int, ...], list[Split]]) -> None:
    shape, splits = case
    held = torch.arange(torch.Size(shape).numel()).view(shape)
    for split in splits:
        placement = (
            Shard(split.dim) if split.split_factor == 1 else _StridedShard(split.dim, split_factor=split.split_factor)
        )
        if held.shape[split.dim]:  # torch cannot cut nothing by a stride
            is_even = held.shape[split.dim] % (split.num_chunks * split.split_factor) == 0
            assume(is_even or split.split_factor == 1 or CUTS_AS_HERE)
            held = placement._split_tensor(held, split.num_chunks, with_padding=False)[0][split.index]
    grid = grid_of(shape, splits)
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for dim, runs in enumerate(grid.runs):
        whole = torch.cat([whole.narrow(dim, start, end - start) for start, end in runs], dim)
    assert grid.numel == held.numel()
    assert torch.equal(whole.reshape(-1), held.reshape(-1))
    assert all(runs == ((0, 0),) or all(a < b for a, b in runs) for runs in grid.runs)


def test_neighbouring_runs_are_one() -> None:
    assert grid_of((8,), [Split(0, 1, 0, 2)]).runs == (((0, 8),),)
    assert grid_of((8,), [Split(0, 2, 1, 2)]).runs == (((2, 4), (6, 8)),)
    assert grid_of((), []).numel == 1
