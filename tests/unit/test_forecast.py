"""What a job will need: arithmetic on plans, DeepSpeed's estimate and its corrections, the verdict."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowmem_load.errors import ConfigError
from lowmem_load.forecast.load import OVERHEAD_BYTES, rank_needs
from lowmem_load.forecast.stock import stock_needs
from lowmem_load.forecast.together import node_reads
from lowmem_load.forecast.training import Model, Setup, model_of, training_needs
from lowmem_load.forecast.verdict import Fixed, Limits, judge, needs_of
from lowmem_load.load.plan import plan_ranks
from lowmem_load.planning import expression as ex
from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.planning.reads import ReadCost
from lowmem_load.plots import new_figure
from lowmem_load.settings.settings import Settings, read_settings
from tests.builders import tiny_llama, tiny_mixtral
from tests.together import plan_of

MIB, GIB = 1 << 20, 1 << 30
B = 10**9
MODEL = Model(8 * B, B, 10, 1000, 2, "AdamW", 8)
FIXED = Fixed(process_bytes=GIB, shared_bytes=GIB, host_bytes=100 * MIB, device_bytes=MIB, is_host=False)


def planned(folder: Path, device: str, *, world_size: int = 2, **zero: Any) -> tuple[LoadPlan, Settings]:
    config = {"zero_optimization": {"stage": 3, **zero}, "bf16": {"enabled": True}}
    (plan,) = plan_ranks(folder, config, ranks=[0], world_size=world_size, device=torch.device(device))
    return plan, read_settings(config, world_size=world_size)


def test_partitions_are_held_where_they_go(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    on_cpu = rank_needs(*planned(folder, "cpu"), is_host=True, num_threads=1)
    assert (on_cpu.host_bytes, on_cpu.device_bytes) == (on_cpu.partition_bytes + on_cpu.whole_bytes, 0)
    assert on_cpu.host_peak_bytes >= on_cpu.host_bytes + OVERHEAD_BYTES and on_cpu.device_peak_bytes == 0
    on_device = rank_needs(*planned(folder, "cuda"), is_host=False, num_threads=3)
    assert (on_device.host_bytes, on_device.device_bytes) == (0, on_cpu.host_bytes)
    assert on_device.host_peak_bytes - on_device.host_bytes >= OVERHEAD_BYTES + 64 * MIB  # 6 slots are rounded up to 8
    offloaded = rank_needs(*planned(folder, "cuda", offload_param={"device": "cpu"}), is_host=False, num_threads=1)
    assert (offloaded.host_bytes, offloaded.device_bytes) == (offloaded.partition_bytes, offloaded.whole_bytes)
    nvme = {"device": "nvme", "nvme_path": "/x", "buffer_count": 3, "buffer_size": 1000}
    swapped = rank_needs(*planned(folder, "cuda", offload_param=nvme), is_host=False, num_threads=1)
    assert (swapped.disk_bytes, swapped.host_bytes) == (swapped.partition_bytes, 3 * 1000 * 2)


def test_reads_are_those_of_the_plan(tmp_path: Path) -> None:
    plan, settings = planned(tiny_mixtral(tmp_path, torch.float32), "cpu")
    needs = rank_needs(plan, settings, is_host=True, num_threads=2)
    assert sum(nbytes * number for nbytes, number in needs.read_sizes.items()) == plan.read_bytes
    assert sum(needs.read_sizes.values()) == plan.num_reads == needs.num_reads
    assert needs.host_peak_bytes - needs.host_bytes - plan.planning_bytes - OVERHEAD_BYTES == 2 * MIB  # cast: staged


def test_what_the_ranks_of_a_node_read_together_is_counted_once() -> None:
    """Eight of 16 ranks hold one of two transposed experts, of which each alone reads along all rows."""
    turned = ex.permute(ex.Source("data", "w", 0, (2, 1024, 25_600), torch.bfloat16), (0, 2, 1))
    slow, nbytes = ReadCost(1e-3, 5e8), 1024 * 25_600 * 2
    plans = [plan_of(turned, 16, slow, rank) for rank in range(8)]
    found = node_reads(plans)
    assert found is not None and (found.num_ranks, found.shared_bytes) == (8, nbytes)
    assert 7 * nbytes < found.alone_bytes < 8 * nbytes
    assert (found.alone_block_bytes, found.shared_block_bytes) == (found.alone_bytes, found.shared_bytes)
    run = ex.Source("data", "w", 0, (1 << 16, 1 << 12), torch.bfloat16)
    of_blocks = [plan_of(run, 2048, ReadCost(1e-3, 5e8, 1 << 26), rank) for rank in range(8)]
    blocks = node_reads(of_blocks)
    assert blocks is not None and (blocks.alone_bytes, blocks.alone_block_bytes) == (2 << 20, 8 << 26)
    assert (blocks.shared_bytes, blocks.shared_block_bytes) == (2 << 20, 1 << 26)
    assert node_reads(plans[:1]) is node_reads([plan_of(turned, 16, ReadCost(), rank) for rank in range(8)]) is None


def test_stock_reads_all_files_on_rank_0(tmp_path: Path) -> None:
    plan, _ = planned(tiny_llama(tmp_path), "cpu")
    stock = stock_needs(plan, held_on_host_bytes=1000)
    files = sum(path.stat().st_size for path in tiny_llama(tmp_path).glob("*.safetensors"))
    assert (stock.read_bytes, stock.host_peak_bytes) == (files, files + 1000)
    assert stock.collective_bytes == 3 * 2 * sum(target.numel for target in plan.targets)
    assert stock.whole_parameter_bytes == 2 * max(target.numel for target in plan.targets)


def test_the_estimate_is_deepspeeds_for_what_it_knows() -> None:
    needs = training_needs(MODEL, Setup(8, 8))
    assert needs.deepspeed_device_bytes == 4 * B + 18 * B
    assert needs.device_bytes == needs.deepspeed_device_bytes + 2 * MODEL.persistent_elements
    assert needs.host_bytes == needs.deepspeed_host_bytes == 4 * B * 8 * 1.5
    offloaded = training_needs(MODEL, Setup(8, 8, "cpu", "cpu"))
    assert (offloaded.deepspeed_device_bytes, offloaded.host_bytes) == (4 * B, 8 * 18 * B * 1.5)


def test_the_estimate_is_corrected_by_the_ds_config() -> None:
    plain = training_needs(MODEL, Setup(8, 8))
    assert plain.device_bytes - training_needs(replace(MODEL, state_bytes=0), Setup(8, 8)).device_bytes == 8 * B
    in_fp32 = training_needs(replace(MODEL, item_bytes=4, persistent_elements=0), Setup(8, 8))
    assert in_fp32.device_bytes == plain.deepspeed_device_bytes + 2 * B + 4 * B  # a partition, and the largest layer
    on_nvme = training_needs(MODEL, Setup(16, 8, "nvme", "cpu"))
    on_cpu = training_needs(MODEL, Setup(16, 8, "cpu", "cpu"))
    assert on_nvme.disk_bytes == 8 * B * 12 / 2 and on_cpu.disk_bytes == 0
    assert on_cpu.host_bytes - on_nvme.host_bytes == 8 * B * 12 / 2 * 1.5


def test_a_last_node_that_is_not_full_leaves_more_to_each_rank() -> None:
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
def test_what_matters_of_a_model_is_read_off_its_plan(
    optimizer: dict[str, Any], state_bytes: int, tmp_path: Path
) -> None:
    plan, _ = planned(tiny_llama(tmp_path), "cpu")
    zero = {"stage": 3, "stage3_param_persistence_threshold": 100}
    settings = read_settings({"zero_optimization": zero, "optimizer": optimizer}, world_size=2)
    model = model_of(plan, settings)
    small = [target.numel for target in plan.targets if target.numel <= 100]
    assert (model.persistent_parameters, model.persistent_elements) == (len(small), sum(small)) and small
    limited = {**zero, "stage3_model_persistence_threshold": sum(small) - 1}
    fewer = model_of(plan, read_settings({"zero_optimization": limited}, world_size=2))
    assert fewer.persistent_parameters == len(small) - 1
    assert model.num_elements == sum(target.numel for target in plan.targets)
    assert model.largest_layer == max(target.numel for target in plan.targets)  # no layer here has two parameters
    assert (model.item_bytes, model.state_bytes) == (4, state_bytes)


def test_a_verdict_names_what_would_fit() -> None:
    setup = Setup(8, 8)
    fits = judge(MODEL, setup, FIXED, Limits(1024 * GIB, 80 * GIB))
    assert fits.fits and fits.world_size == 2 and fits.offloads == ("none", "none")  # 4 + 144 / 2 < 80 GiB
    assert (
        judge(MODEL, Setup(3, 8), FIXED, Limits(None, 52 * GIB)).world_size == 3
    )  # 4 + 144 / 3 GB; 4 + 144 / 2 is more
    tight = judge(MODEL, setup, FIXED, Limits(1024 * GIB, 12 * GIB))
    assert not tight.fits and tight.world_size == 24 and tight.offloads == ("cpu", "none")  # 4 + 144 / 24 = 10 GB
    hopeless = judge(MODEL, setup, FIXED, Limits(GIB, GIB))
    assert (hopeless.fits, hopeless.world_size, hopeless.offloads) == (False, None, None)
    unknown = judge(MODEL, setup, FIXED, Limits(None, None))
    assert unknown.fits and [need.available_bytes for need in unknown.needs] == [None] * 4


def test_ranks_on_the_host_share_its_memory() -> None:
    on_device, on_host = (
        needs_of(MODEL, Setup(4, 4), replace(FIXED, is_host=each), Limits(None, None)) for each in (False, True)
    )
    assert len(on_host) == 2
    assert on_host[0].needed_bytes == on_device[0].needed_bytes + 4 * on_device[2].needed_bytes
    assert on_device[2].needed_bytes == 2 * 2 * B + MIB


def test_buffers_of_swapped_parameters_stay_in_training() -> None:
    swaps = replace(FIXED, swap_bytes=GIB)
    for param, nbytes in (("nvme", 8 * GIB), ("cpu", 0)):
        setup = Setup(16, 8, "cpu", param)
        less, more = (needs_of(MODEL, setup, fixed, Limits(None, None)) for fixed in (FIXED, swaps))
        assert [b.needed_bytes - a.needed_bytes for a, b in zip(less, more, strict=True)] == [nbytes, nbytes, 0, 0]


def test_pictures_need_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'lowmem-load\[plots\]'"):
        new_figure(1, 1)
