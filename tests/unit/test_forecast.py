"""What a job will need: figures of plans, DeepSpeed's estimate of training, and the verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

from lowmem_load.api.plan_model import plan_ranks
from lowmem_load.cli.job_forecast import Limits, Model, Setup, judge, model_of, needs_of, training_needs
from lowmem_load.cli.load_forecast import OVERHEAD_BYTES, RankNeeds, node_reads, rank_needs, stock_needs
from lowmem_load.config.settings import Settings, read_settings
from lowmem_load.phases import Memory
from lowmem_load.planning import expression as ex
from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.planning.reads import ReadCost
from tests.builders import tiny_llama, tiny_mixtral
from tests.together import plan_of

MIB, GIB = 1 << 20, 1 << 30
B = 10**9
MODEL = Model(8 * B, B, 1000, 2, "AdamW", 8)
PROCESS = Memory(anonymous_bytes=GIB, file_bytes=GIB)
RANK = RankNeeds(
    *(0, 0, 0, 0, 0),
    host_beside_bytes=100 * MIB,
    device_beside_bytes=MIB,
    swap_bytes=0,
    needed_bytes=0,
    read_bytes=0,
    num_reads=0,
    slow_ways={},
)


def planned(folder: Path, device: str, *, world_size: int = 2, **zero: Any) -> tuple[LoadPlan, Settings]:
    config = {"zero_optimization": {"stage": 3, **zero}, "bf16": {"enabled": True}}
    (plan,) = plan_ranks(folder, config, ranks=[0], world_size=world_size, device=torch.device(device))
    return plan, read_settings(config, world_size=world_size)


def test_partitions_count_where_they_are_held(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    on_cpu = rank_needs(*planned(folder, "cpu"), is_host=True)
    held = on_cpu.partition_bytes + on_cpu.whole_bytes
    assert (on_cpu.host_bytes, on_cpu.device_peak_bytes) == (held, 0)
    assert on_cpu.host_peak_bytes >= on_cpu.host_bytes + OVERHEAD_BYTES
    on_device = rank_needs(*planned(folder, "cuda"), is_host=False)
    assert (on_device.host_bytes, on_device.device_peak_bytes) == (0, held)
    assert on_device.host_peak_bytes >= OVERHEAD_BYTES + 64 * MIB  # two slots of 8 MiB for each of four threads
    offloaded = rank_needs(*planned(folder, "cuda", offload_param={"device": "cpu"}), is_host=False)
    assert (offloaded.host_bytes, offloaded.device_peak_bytes) == (on_cpu.partition_bytes, on_cpu.whole_bytes)
    nvme = {"device": "nvme", "nvme_path": "/x", "buffer_count": 3, "buffer_size": 1000}
    swapped = rank_needs(*planned(folder, "cuda", offload_param=nvme), is_host=False)
    assert (swapped.partition_bytes, swapped.host_bytes) == (on_cpu.partition_bytes, 3 * 1000 * 2)
    for needs, of_host, of_device in (
        (on_cpu, on_cpu.partition_bytes, 0),
        (on_device, 0, on_cpu.partition_bytes),
        (offloaded, on_cpu.partition_bytes, 0),
        (swapped, swapped.swap_bytes, 0),
    ):
        assert needs.host_peak_bytes - needs.host_beside_bytes == of_host
        assert needs.device_peak_bytes - needs.device_beside_bytes == of_device


def test_casts_need_temporary_memory(tmp_path: Path) -> None:
    folder = tiny_mixtral(tmp_path, torch.float32)
    plan, settings = planned(folder, "cpu")
    needs = rank_needs(plan, settings, is_host=True)
    assert needs.num_reads == plan.num_reads and needs.read_bytes == plan.read_bytes == 2 * needs.partition_bytes
    assert needs.host_peak_bytes - needs.host_bytes - plan.planning_bytes - OVERHEAD_BYTES == 4 * plan.staging_bytes
    on_device = rank_needs(*planned(folder, "cuda"), is_host=False)
    assert on_device.device_peak_bytes == needs.host_bytes + 16 * MIB  # a slot of 8 MiB on each of two streams


def test_slower_ways_are_summed_up(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    (plan,) = plan_ranks(
        *(tiny_llama(tmp_path), config),
        ranks=[0],
        world_size=2,
        device=torch.device("cpu"),
        auto_class="AutoModelForSequenceClassification",
    )
    needs = rank_needs(plan, read_settings(config, world_size=2), is_host=True)
    head = next(target for target in plan.targets if target.name == "score.weight")
    assert needs.slow_ways == {"initialised on this rank: not in the checkpoint": (1, 2 * head.numel)}


def test_shared_reads_of_a_node_count_once() -> None:
    """Eight of 16 ranks hold one of two transposed experts, of which each alone reads along all rows."""
    turned = ex.permute(ex.Source("data", "w", 0, (2, 1024, 25_600), torch.bfloat16), (0, 2, 1))
    slow, nbytes = ReadCost(1e-3, 5e8), 1024 * 25_600 * 2
    plans = [plan_of(turned, 16, slow, rank) for rank in range(8)]
    found = node_reads(plans)
    assert found is not None and (found.num_ranks, found.shared_bytes) == (8, nbytes)
    assert 7 * nbytes < found.alone_bytes == found.wanted_bytes < 8 * nbytes
    run = ex.Source("data", "w", 0, (1 << 16, 1 << 12), torch.bfloat16)
    of_blocks = [plan_of(run, 2048, ReadCost(1e-3, 5e8, 1 << 26), rank) for rank in range(8)]
    blocks = node_reads(of_blocks)
    assert blocks is not None and (blocks.wanted_bytes, blocks.alone_bytes) == (2 << 20, 8 << 26)
    assert blocks.shared_bytes == 1 << 26
    assert node_reads(plans[:1]) is node_reads([plan_of(turned, 16, ReadCost(), rank) for rank in range(8)]) is None


def test_stock_reads_all_files_on_rank_0(tmp_path: Path) -> None:
    plan, _ = planned(tiny_llama(tmp_path), "cpu")
    stock = stock_needs(plan, held_on_host_bytes=1000)
    files = sum(path.stat().st_size for path in tiny_llama(tmp_path).glob("*.safetensors"))
    assert (stock.read_bytes, stock.host_peak_bytes) == (files, files + 1000)
    assert stock.collective_bytes == 3 * 2 * sum(target.numel for target in plan.targets)
    assert stock.whole_parameter_bytes == 2 * max(target.numel for target in plan.targets)


@pytest.mark.parametrize("offload", [("none", "none"), ("cpu", "none"), ("cpu", "cpu")])
@pytest.mark.parametrize(("world_size", "gpus_per_node"), [(1, 1), (8, 8), (16, 8), (4096, 8)])
def test_the_estimate_equals_deepspeeds(offload: tuple[str, str], world_size: int, gpus_per_node: int) -> None:
    model = replace(MODEL, persistent_elements=0)
    host, device, _ = estimate_zero3_model_states_mem_needs(
        *(model.num_elements, model.largest_layer),
        num_gpus_per_node=gpus_per_node,
        num_nodes=world_size // gpus_per_node,
        cpu_offload=offload[0] != "none",
        cpu_offload_params=offload[1] != "none",
        zero_init=True,
    )
    found = training_needs(model, Setup(world_size, gpus_per_node, *offload))
    assert (found.device_bytes, found.disk_bytes) == (device, 0)
    assert found.host_bytes == pytest.approx(host, abs=1)


def test_the_estimate_goes_by_the_ds_config() -> None:
    plain = training_needs(MODEL, Setup(8, 8))
    assert plain.device_bytes == 4 * B + 18 * B + 2 * MODEL.persistent_elements
    assert plain.device_bytes - training_needs(replace(MODEL, state_bytes=0), Setup(8, 8)).device_bytes == 8 * B
    in_fp32 = training_needs(replace(MODEL, item_bytes=4, persistent_elements=0), Setup(8, 8))
    assert in_fp32.device_bytes == 22 * B + 2 * B + 4 * B  # a partition, and the largest layer with its gradient
    on_nvme = training_needs(MODEL, Setup(16, 8, "nvme", "cpu"))
    on_cpu = training_needs(MODEL, Setup(16, 8, "cpu", "cpu"))
    assert on_nvme.disk_bytes == 8 * B * 12 / 2 and on_cpu.disk_bytes == 0
    assert on_cpu.host_bytes - on_nvme.host_bytes == 8 * B * 12 / 2 * 1.5
    parameters = training_needs(MODEL, Setup(8, 8, "none", "cpu"))
    assert plain.device_bytes - parameters.device_bytes == 2 * 8 * B / 8
    assert parameters.host_bytes - plain.host_bytes == 2 * 8 * B * 1.5


def test_fewer_ranks_on_the_last_node_mean_more_memory_on_each() -> None:
    for offload in ("none", "cpu"):
        full, partly = (training_needs(MODEL, Setup(ranks, 8, offload, offload)) for ranks in (16, 12))
        device = 18 * 8 * B if offload == "none" else 0
        assert partly.device_bytes - full.device_bytes == device // 12 - device // 16
        host = 0 if offload == "none" else 18 * 8 * B * 1.5
        assert partly.host_bytes - full.host_bytes == int(host * 8 / 12) - int(host / 2)


def test_a_layer_in_fp32_and_a_second_copy_of_parameters_count() -> None:
    plain = training_needs(MODEL, Setup(16, 8))
    assert training_needs(MODEL, Setup(16, 8, hpz_ranks=8)).device_bytes - plain.device_bytes == 2 * 8 * B // 8
    in_fp32 = training_needs(replace(MODEL, item_bytes=4, persistent_elements=0), Setup(16, 8))
    assert in_fp32.device_bytes == 8 * B + 20 * 8 * B // 16


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [
        *(({}, 8), ({"type": "AdamW"}, 8), ({"type": "SGD"}, 0), ({"type": "SGD", "params": {"momentum": 0.9}}, 4)),
        *(({"type": "Lion"}, 4), ({"type": "SomethingElse"}, 8)),
    ],
)
def test_a_model_is_read_off_its_plan(optimizer: dict[str, Any], state_bytes: int, tmp_path: Path) -> None:
    plan, _ = planned(tiny_llama(tmp_path), "cpu")
    zero = {"stage": 3, "stage3_param_persistence_threshold": 100}
    settings = read_settings({"zero_optimization": zero, "optimizer": optimizer}, world_size=2)
    model = model_of(plan, settings)
    small = [target.numel for target in plan.targets if target.numel <= 100]
    assert model.persistent_elements == sum(small) > 0
    limited = {**zero, "stage3_model_persistence_threshold": sum(small) - 1}
    fewer = model_of(plan, read_settings({"zero_optimization": limited}, world_size=2))
    assert model.persistent_elements - fewer.persistent_elements == small[-1]
    assert model.num_elements == sum(target.numel for target in plan.targets)
    assert model.largest_layer == max(target.numel for target in plan.targets)  # no layer here has two parameters
    assert (model.item_bytes, model.state_bytes) == (4, state_bytes)


def test_a_verdict_names_what_would_fit() -> None:
    setup = Setup(8, 8)
    fits = judge(MODEL, setup, RANK, PROCESS, Limits(1024 * GIB, 80 * GIB))
    assert fits.fits and fits.world_size == 2 and fits.offloads == ("none", "none")  # 4 + 144 / 2 < 80 GiB
    assert (
        judge(MODEL, Setup(3, 8), RANK, PROCESS, Limits(None, 52 * GIB)).world_size == 3
    )  # 4 + 144 / 3 GB; 4 + 144 / 2 is more
    tight = judge(MODEL, setup, RANK, PROCESS, Limits(1024 * GIB, 12 * GIB))
    assert not tight.fits and tight.world_size == 24 and tight.offloads == ("cpu", "none")  # 4 + 144 / 24 = 10 GB
    hopeless = judge(MODEL, setup, RANK, PROCESS, Limits(GIB, GIB))
    assert (hopeless.fits, hopeless.world_size, hopeless.offloads) == (False, None, None)
    unknown = judge(MODEL, setup, RANK, PROCESS, Limits(None, None))
    assert unknown.fits and [need.available_bytes for need in unknown.needs] == [None] * 4


def test_ranks_on_the_host_share_its_memory() -> None:
    on_device, on_host = (needs_of(MODEL, Setup(4, 4, is_host=each), RANK, PROCESS, Limits()) for each in (False, True))
    assert len(on_host) == 2
    assert on_host[0].needed_bytes == on_device[0].needed_bytes + 4 * on_device[2].needed_bytes
    assert on_device[2].needed_bytes == 2 * 2 * B + MIB


def test_buffers_of_swapped_parameters_stay_in_training() -> None:
    swaps = replace(RANK, swap_bytes=GIB)
    for param, nbytes in (("nvme", 8 * GIB), ("cpu", 0)):
        setup = Setup(16, 8, "cpu", param)
        less, more = (needs_of(MODEL, setup, rank, PROCESS, Limits()) for rank in (RANK, swaps))
        assert [b.needed_bytes - a.needed_bytes for a, b in zip(less, more, strict=True)] == [nbytes, nbytes, 0, 0]
