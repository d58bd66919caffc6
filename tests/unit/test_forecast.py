"""What a job will need: figures of plans, DeepSpeed's estimate of training, and the verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

from lowmem_load.api.forecast import (
    OFFLOADS,
    OVERHEAD_BYTES,
    Job,
    Needs,
    States,
    load_bytes,
    needs_of,
    smallest_world_size,
    whole_bytes,
    zero3_states,
)
from lowmem_load.api.plan_model import plan_zero3_rank
from lowmem_load.config.settings import Settings, read_settings
from lowmem_load.planning.load_plan import LoadPlan
from tests.builders import tiny_llama, tiny_mixtral

MIB, GIB = 1 << 20, 1 << 30
B = 10**9
STATES = States(2 * 8 * B, 8 * B, gathered_bytes=2 * 2 * B, load_host_bytes=100 * MIB, load_device_bytes=MIB)


def planned(folder: Path, **zero: Any) -> tuple[LoadPlan, Settings]:
    config = {"zero_optimization": {"stage": 3, **zero}, "bf16": {"enabled": True}}
    plan = plan_zero3_rank(folder, config, rank=0, world_size=2, device=torch.device("cuda"))
    return plan, read_settings(config, world_size=2)


def needs(states: States, world_size: int, gpus_per_node: int, *offload: str) -> Needs:
    optimizer, parameters = offload or ("none", "none")
    return needs_of(states, Job(world_size, gpus_per_node), (optimizer, parameters))


def test_states_are_read_off_a_plan(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    plan, settings = planned(folder)
    states = zero3_states(plan, settings)
    largest = max(target.numel for target in plan.targets)  # no layer here has two parameters
    assert states.num_trained == sum(target.numel for target in plan.targets)
    assert (states.parameter_bytes, states.state_bytes) == (2 * states.num_trained, 12)
    # DeepSpeed may keep so small a model gathered.
    assert states.gathered_bytes == 2 * (states.num_trained + int(5e8) + largest)
    gathers_one = planned(folder, stage3_max_live_parameters=0, reduce_bucket_size=10)
    assert zero3_states(*gathers_one).gathered_bytes == 2 * (2 * largest + 10)
    adapters = zero3_states(plan, settings, 1000)
    assert adapters.num_trained == 1000
    assert adapters.parameter_bytes == states.parameter_bytes + 2 * 1000
    assert adapters.gathered_bytes == states.gathered_bytes - 2 * largest
    nvme = {"device": "nvme", "nvme_path": "/x", "buffer_count": 3, "buffer_size": 1000}
    assert zero3_states(*planned(folder, offload_param=nvme)).swap_bytes == 3 * 1000 * 2


def test_a_load_takes_slots_and_temporary_memory(tmp_path: Path) -> None:
    plan, _ = planned(tiny_llama(tmp_path / "llama"))
    slots = 64 * MIB  # two slots of 8 MiB for each thread; on the device one on each of two streams
    assert load_bytes(plan) == (OVERHEAD_BYTES + slots, whole_bytes(plan) + 16 * MIB)
    cast, _ = planned(tiny_mixtral(tmp_path / "mixtral", torch.float32))
    assert cast.costs.read_bytes == 2 * cast.partition_bytes
    assert load_bytes(cast)[0] >= OVERHEAD_BYTES + slots + cast.costs.largest_temporary_bytes


def test_partitions_count_where_they_are_held() -> None:
    states = replace(STATES, swap_bytes=GIB)
    on_gpu, on_host, on_nvme = (needs(states, 16, 8, "none", device) for device in ("none", "cpu", "nvme"))
    partition = STATES.parameter_bytes // 16
    assert [each.gpu_load for each in (on_gpu, on_host, on_nvme)] == [MIB + partition, MIB, MIB]
    assert on_host.host_load - on_gpu.host_load == 8 * partition
    assert on_nvme.host_load - on_gpu.host_load == 8 * GIB
    assert on_nvme.host_training - on_gpu.host_training == 8 * GIB, "swap buffers stay"
    assert [each.nvme for each in (on_gpu, on_host, on_nvme)] == [0, 0, 8 * partition]
    assert needs(states, 16, 8, "nvme", "none").nvme == 8 * B * 12 // 2


@pytest.mark.parametrize("offload", OFFLOADS.values())
@pytest.mark.parametrize(("world_size", "gpus_per_node"), [(1, 1), (8, 8), (16, 8), (4096, 8)])
def test_the_estimate_equals_deepspeeds(offload: tuple[str, str], world_size: int, gpus_per_node: int) -> None:
    host, device, _ = estimate_zero3_model_states_mem_needs(
        *(STATES.num_trained, B),
        num_gpus_per_node=gpus_per_node,
        num_nodes=world_size // gpus_per_node,
        cpu_offload=offload[0] != "none",
        cpu_offload_params=offload[1] != "none",
        zero_init=True,
    )
    found = needs(STATES, world_size, gpus_per_node, *offload)
    assert found.gpu_training == device
    processes = needs(replace(STATES, parameter_bytes=0, num_trained=0), world_size, gpus_per_node).host_training
    created = B * 4 * min(world_size, gpus_per_node) * 1.5  # a layer in fp32, while DeepSpeed's own load creates it
    expected = host - created * (offload[0] == "none")
    assert found.host_training - processes == pytest.approx(expected, abs=1)


def test_fewer_ranks_on_the_last_node_and_second_copies_mean_more_memory() -> None:
    full, partly = (needs(STATES, ranks, 8).gpu_training for ranks in (16, 12))
    assert partly - full == 18 * 8 * B // 12 - 18 * 8 * B // 16
    copied = replace(STATES, hpz_ranks=8)
    assert needs(copied, 16, 8).gpu_training - full == 2 * 8 * B // 8


def test_a_verdict_names_what_would_fit() -> None:
    def free(host: int | None, device: int | None, world_size: int = 8, word: str = "none") -> tuple[str, bool] | None:
        job = Job(world_size, 8, host, device)
        margin = needs_of(STATES, job, OFFLOADS[word]).margin(job)
        return margin and (margin[0], margin[1] >= 0)

    assert free(None, None) is None
    assert free(1024 * GIB, 80 * GIB, 2) == ("GPU", True) and free(1024 * GIB, 80 * GIB, 1) == ("GPU", False)
    assert [free(1024 * GIB, 12 * GIB, 8, word) for word in OFFLOADS] == [("GPU", False), ("GPU", True), ("GPU", True)]
    assert free(GIB, 80 * GIB) == ("host", False)
    job = Job(8, 8, 1024 * GIB, 12 * GIB)  # 4 + 144 / 24 = 10 GB
    assert smallest_world_size(STATES, job, OFFLOADS["none"]) == 24
    assert smallest_world_size(STATES, replace(job, device_bytes=GIB), OFFLOADS["none"]) is None
    assert smallest_world_size(STATES, Job(3, 8, None, 52 * GIB), OFFLOADS["none"]) == 3  # 4 + 144 / 2 is more
    two_replicas = replace(STATES, copies=2)
    assert smallest_world_size(two_replicas, Job(16, 8, None, 12 * GIB), OFFLOADS["none"]) == 40
