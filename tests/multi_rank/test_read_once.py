"""Ranks that hold the same read it once: the values of ranks that read alone, of fewer bytes; else each reads alone."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM

from lowmem_load import get_load_report, load_into, load_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.distributed.side_group import SideGroup
from lowmem_load.errors import ConfigError, LowMemLoadError
from lowmem_load.planning import replicas
from tests import builders
from tests.ranks import run_ranks
from tests.storage import in_small_batches

STAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ZeRO-0": ({"stage": 0}, {}),
    "ZeRO-2": ({"stage": 2}, {}),
    "partial ZeRO-3": ({"stage": 3}, {"partition": "model.layers.0"}),
    "hpZ": ({"stage": 3, "zero_hpz_partition_size": 2}, {}),
    "hpZ, pinned": (
        {"stage": 3, "zero_hpz_partition_size": 2, "offload_param": {"device": "cpu", "pin_memory": True}},
        {},
    ),
}
MESHES = {"HSDP": torch.bfloat16, "HSDP, cast": torch.float32, "FSDP2 x TP": torch.bfloat16}


def load(path: str, way: str, share: Any) -> Any:
    if way in STAGES:
        zero, how = STAGES[way]
        config = {"zero_optimization": zero, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
        return load_model(path, config, share_reads=share, **how)
    if way == "FSDP2 x TP":
        return load_in_two_ways(path, share)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return load_model(path, mesh=mesh, dtype=MESHES[way], share_reads=share)


def load_in_two_ways(path: str, share: Any) -> Any:
    """Loads into a model whose norms are sharded among rows of the mesh, and so held by both ranks of each column."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).bfloat16()
    for layer in model.model.layers:
        cuts = {"mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        fully_shard(parallelize_module(layer, mesh["columns"], cuts), mesh=mesh["rows"])
    fully_shard(model, mesh=mesh["rows"])
    load_into(model.to_empty(device="cpu"), path, share_reads=share)
    return model


def values_of(model: Any, rank: int) -> list[torch.Tensor]:
    """What this rank holds, without the padding of partitions."""
    found = []
    for parameter in model.parameters():
        held = getattr(parameter, "_local_tensor", parameter).detach().flatten()
        if hasattr(parameter, "ds_tensor"):
            held, second = parameter.ds_tensor, getattr(parameter, "ds_secondary_tensor", None)
            held = held[: max(0, parameter.ds_numel - rank * held.numel())]
            found.append(
                second[: max(0, parameter.ds_numel - rank % 2 * second.numel())] if second is not None else held
            )
        found.append(held)
    return found


def compare(path: str, ways: list[str]) -> dict[str, tuple[int, int, int]]:
    """Rank function: what this rank reads alone, and once with the others, and what it receives then."""
    rank, found = DistributedInterface().rank, dict[str, tuple[int, int, int]]()
    for way in ways:
        alone = load(path, way, "off")
        with in_small_batches():
            once = load(path, way, "job")
        pairs = zip(values_of(alone, rank), values_of(once, rank), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), way
        before, after = get_load_report(alone), get_load_report(once)
        assert after.needed_bytes == before.needed_bytes
        found[way] = before.read_bytes, after.read_bytes, after.received_bytes
    return found


def test_values_are_those_of_ranks_that_read_alone(checkpoints: Path) -> None:
    path = builders.tiny_llama(checkpoints, hidden_size=128, num_hidden_layers=4, max_shard_size="200KB")
    ways = [*STAGES, *(MESHES if hasattr(transformers.PreTrainedModel, "maybe_distribute_model") else ())]
    found = run_ranks(compare, str(path), ways, world_size=4, timeout_s=240, env={"NDEV_PER_NODE": "4"})
    for way in ways:
        alone, once, received = (sum(of_rank[way][number] for of_rank in found) for number in range(3))
        replicas = 4 if way in ("ZeRO-0", "ZeRO-2") else 2
        assert received > 0, way
        if way in ("ZeRO-0", "ZeRO-2", "HSDP", "HSDP, cast"):
            assert once == alone // replicas, way
        else:
            assert once < alone, way


def disagree(path: str) -> tuple[int, list[str]]:
    """Rank function: loads, with pieces of another size on one rank."""
    if DistributedInterface().rank == 1:
        replicas.PIECE_BYTES = 1 << 10
    report = get_load_report(load(path, "ZeRO-0", "job"))
    return report.received_bytes, report.notes


def test_ranks_that_would_share_otherwise_read_alone(checkpoints: Path) -> None:
    note = "no reads were shared with other ranks: ranks that need the same have not planned the same reads"
    assert run_ranks(disagree, str(builders.tiny_llama(checkpoints)), world_size=2) == [(0, [note])] * 2


def wait_for_each_other() -> tuple[float, str]:
    """Rank function: what comes of groups that never form, as where a firewall stands between the ranks."""
    ranks, start_s = DistributedInterface(), time.monotonic()
    dist.ProcessGroupGloo = lambda *_: time.sleep(600)
    with pytest.raises(LowMemLoadError) as failed, ranks.step("connecting"):
        SideGroup(ranks, [0, 1]).connect()
    return time.monotonic() - start_s, str(failed.value)


def test_ranks_that_wait_for_each_other_make_no_progress() -> None:
    for seconds, text in run_ranks(wait_for_each_other, env={"LOWMEM_LOAD_SILENCE_S": "3"}):
        assert seconds < 10
        assert "ranks 0, 1 have not connected to each other in 3 s" in text


def test_another_value_is_an_error() -> None:
    share: Any = "on"
    with pytest.raises(ConfigError, match="share_reads: asked for 'on', expected one of auto, job, off"):
        load_model("none", {}, share_reads=share)
