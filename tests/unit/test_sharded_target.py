"""Which rank of a mesh writes a shard, and where a sharded model is filled."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lowmem_load.engines.mesh import is_first_replica, local_shard, shard_fully
from lowmem_load.engines.sharded_target import Sharded, ShardedModel
from lowmem_load.errors import UnsupportedError
from lowmem_load.load.request import stage_3
from lowmem_load.models.skeleton import blocks
from lowmem_load.planning.expression import Source
from lowmem_load.planning.load_plan import SHARDED, TargetPlan
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.regions import flat_ranges


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One rank of four, which exchange nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=4)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("rank", range(4), indirect=True)
def test_of_equal_shards_the_first_is_known_on_parts_of_a_mesh(rank: int) -> None:
    root = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    flattened = root["dp", "cp"]._flatten(f"dp_cp{rank}")  # before torch 2.10 a process makes one of a name
    expected = {
        (root["dp"], Shard(0)): rank in (0, 2),
        (flattened, Shard(0)): rank in (0, 2),
        (flattened, Replicate()): rank == 0,
        (root["tp"], Shard(0)): rank in (0, 1),
    }
    for (mesh, placement), is_first in expected.items():
        tensor = DTensor.from_local(torch.zeros(2, 3), mesh, [placement], run_check=False)
        assert is_first_replica(tensor) is is_first, (mesh, placement)


@pytest.mark.parametrize("rank", [3], indirect=True)
def test_a_rank_that_is_not_in_a_mesh_holds_nothing_of_a_scalar_either(rank: int) -> None:
    model, described, mesh = nn.Module(), nn.Module(), DeviceMesh("cpu", [0, 1])
    for name, whole in {"scale": torch.ones(()), "weight": torch.ones(3, 2)}.items():
        spec = DTensorSpec(mesh, (Replicate(),), tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype))
        model.register_buffer(name, DTensor(torch.zeros(0), spec, requires_grad=False))
        described.register_buffer(name, whole)
    sharded = ShardedModel(model)
    for name, buffer in model.named_buffers():
        grid, memory = sharded.shard(buffer)
        source = Source("file", name, 0, tuple(buffer.shape), torch.float32)
        assert grid.numel == memory.numel() == Planner().plan_fill(name, source, grid).numel == 0
        assert not list(flat_ranges(grid, source.shape))
    sharded.fill_buffers(described)


def test_of_tied_parameters_the_first_may_be_left_to_the_caller() -> None:
    model = nn.ModuleDict({"embed": nn.Linear(2, 3, bias=False), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    sharded = ShardedModel(model, left=["embed.weight"])
    target = Sharded(sharded, stage_3(torch.float32, 1), model)
    target.check(model)
    names = ("embed.weight", "head.weight")
    plan = TargetPlan(names, (3, 2), torch.float32, SHARDED, (), False, False, (), "")
    made, [memory] = target.make(plan, model["embed"].weight, lambda: None)
    assert made is model["head"].weight
    assert memory.data_ptr() == made.data_ptr()


@pytest.mark.parametrize("rank", [0], indirect=True)
@pytest.mark.parametrize("size", [4, 8])
def test_a_stride_that_does_not_divide_a_dim_is_refused_where_torch_cuts_otherwise(
    rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.8 gives rank 0 of 3 the elements 0 and 3 of 4, torch 2.11 the elements 0 and 2."""
    monkeypatch.setattr("lowmem_load.engines.mesh.CUTS_AS_HERE", False)
    mesh = init_device_mesh("cpu", (4,))
    placements, meta = (_StridedShard(0, split_factor=2),), TensorMeta(torch.Size([size]), (1,), torch.float32)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    tensor = DTensor(torch.zeros(2 if size == 8 else 1), spec, requires_grad=False)
    if size == 8:
        assert local_shard("w", tensor, needs_memory=True)[0].numel == 2
    else:
        with pytest.raises(UnsupportedError, match=r"w: torch .* cuts a dim of 4 elements by .*otherwise"):
            local_shard("w", tensor, needs_memory=True)


@pytest.mark.parametrize("rank", [0], indirect=True)
def test_blocks_inside_others_are_sharded_before_those(rank: int) -> None:
    class Nested(nn.Module):
        _no_split_modules = ("TransformerEncoderLayer", "Linear")

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 8), nn.TransformerEncoderLayer(8, 2, 8)])

    with torch.device("meta"):
        model = Nested()
    mesh = init_device_mesh("cpu", (4,))
    shard_fully(model, mesh, blocks(model), {})
    assert {parameter.to_local().shape[0] / len(parameter) for parameter in model.parameters()} == {0.25}
