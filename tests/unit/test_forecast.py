"""What a job will need: figures of plans, DeepSpeed's estimate of training, and the verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from transformers import LlamaConfig, LlamaForCausalLM

from lowmem_load.api.forecast import (
    MIN_PLANNING_BYTES,
    OVERHEAD_BYTES,
    load_bytes,
    load_needs,
    model_of,
    plan_zero3,
    whole_bytes,
)
from lowmem_load.api.plan_model import plan_zero3_rank
from lowmem_load.config.settings import Settings, read_settings
from lowmem_load.hf.remote_names import Checkpoint
from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.planning.training_memory import (
    OFFLOADS,
    Job,
    Model,
    Training,
    activation_bytes,
    fits,
    jobs_of_other_sizes,
    memory_needs,
    partition_places,
    smallest_world_size,
    training_bytes,
)
from tests.builders import tiny_llama, tiny_mixtral

MIB, GIB = 1 << 20, 1 << 30
B = 10**9
MODEL = Model(2 * 8 * B, 8 * B, gathered_bytes=2 * 2 * B, host_bytes=100 * MIB, device_bytes=MIB)
IN_FP32 = replace(MODEL, parameter_bytes=4 * 8 * B, gathered_bytes=2 * 4 * B)
FULL = Training()


def planned(folder: Path, device: str, *, world_size: int = 2, **zero: Any) -> tuple[LoadPlan, Settings]:
    config = {"zero_optimization": {"stage": 3, **zero}, "bf16": {"enabled": True}}
    plan = plan_zero3_rank(folder, config, rank=0, world_size=world_size, device=torch.device(device))
    return plan, read_settings(config, world_size=world_size)


def test_partitions_count_where_they_are_held(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    plan, settings = planned(folder, "cuda")
    whole, partition = whole_bytes(plan), plan.partition_bytes
    on_device = model_of(plan, settings, FULL, 0, is_host=False)
    assert on_device.host_bytes == MIN_PLANNING_BYTES + OVERHEAD_BYTES + 64 * MIB  # two slots of 8 MiB for each thread
    assert on_device.device_bytes == whole + 16 * MIB  # a slot on each of two streams
    assert partition_places(on_device, Job(2, 2), partition) == (0, partition)
    assert partition_places(on_device, Job(2, 2, offload_param="cpu"), partition) == (partition, 0)
    assert partition_places(on_device, Job(2, 2, is_host=True), partition) == (partition, 0)
    on_host = model_of(*planned(folder, "cpu"), FULL, 0, is_host=True)
    assert on_host.device_bytes == 0 and on_host.host_bytes >= whole + OVERHEAD_BYTES
    nvme = {"device": "nvme", "nvme_path": "/x", "buffer_count": 3, "buffer_size": 1000}
    swapped = model_of(*planned(folder, "cuda", offload_param=nvme), FULL, 0, is_host=False)
    assert partition_places(swapped, Job(2, 2, offload_param="nvme"), partition) == (3 * 1000 * 2, 0)


def test_casts_need_temporary_memory(tmp_path: Path) -> None:
    plan, _ = planned(tiny_mixtral(tmp_path, torch.float32), "cpu")
    host, device = load_bytes(plan, is_host=True)
    assert plan.costs.read_bytes == 2 * plan.partition_bytes and plan.costs.staging_bytes > 0
    assert (host, device) == (
        MIN_PLANNING_BYTES + OVERHEAD_BYTES + whole_bytes(plan) + 4 * plan.costs.staging_bytes,
        0,
    )


def test_stock_reads_all_files_on_rank_0(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    job = Job(2, 2, offload_optimizer="cpu", offload_param="cpu")
    planned = plan_zero3(Checkpoint("x", str(folder), None), None, job, FULL, accelerator="cuda")
    plan = planned.plan
    needs = {need.what: need.stock_bytes for need in load_needs(planned)}
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert needs[f"read in {plan.costs.num_reads} reads"] == files
    assert needs["peak of host memory"] == files + plan.partition_bytes
    assert needs["whole on every rank"] == 2 * max(target.numel for target in plan.targets)


@pytest.mark.parametrize("offload", [("none", "none"), ("cpu", "none"), ("cpu", "cpu")])
@pytest.mark.parametrize(("world_size", "gpus_per_node"), [(1, 1), (8, 8), (16, 8), (4096, 8)])
def test_the_estimate_equals_deepspeeds(offload: tuple[str, str], world_size: int, gpus_per_node: int) -> None:
    host, device, _ = estimate_zero3_model_states_mem_needs(
        *(MODEL.num_trained, B),
        num_gpus_per_node=gpus_per_node,
        num_nodes=world_size // gpus_per_node,
        cpu_offload=offload[0] != "none",
        cpu_offload_params=offload[1] != "none",
        zero_init=True,
    )
    found = training(MODEL, world_size, gpus_per_node, *offload)
    assert (found[0], found[2]) == (device, 0)
    created = B * 4 * min(world_size, gpus_per_node) * 1.5  # a layer in fp32, while stock creates it
    assert found[1] == pytest.approx(host - created * (offload[0] == "none"), abs=1)


def training(
    model: Model, world_size: int, gpus_per_node: int, optimizer: str = "none", param: str = "none", hpz_ranks: int = 0
) -> tuple[int, int, int]:
    job = Job(world_size, gpus_per_node, offload_optimizer=optimizer, offload_param=param, hpz_ranks=hpz_ranks)
    return training_bytes(model, job)


def test_the_estimate_goes_by_the_ds_config() -> None:
    device, host, _ = training(MODEL, 8, 8)
    assert device == 4 * B + 18 * B
    assert device - training(replace(MODEL, state_bytes=4), 8, 8)[0] == 8 * B
    in_fp32 = training(IN_FP32, 8, 8)
    assert in_fp32[0] == 22 * B + 2 * B + 4 * B  # a partition, and the largest layer with its gradient
    _, on_nvme, disk = training(MODEL, 16, 8, "nvme", "cpu")
    _, on_cpu, no_disk = training(MODEL, 16, 8, "cpu", "cpu")
    assert disk == 8 * B * 12 / 2 and no_disk == 0
    assert on_cpu - on_nvme == 8 * B * 12 / 2 * 1.5
    offloaded = training(MODEL, 8, 8, "none", "cpu")
    assert device - offloaded[0] == 2 * 8 * B / 8
    assert offloaded[1] - host == 2 * 8 * B * 1.5


def test_fewer_ranks_on_the_last_node_mean_more_memory_on_each() -> None:
    for offload in ("none", "cpu"):
        full, partly = (training(MODEL, ranks, 8, offload, offload) for ranks in (16, 12))
        device = 18 * 8 * B if offload == "none" else 0
        assert partly[0] - full[0] == device // 12 - device // 16
        host = 0 if offload == "none" else 18 * 8 * B * 1.5
        assert partly[1] - full[1] == int(host * 8 / 12) - int(host / 2)


@pytest.mark.parametrize(
    ("numel", "largest", "measured"),
    [(60_039_680, 16_384_000, 1572 + 1527), (122_000_000, 0, 5.61 * 1024)],
)
def test_the_estimate_on_cpus_is_what_was_measured(numel: int, largest: int, measured: float) -> None:
    """MiB of anonymous memory of two ranks that trained in bf16 with torch's AdamW, under DeepSpeed 0.19.8."""
    gathered_bytes = 2 * (3 * numel + largest)
    model = Model(2 * numel, numel, step_bytes=2 + 8, gathered_bytes=gathered_bytes)
    need = memory_needs(model, Job(2, 2, is_host=True))[1]
    assert need.needed_bytes == pytest.approx(measured * MIB, rel=0.1)


