"""What has no values of its own on a rank is refused before anything is written."""

from __future__ import annotations

from collections.abc import Iterator

import deepspeed  # noqa: F401  what it has done to a parameter is looked for once it is imported
import pytest
import torch
from torch import nn

from lowmem_load import DistributedInterface
from lowmem_load.errors import UnsupportedError
from lowmem_load.saving.local_shards import local_shards


@pytest.fixture
def lone_process() -> Iterator[None]:
    """A process group of one."""
    DistributedInterface()
    yield
    DistributedInterface().destroy()


def test_what_is_whole_is_written_by_rank_0() -> None:
    model = nn.Linear(3, 2)
    for rank, numels in ((0, [6, 2]), (1, [0, 0])):
        found = local_shards(model, rank, masters=False)
        assert [(one.mine.start, one.mine.end) for one in found] == [(0, numel) for numel in numels]


def test_a_slice_of_tensor_parallelism_is_refused() -> None:
    model = nn.Linear(3, 2)
    model.weight.tensor_model_parallel = True
    with pytest.raises(UnsupportedError, match=r"^weight: is split by DeepSpeed's tensor parallelism"):
        local_shards(model, 0, masters=False)


def test_a_dtensor_is_refused(lone_process: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (1,))))
    with pytest.raises(UnsupportedError, match=r"^weight: is a DTensor"):
        local_shards(model, 0, masters=False)


def test_a_tensor_without_values_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"^weight: is on the meta device"):
        local_shards(nn.Linear(3, 2, device="meta"), 0, masters=False)
    model = nn.Module()
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedError, match=r"^sparse: is of layout"):
        local_shards(model, 0, masters=False)
