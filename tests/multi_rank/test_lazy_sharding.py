"""Lazy models in the hands of code that shards, wraps or partitions: equal to ordinary ones, whoever does it."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import lowmem_load
from tests import builders
from tests.model_digest import differing
from tests.multi_rank.test_load_into import layers, losses, parallelize, shard_fully, start
from tests.parity import FP32, losses_of_engine
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")


def both(path: str) -> tuple[Any, Any]:
    ordinary = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return lowmem_load.lazy(path, dtype=torch.float32), ordinary


def shard(path: str) -> None:
    """Rank function: torch's own fully_shard reads half of the files on each of two ranks."""
    start()
    size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    for policy in ({}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}):
        ours, theirs = both(path)
        shard_fully(ours, **policy)
        read_bytes = lowmem_load.get_load_report(ours).read_bytes
        assert 0.4 < read_bytes / size < 0.55, read_bytes / size
        assert differing(ours, theirs) == []
        shard_fully(theirs, **policy)
        assert losses(ours, 3) == losses(theirs, 3)


def parallelize_both_ways(path: str) -> None:
    """Rank function: tensor parallelism, which scatters from rank 0, or cuts on each rank."""
    start()
    mesh = init_device_mesh("cpu", (2,))
    for source in (0, None):
        ours, theirs = both(path)
        for placement in (Shard(0), Shard(1), Replicate()):
            made = distribute_tensor(ours.lm_head.weight, mesh, [placement], src_data_rank=source)
            assert torch.equal(made.full_tensor(), theirs.lm_head.weight)
            assert torch.equal(made.redistribute(placements=[Shard(1)]).full_tensor(), theirs.lm_head.weight)
    ours, theirs = both(path)
    parallelize(ours, mesh)
    assert differing(ours, theirs) == []
    assert sum(isinstance(parameter, DTensor) for parameter in ours.parameters()) > 0
    parallelize(theirs, mesh)
    assert losses(ours, 3) == losses(theirs, 3)


def wrap(path: str) -> None:
    """Rank function: DDP and FSDP1."""
    start()
    ours, theirs = both(path)
    assert losses(DistributedDataParallel(ours), 3) == losses(DistributedDataParallel(theirs), 3)
    kind = {type(layers(theirs)[0])}
    wrapped = functools.partial(
        FullyShardedDataParallel,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=kind),
        device_id=torch.device("cpu"),
    )
    for options in ({}, {"use_orig_params": True}):
        ours, theirs = both(path)
        assert losses(wrapped(ours, **options), 3) == losses(wrapped(theirs, **options), 3), options


def partition(path: str) -> None:
    """Rank function: deepspeed.initialize of a model that nothing has partitioned before."""
    start()
    for stage in (2, 3):
        config = {**FP32, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
        ours, theirs = (losses_of_engine(model, config) for model in both(path))
        assert ours == theirs, (stage, ours, theirs)
        assert ours[-1] < ours[0]


@pytest.mark.parametrize("act", [shard, parallelize_both_ways, wrap, partition])
def test_sharded_wrapped_and_partitioned_models_equal_ordinary_ones(checkpoints: Path, act: Any) -> None:
    run_ranks(act, str(builders.tiny_llama(checkpoints)), timeout_s=120)
