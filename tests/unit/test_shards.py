"""Which elements a rank holds of a DTensor, against torch's own cutting of real tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lowmem_load.dtensor.sharded_target import Sharded, ShardedModel
from lowmem_load.dtensor.shards import Split, grid_of, is_first_replica
from lowmem_load.planning.load_plan import SHARDED, TargetPlan

CUTS_UNEVENLY = Version(torch.__version__) >= Version("2.7")
"""Whether torch cuts a dim by a stride that does not divide it: before, it raises."""


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
            assume(is_even or split.split_factor == 1 or CUTS_UNEVENLY)
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


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One rank of four, which exchange nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=4)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("rank", range(4), indirect=True)
def test_of_equal_shards_the_first_is_known_on_parts_of_a_mesh(rank: int) -> None:
    root = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    flattened = root["dp", "cp"]._flatten("dp_cp")
    expected = {
        (root["dp"], Shard(0)): rank in (0, 2),
        (flattened, Shard(0)): rank in (0, 2),
        (flattened, Replicate()): rank == 0,
        (root["tp"], Shard(0)): rank in (0, 1),
    }
    for (mesh, placement), is_first in expected.items():
        tensor = DTensor.from_local(torch.zeros(2, 3), mesh, [placement], run_check=False)
        assert is_first_replica(tensor) is is_first, (mesh, placement)


def test_of_tied_parameters_the_first_may_be_left_to_the_caller() -> None:
    model = nn.ModuleDict({"embed": nn.Linear(2, 3, bias=False), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    sharded = ShardedModel(model, left=["embed.weight"])
    target = Sharded(sharded, model)
    target.check(model)
    names = ("embed.weight", "head.weight")
    plan = TargetPlan(names, (3, 2), torch.float32, SHARDED, (), False, False, (), "")
    made, [memory] = target.make(plan, model["embed"].weight, lambda: None)
    assert made is model["head"].weight
    assert memory.data_ptr() == made.data_ptr()