def test_a_layer_in_fp32_and_a_second_copy_of_parameters_count() -> None:
    assert training(MODEL, 16, 8, hpz_ranks=8)[0] - training(MODEL, 16, 8)[0] == 2 * 8 * B // 8
    in_fp32 = training(IN_FP32, 16, 8)
    assert in_fp32[0] == 8 * B + 20 * 8 * B // 16


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [({}, 8), ({"type": "AdamW"}, 8), ({"type": "SGD"}, 4), ({"type": "Lion"}, 4), ({"type": "SomethingElse"}, 8)],
)
def test_a_model_is_read_off_its_plan(optimizer: dict[str, Any], state_bytes: int, tmp_path: Path) -> None:
    plan, _ = planned(tiny_llama(tmp_path), "cpu")
    settings = read_settings({"zero_optimization": {"stage": 3}, "optimizer": optimizer}, world_size=2)
    model = model_of(plan, settings, FULL, 0, is_host=True)
    largest = max(target.numel for target in plan.targets)  # no layer here has two parameters
    assert model.num_trained == sum(target.numel for target in plan.targets)
    # DeepSpeed may keep so small a model gathered, and reduces its gradients from a copy of the bucket.
    assert model.gathered_bytes == 4 * (3 * model.num_trained + largest)
    assert model.step_bytes == (4 if optimizer else 4 + 8)  # a gradient; and what torch's AdamW makes
    on_device = model_of(plan, settings, FULL, 0, is_host=False)
    assert (on_device.step_bytes, on_device.gathered_bytes) == (0, 4 * (model.num_trained + int(5e8) + largest))
    few = {"stage": 3, "stage3_max_live_parameters": 0, "reduce_bucket_size": 10}
    gathers_one = read_settings({"zero_optimization": few, "optimizer": optimizer}, world_size=2)
    assert model_of(plan, gathers_one, FULL, 0, is_host=True).gathered_bytes == 4 * (2 * largest + 2 * 10)
    assert (model.parameter_bytes, model.state_bytes) == (2 * model.num_trained, 4 + state_bytes)
    adapters = model_of(plan, settings, Training(lora_rank=2), 1000, is_host=True)
    assert adapters.num_trained == 1000
    assert adapters.parameter_bytes == model.parameter_bytes + 4 * 1000
    assert model_of(plan, settings, Training(share=0.5), 0, is_host=True).num_trained == model.num_trained // 2


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_activations_are_about_what_autograd_keeps(is_checkpointed: bool) -> None:
    """But for the loss, of which autograd keeps 4 of 12 bytes for each token and vocabulary entry."""
    sizes = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4, vocab_size=64)
    config, tokens, layers = LlamaConfig(num_hidden_layers=8, **sizes), 64, 8
    model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    if is_checkpointed:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(0, 64, (1, tokens))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert loss.requires_grad
    loss_bytes = 12 * 64 * tokens
    estimate = activation_bytes(config, Training(tokens=tokens, is_checkpointed=is_checkpointed)) - loss_bytes
    recomputed = tokens * (24 * 128 + 8 * 256) if is_checkpointed else 0
    assert 0.7 * (estimate - recomputed) < sum(kept.values()) < 1.3 * estimate, layers


