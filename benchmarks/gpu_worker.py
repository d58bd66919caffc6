"""One rank of `benchmarks.gpu_check`.

Only torch's interface for any accelerator is used, so that what runs on the simulated device runs on a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint import drop_page_cache
from benchmarks.methods import LOADERS, Job, zero3_config
from benchmarks.train import training_losses

MIB = 1 << 20
BLOCK_BYTES = 8 * MIB
"""Of a read, and of a copy, whose rates are measured: as large as those of a load."""

SLOW_S = 0.3
"""Seconds of work that a stream still has to do when a load begins on it."""


@dataclass(frozen=True, slots=True)
class CheckSpec:
    """What the ranks are asked to do; it travels as JSON.

    Attributes:
        tiny: folders of small checkpoints by what they show, for parity.
        large: folder of the checkpoint whose load is timed.
        is_simulated: whether the device is that of tests/device.
        copy_bytes: that each rate of copies is measured with.
    """

    tiny: dict[str, str]
    large: str
    is_simulated: bool
    copy_bytes: int


@dataclass(slots=True)
class CheckResult:
    """What one rank found; it travels as JSON. GB are 1e9 bytes.

    Attributes:
        device: its name.
        checks: "ok", or what was wrong, by check.
        gbps: rates that were measured here: storage (not cached), pinned and pageable copies.
        loads: figures of timed loads by name.
    """

    rank: int
    device: str
    checks: dict[str, str] = field(default_factory=dict)
    gbps: dict[str, float] = field(default_factory=dict)
    loads: dict[str, dict[str, float]] = field(default_factory=dict)


def measure_copies(device: torch.device, num_bytes: int) -> dict[str, float]:
    """Return the rates of copies to the device, from pinned and from pageable memory."""
    there, rates = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=device), {}
    for name, is_pinned in (("pinned", True), ("pageable", False)):
        here = torch.ones(BLOCK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        there.copy_(here)  # the first one is slower
        torch.accelerator.synchronize(device)
        start_s, num_copies = time.perf_counter(), max(1, num_bytes // BLOCK_BYTES)
        for _ in range(num_copies):
            there.copy_(here, non_blocking=is_pinned)
        torch.accelerator.synchronize(device)
        rates[name] = num_copies * BLOCK_BYTES / (time.perf_counter() - start_s) / 1e9
    return rates


def measure_storage(folder: str, rank: int, world_size: int, num_threads: int = 4) -> float:
    """Return at what rate this rank reads its share of the files, while the others read theirs."""
    blocks = [
        (path, start)
        for path in sorted(Path(folder).glob("*.safetensors"))
        for start in range(0, path.stat().st_size, BLOCK_BYTES)
    ][rank::world_size]

    def read(block: tuple[Path, int]) -> int:
        descriptor = os.open(block[0], os.O_RDONLY)
        try:
            return len(os.pread(descriptor, BLOCK_BYTES, block[1]))
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(num_threads) as pool:
        start_s = time.perf_counter()
        num_bytes = sum(pool.map(read, blocks))
        return num_bytes / (time.perf_counter() - start_s) / 1e9


def wrong_tensors(model: Any, reference: Any, rank: int) -> list[str]:
    """Return the names of partitions and buffers that have other bytes than in the ordinary load."""
    wrong = []
    for (name, ours), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        size = ours.ds_tensor.numel()
        expected = whole.detach().flatten()[rank * size : (rank + 1) * size].to(ours.ds_tensor.dtype)
        if not torch.equal(ours.ds_tensor.cpu()[: len(expected)], expected):
            wrong.append(name)
    buffers = dict(reference.named_buffers())
    return wrong + [name for name, ours in model.named_buffers() if not torch.equal(ours.cpu(), buffers[name])]


class Checks:
    """Runs checks on one rank, all in the same order, and notes what came of each."""

    def __init__(self, spec: CheckSpec, group: Any) -> None:
        self.spec, self.group, self.device = spec, group, group.device
        self.result = CheckResult(group.rank, _device_name(group.device))

    def check(self, name: str, run: Callable[[], str]) -> None:
        """Note what `run` says is wrong; an error of one rank is one of all."""
        try:
            found = run()
        except Exception as error:  # noqa: BLE001  whatever it is, it is the result
            found = f"{type(error).__name__}: {error}"
        self.result.checks[name] = found or "ok"
        gc.collect()
        self.group.barrier()

    def load_and_compare(self, path: str, ds_config: dict[str, Any], dtype: torch.dtype, around: Any = None) -> str:
        """Return what differs from the ordinary load; the context manager `around` is around the other load."""
        from transformers import AutoModelForCausalLM

        from lowmem_load import load_model

        with around or contextlib.nullcontext():
            model = load_model(path, ds_config, auto_class="AutoModelForCausalLM")
        reference = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        return ", ".join(wrong_tensors(model, reference, self.group.rank))

    def parity(self) -> None:
        """Every small checkpoint, and every place of partitions, against the ordinary load."""
        bf16, fp32 = zero3_config("bf16"), zero3_config("fp32")
        pinned = {**bf16, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}}
        for name, path in self.spec.tiny.items():
            self.check(f"parity: {name}", lambda path=path: self.load_and_compare(path, bf16, torch.bfloat16))  # type: ignore[misc]
        path = next(iter(self.spec.tiny.values()))
        self.check("parity: cast to fp32", lambda: self.load_and_compare(path, fp32, torch.float32))
        self.check("parity: offload_param cpu, pinned", lambda: self.load_and_compare(path, pinned, torch.bfloat16))

    def training(self) -> None:
        """Losses of a few steps, against stock ZeRO-3.

        transformers 5.15.0 to 5.22.2 rounds buffers to bf16 under ZeRO-3, so both train with the buffers of stock.
        """

        def run() -> str:
            path, config, losses = next(iter(self.spec.tiny.values())), zero3_config("bf16"), {}
            buffers: dict[str, torch.Tensor] = {}
            for method in ("stock", "lowmem"):
                job = Job(Path(path), "bf16", config, self.group.rank, self.group.world_size, self.device)
                model = LOADERS[method](job).model
                buffers = buffers or {name: buffer.clone() for name, buffer in model.named_buffers()}
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
                losses[method] = training_losses(model, config, 3, self.group.rank)
                del model
                gc.collect()
            return "" if losses["stock"] == losses["lowmem"] else f"losses {losses}"

        self.check("training: losses of stock", run)

    def hazards(self) -> None:
        """What makes a device's load wrong where a CPU's is right."""
        path, bf16 = next(iter(self.spec.tiny.values())), zero3_config("bf16")

        def busy_stream() -> str:
            """The memory that a load gets was freed by work of its stream that is still to come."""
            here = torch.ones(64 * MIB, dtype=torch.uint8, device="cpu", pin_memory=True)
            side = torch.Stream(device=self.device)
            with side:
                there = torch.empty_like(here, device=self.device)
                for _ in range(1 + int(SLOW_S * self.result.gbps["pinned"] * 1e9 / here.nbytes)):
                    there.copy_(here, non_blocking=True)
                for size in (1 << power for power in range(9, 23)):  # blocks of any size, full of other bytes
                    torch.empty(size, dtype=torch.uint8, device=self.device).copy_(here[:size], non_blocking=True)
                return self.load_and_compare(path, bf16, torch.bfloat16)

        def default_device() -> str:
            return self.load_and_compare(path, bf16, torch.bfloat16, torch.device(self.device))

        def freed_while_copied() -> str:
            """A pinned partition goes while copies from it are queued."""
            from lowmem_load.ds.partition import new_pinned

            here = torch.zeros(32 * MIB, dtype=torch.uint8, device="cpu", pin_memory=True)
            there, slow = (torch.empty_like(here, device=self.device) for _ in range(2))
            partition = new_pinned(here.numel(), torch.uint8).fill_(7)
            for _ in range(1 + int(SLOW_S * self.result.gbps["pinned"] * 1e9 / here.nbytes)):
                slow.copy_(here, non_blocking=True)
            there.copy_(partition, non_blocking=True)
            del partition
            gc.collect()
            return "" if bool((there == 7).all().item()) else "other bytes arrived"

        self.check("hazard: a stream that is still busy", busy_stream)
        self.check("hazard: a default device", default_device)
        self.check("hazard: pinned memory freed while it is copied", freed_while_copied)

    def timed_loads(self) -> None:
        """Loads of the large checkpoint, not cached and cached, and what they took beside what was measured."""
        self.result.gbps |= measure_copies(self.device, self.spec.copy_bytes)
        self._forget_files()
        self.result.gbps["storage"] = measure_storage(self.spec.large, self.group.rank, self.group.world_size)
        for name, dtype in (("bf16", "bf16"), ("bf16, cached", "bf16"), ("cast to fp32, cached", "fp32")):
            if "cached" not in name:
                self._forget_files()
            self.check(f"memory: {name}", lambda name=name, dtype=dtype: self._timed_load(name, zero3_config(dtype)))  # type: ignore[misc]

    def _forget_files(self) -> None:
        self.group.barrier()
        if self.group.local_rank == 0:
            drop_page_cache(Path(self.spec.large))
        self.group.barrier()

    def _timed_load(self, name: str, ds_config: dict[str, Any]) -> str:
        """Note the figures of a load; return what is wrong with its device memory."""
        from lowmem_load import load_model, load_report
        from lowmem_load.io.uploads import NUM_STREAMS, SLOT_BYTES

        memory = _memory_statistics(self.device)
        memory.reset_peak_memory_stats()
        # What tensors ask for: CUDA's allocator may give a block that is up to 1 MiB larger.
        start = memory.memory_stats()["requested_bytes.all.current"]
        model = load_model(self.spec.large, ds_config)
        report = load_report(model)
        held = [parameter.ds_tensor for parameter in model.parameters()] + list(model.buffers())
        held_bytes = sum(tensor.nbytes for tensor in held)
        above = memory.memory_stats()["requested_bytes.all.peak"] - start - held_bytes
        self.result.loads[name] = {
            "seconds": sum(report.seconds.values()),
            "read_seconds": report.seconds["read"],
            "read_bytes": report.read_bytes,
            "needed_bytes": report.needed_bytes,
            "held_bytes": held_bytes,
            "bytes_above_held": above,
        }
        limit = NUM_STREAMS * SLOT_BYTES if "cast" in name else 0
        return (
            "" if above <= limit else f"{above} bytes of device memory beside what is kept, at most {limit} are stated"
        )


def _memory_statistics(device: torch.device) -> Any:
    module = torch.get_device_module(device)
    return module if hasattr(module, "memory_stats") else torch.accelerator


def _device_name(device: torch.device) -> str:
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else f"{device.type} (simulated)"


def run(fields: dict[str, Any]) -> CheckResult:
    """Run all checks as one of the ranks. Collective."""
    spec = CheckSpec(**fields)
    if spec.is_simulated:
        from tests.device.simulated import install

        install()
    from lowmem_load import DistributedInterface

    checks = Checks(spec, DistributedInterface())
    checks.timed_loads()
    checks.parity()
    checks.hazards()
    checks.training()
    return checks.result
