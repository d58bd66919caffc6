"""Lazy models on the simulated device: moved without a read, read straight to the device, sharded by slices."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import lowmem_load
from lowmem_load.integrations.accelerate import is_for_fsdp2
from lowmem_load.symbolic.lazy import is_unread
from tests import builders
from tests.device.test_loads import copies, ordinary
from tests.multi_rank.test_accelerate_fsdp2 import ENVIRONMENT
from tests.ranks import SIMULATED, run_ranks


def move_and_run(path: str) -> None:
    """Rank function: the values come at the forward, through pinned memory."""
    from tests.device.simulated import reset

    tokens = torch.arange(1, 9)[None].to("sim")
    model = lowmem_load.lazy(path, dtype=torch.bfloat16)
    parameters = list(model.parameters())
    model.to("sim")
    assert lowmem_load.get_load_report(model).read_bytes == 0
    assert all(map(is_unread, model.parameters()))
    assert {parameter.device.type for parameter in model.parameters()} == {"sim"}
    assert torch.ones_like(model.lm_head.weight).device.type == "sim"
    reset()
    with torch.no_grad():
        logits = model(tokens).logits
    counted = copies()
    assert not [kind for kind in counted if "pageable to device" in kind], counted
    assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in parameters]
    assert not any(map(is_unread, model.parameters()))
    expected: Any = ordinary(path, torch.bfloat16).to("sim")
    with torch.no_grad():
        assert torch.equal(logits.cpu(), expected(tokens).logits.cpu())
    for (name, ours), (_, theirs) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu()), name


def shard_on_device(path: str) -> None:
    """Rank function: `fully_shard` moves a model to the device before it cuts it up, and reads slices all the same."""
    torch.distributed.init_process_group("sim:simccl,cpu:gloo")
    mesh = torch.distributed.init_device_mesh("sim", (2,))
    size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    model = lowmem_load.lazy(path, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert 0.4 < lowmem_load.get_load_report(model).read_bytes / size < 0.55
    expected = ordinary(path, torch.float32)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert ours.to_local().device.type == "sim"
        assert torch.equal(ours.full_tensor().cpu(), theirs), name


def load_by_device_map(path: str) -> None:
    """Rank function: under `install` a device_map that names this rank's device gives a lazy model there."""
    torch.distributed.init_process_group("sim:simccl,cpu:gloo")
    rank = torch.distributed.get_rank()
    torch.accelerator.set_device_index(rank)
    own: list[Any] = [rank, f"sim:{rank}", "sim", torch.device("sim", rank), "cpu"]
    for place in own:
        assert is_for_fsdp2({"device_map": place}) and is_for_fsdp2({"device_map": {"": place}}), place
    for place in (1 - rank, "auto", {"": 1 - rank}, {"": rank, "lm_head": rank}, {"model": rank}):
        assert not is_for_fsdp2({"device_map": place}), place
    lowmem_load.install()
    warnings.simplefilter("error", lowmem_load.FallbackWarning)
    model = AutoModelForCausalLM.from_pretrained(path, device_map={"": rank})
    assert all(map(is_unread, model.parameters()))
    assert {parameter.device for parameter in model.parameters()} == {torch.device("sim", rank)}
    expected = ordinary(path, torch.float32)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs.to(ours.dtype)), name


@pytest.mark.filterwarnings("ignore")
def test_a_device_map_of_this_ranks_device(checkpoints: Path) -> None:
    run_ranks(load_by_device_map, str(builders.tiny_llama(checkpoints)), env=SIMULATED | ENVIRONMENT)


@pytest.mark.filterwarnings("ignore")
def test_a_model_moves_unread_and_is_read_to_the_device(checkpoints: Path) -> None:
    run_ranks(move_and_run, str(builders.tiny_llama(checkpoints)), world_size=1, env=SIMULATED)


@pytest.mark.filterwarnings("ignore")
def test_fully_shard_reads_slices_to_the_device(checkpoints: Path) -> None:
    run_ranks(shard_on_device, str(builders.tiny_llama(checkpoints)), env=SIMULATED)