def test_a_verdict_names_what_would_fit() -> None:
    def is_enough(host: int | None, device: int | None, world_size: int = 8, **offload: str) -> bool:
        job = Job(world_size, 8, host, device, **offload)
        return fits(MODEL, job)

    def offloads(host: int, device: int) -> list[bool]:
        return [is_enough(host, device, offload_optimizer=one, offload_param=other) for one, other in OFFLOADS.values()]

    assert is_enough(1024 * GIB, 80 * GIB, 2) and not is_enough(1024 * GIB, 80 * GIB, 1)  # 4 + 144 / 2 < 80 GiB
    assert is_enough(None, 52 * GIB, 3) and not is_enough(None, 52 * GIB, 2)  # 4 + 144 / 3 GB; 4 + 144 / 2 is more
    assert is_enough(1024 * GIB, 12 * GIB, 24) and not is_enough(1024 * GIB, 12 * GIB, 16)  # 4 + 144 / 24 = 10 GB
    assert offloads(1024 * GIB, 12 * GIB) == [False, True, True] and not any(offloads(GIB, GIB))
    assert is_enough(None, None)
    sizes = [job.world_size for job in jobs_of_other_sizes(Job(3, 8))]
    assert sizes[:7] == [1, 2, 3, 4, 8, 16, 24] and sizes[-1] == 8192
    assert smallest_world_size(MODEL, Job(8, 8, 1024 * GIB, 12 * GIB)) == 24
    mesh = Job(16, 8, None, 12 * GIB, num_shards=8)  # two replicas
    assert smallest_world_size(MODEL, mesh) == 40


def test_ranks_on_the_host_share_its_memory() -> None:
    in_host = replace(MODEL, host_bytes=MODEL.host_bytes + MODEL.device_bytes, device_bytes=0)
    on_device = memory_needs(MODEL, Job(4, 4))
    on_host = memory_needs(in_host, Job(4, 4, is_host=True))
    assert (len(on_device), len(on_host)) == (4, 2)
    for host, of_host, of_device in zip(on_host, on_device, on_device[2:], strict=False):
        assert host.needed_bytes == of_host.needed_bytes + 4 * of_device.needed_bytes
    assert on_device[2].needed_bytes == 2 * 2 * B + MIB


def test_buffers_of_swapped_parameters_stay_in_training() -> None:
    swaps = replace(MODEL, swap_bytes=GIB)
    for param, nbytes in (("nvme", 8 * GIB), ("cpu", 0)):
        job = Job(16, 8, offload_optimizer="cpu", offload_param=param)
        less, more = (memory_needs(model, job)[:4] for model in (MODEL, swaps))
        assert [b.needed_bytes - a.needed_bytes for a, b in zip(less, more, strict=True)] == [nbytes, nbytes, 0, 0]
