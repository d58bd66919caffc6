"""Loads on the simulated device: memory and copies as stated, whatever stream, default device or offload there is."""

import contextlib
import gc
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from lowmem_load import get_load_report, load_model, plan
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.engines.partition import MIN_REGISTERED_BYTES
from lowmem_load.errors import RankError
from lowmem_load.files import executor
from lowmem_load.files.remote_file import MAX_IN_FLIGHT
from lowmem_load.files.uploads import NUM_STREAMS, SLOT_BYTES
from lowmem_load.integrations.install import streaming
from tests import builders
from tests.model_digest import model_digest
from tests.parity import BF16, FP32, differences
from tests.ranks import SIMULATED, run_ranks

VOCAB_SIZE = 40_000
"""Makes partitions of several MB."""


def loaded(path: str, ds_config: dict[str, Any]) -> Any:
    from tests.device.simulated import reset

    gc.collect()  # what an earlier load left on the device must not go in the middle of this one, which measures
    reset()
    return load_model(path, ds_config, auto_class="AutoModelForCausalLM")


def ordinary(path: str, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def copies() -> dict[str, int]:
    """Returns the bytes copied by kind, and how often the host waited for a stream or a device."""
    from tests.device.simulated import counters

    waits = ("stream synchronised", "device synchronised")
    kinds = ("to device", "to host", "host temporary", "pinned memory", "host memory")
    found = counters()
    counted = {kind: num_bytes for kind, (_, num_bytes) in found.items() if kind.startswith(kinds)}
    return counted | {"waits": sum(found.get(wait, (0, 0))[0] for wait in waits)}


def check_what_is_stated(model: Any, staging_bytes: int) -> None:
    report, counted = get_load_report(model), copies()
    buffer_bytes = sum(-(-buffer.nbytes // 512) * 512 for buffer in model.buffers())  # as they are allocated
    held_bytes = sum(-(-parameter.ds_tensor.nbytes // 512) * 512 for parameter in model.parameters())
    assert 0 <= report.peak_device_bytes - held_bytes - buffer_bytes <= staging_bytes, report
    assert not [kind for kind in counted if "pageable" in kind or "blocking" in kind or "temporary" in kind], counted
    assert counted["waits"] == 1, counted
    assert "device memory: " in str(report)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def load_in_all_ways(path: str) -> None:
    device = f"sim:{DistributedInterface().rank}"
    bf16, fp32 = ordinary(path, torch.bfloat16), ordinary(path, torch.float32)

    model = loaded(path, BF16)
    check_what_is_stated(model, staging_bytes=0)
    assert {parameter.ds_tensor.device for parameter in model.parameters()} == {torch.device(device)}
    assert {buffer.device for buffer in model.buffers()} == {torch.device(device)}
    assert differences(model, bf16) == []

    model = loaded(path, FP32)  # what the file holds is copied, half as much as what is kept
    check_what_is_stated(model, staging_bytes=NUM_STREAMS * SLOT_BYTES)
    copied = sum(num_bytes for kind, num_bytes in copies().items() if kind == "to device, pinned")
    assert copied < 0.6 * sum(parameter.ds_tensor.nbytes for parameter in model.parameters())
    assert differences(model, fp32) == []

    for context in (torch.device(device), default_device(device)):
        with context:
            model = loaded(path, BF16)
        assert differences(model, bf16) == []


@pytest.fixture
def path(checkpoints: Path) -> str:
    return str(builders.tiny_llama(checkpoints, vocab_size=VOCAB_SIZE))


def do_everything_under_a_default_device(llama: str, bert: str, folder: str) -> None:
    """Rank function, in an image without a compiler, and after the script has set a default device."""
    os.environ |= {"PATH": folder, "CXX": f"{folder}/c++", "CC": f"{folder}/cc", "TORCH_EXTENSIONS_DIR": folder}
    group = DistributedInterface()
    torch.manual_seed(0)
    made = AutoModelForSequenceClassification.from_pretrained(bert)  # some of it is drawn
    whole = ordinary(llama, torch.bfloat16)
    config = AutoConfig.from_pretrained(llama)
    with streaming(FP32):
        torch.manual_seed(3)
        drawn = model_digest(AutoModelForCausalLM.from_config(config))
    expected = plan(llama, BF16, rank=group.rank, world_size=group.world_size)
    digest = model_digest(whole)

    with default_device(f"sim:{group.rank}"):
        assert plan(llama, BF16, rank=group.rank, world_size=group.world_size) == expected
        model = load_model(llama, BF16)
        assert model_digest(model) == digest
        torch.manual_seed(group.rank)  # rank 0's counts
        with_head = load_model(bert, FP32, auto_class="AutoModelForSequenceClassification")
        with streaming(FP32):
            torch.manual_seed(3)
            assert model_digest(AutoModelForCausalLM.from_config(config)) == drawn
        assert torch.get_default_device() == torch.device("sim", group.rank)
    assert differences(model, whole) == []
    assert differences(with_head, made) == [], "drawn on the host, as without a default device"
    assert os.listdir(folder) == [], "nothing was compiled"


def test_all_entry_points_work_under_a_default_device_and_compile_nothing(
    path: str, checkpoints: Path, tmp_path: Path
) -> None:
    bert = str(builders.tiny_bert(checkpoints))
    run_ranks(do_everything_under_a_default_device, path, bert, str(tmp_path), env=SIMULATED)


def load_to_pinned_memory(path: str, *, is_cold: bool = False) -> None:
    from tests.device.simulated import counters, reset

    offload = {"offload_param": {"device": "cpu", "pin_memory": True}}
    ordinary_renew = executor.Executor.renew_tasks
    with (
        mock.patch.object(executor, "is_cached", return_value=not is_cold),
        mock.patch.object(executor.Executor, "renew_tasks", autospec=True, side_effect=ordinary_renew) as renewed,
    ):
        model = loaded(path, {**BF16, "zero_optimization": {"stage": 3, **offload}})
    assert [call.args[1] for call in renewed.call_args_list] == [MAX_IN_FLIGHT] * is_cold
    counted = copies()
    sizes = [parameter.ds_tensor.nbytes for parameter in model.parameters()]
    large = [size for size in sizes if size >= MIN_REGISTERED_BYTES]
    assert 0 < len(large) < len(sizes)
    assert all(parameter.ds_tensor.is_pinned() for parameter in model.parameters())
    rounded = sum(large) + len(large) * mmap.PAGESIZE
    assert sum(large) <= counted["host memory registered"] <= rounded, "once, and not as a power of two"
    ring_bytes = counted["pinned memory asked for"] - sum(sizes) + sum(large)
    assert ring_bytes == 4 * SLOT_BYTES, "the ring, for the buffers"
    assert differences(model, ordinary(path, torch.bfloat16)) == []
    reset()
    del model
    gc.collect()
    assert counters()["host memory given back"][0] == len(large)


def load_cold_files_to_pinned_memory(path: str) -> None:
    """Rank function: more threads read, which share the ring of the few for the device."""
    load_to_pinned_memory(path, is_cold=True)


def free_pinned_memory_too_early(path: str) -> bool:
    """Rank function: a partition goes while a copy of it is under way."""
    from tests.device.simulated import set_speed

    offload = {"offload_param": {"device": "cpu", "pin_memory": True}}
    model = loaded(path, {**BF16, "zero_optimization": {"stage": 3, **offload}})
    partition = model.lm_head.weight.ds_tensor
    kept, there = partition.clone(), torch.empty(partition.numel(), dtype=partition.dtype, device="sim")
    assert partition.nbytes >= MIN_REGISTERED_BYTES
    torch.accelerator.synchronize()
    set_speed(partition.nbytes / 0.5e9)  # half a second
    there.copy_(partition, non_blocking=True)
    del model, partition
    gc.collect()
    torch.accelerator.synchronize()
    set_speed()
    return torch.equal(there.cpu(), kept)


def test_pinned_memory_outlives_copies_of_it(path: str) -> None:
    assert run_ranks(free_pinned_memory_too_early, path, world_size=1, env=SIMULATED) == [True]


def run_out_of_memory(path: str) -> None:
    from tests.device.simulated import set_capacity

    if DistributedInterface().rank == 1:
        set_capacity(2 << 20)
    with pytest.raises(RankError, match=r"rank 1: MemoryShortageError: .* Tried to allocate 1280000 bytes"):
        load_model(path, BF16)


@pytest.mark.parametrize(
    "check", [load_in_all_ways, load_to_pinned_memory, load_cold_files_to_pinned_memory, run_out_of_memory]
)
def test_memory(check: Callable[[str], None], path: str) -> None:
    run_ranks(check, path, env=SIMULATED)
