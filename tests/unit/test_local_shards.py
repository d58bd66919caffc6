"""What has no values of its own on a rank is refused before anything is written."""

from __future__ import annotations

from collections.abc import Iterator

import deepspeed  # noqa: F401  what it has done to a parameter is looked for once it is imported
import pytest
import torch
from torch import nn

from lowmem_load import DistributedInterface
from lowmem_load.errors import UnsupportedError
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.saving.local_shards import local_shards


@pytest.fixture
def lone_process() -> Iterator[None]:
    """A process group of one."""
    DistributedInterface()
    yield
    DistributedInterface().destroy()


def test_what_is_whole_is_written_by_rank_0() -> None:
    model = nn.Linear(3, 2)
    for rank, numels in ((0, [[6], [2]]), (1, [[], []])):
        found = local_shards(model, rank, masters=False)
        assert [[span.numel for span in one.mine] for one in found] == numels


def test_a_slice_of_tensor_parallelism_is_refused() -> None:
    model = nn.Linear(3, 2)
    model.weight.tensor_model_parallel = True
    with pytest.raises(UnsupportedError, match=r"^weight: is split by DeepSpeed's tensor parallelism"):
        local_shards(model, 0, masters=False)


def test_experts_of_which_other_ranks_hold_others_are_refused() -> None:
    model = nn.Linear(3, 2)
    model.weight.allreduce, model.weight.group_name = False, "ep_size_1"
    assert local_shards(model, 0, masters=False)
    model.weight.group_name = "ep_size_2"
    with pytest.raises(UnsupportedError, match=r"^weight: is split by DeepSpeed's expert parallelism"):
        local_shards(model, 0, masters=False)


def test_each_rank_writes_its_shard_of_a_dtensor(lone_process: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    model = nn.Linear(3, 2)
    values = model.weight.detach().clone()
    model.weight = nn.Parameter(distribute_tensor(values, init_device_mesh("cpu", (1,))))
    weight = local_shards(model, 0, masters=False)[0]
    assert weight.mine == (FlatRange(0, 6),)
    with weight.memory() as [(memory, first)]:
        assert torch.equal(memory, values.view(-1)) and first == 0


def test_a_tensor_without_values_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"^weight: is on the meta device"):
        local_shards(nn.Linear(3, 2, device="meta"), 0, masters=False)
    model = nn.Module()
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedError, match=r"^sparse: is of layout"):
        local_shards(model, 0, masters=False)
