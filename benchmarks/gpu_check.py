"""Checks lowmem_load on the GPUs of this machine, in one command: python -m benchmarks.gpu_check.

Small checkpoints against ordinary loads, training against default ZeRO-3, what goes wrong on a device only, and device
memory. How long a load takes there, `benchmarks.compare` says. With --simulated it runs on the simulated device of
tests/device, and says so. Only torch's interface for any accelerator is used, so what runs there runs on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.launch import REPOSITORY, run_on_ranks
from benchmarks.methods import LOADERS, Job, zero3_config
from benchmarks.results import log, machine_lines
from benchmarks.train import training_losses

SIMULATED = "SIMULATED DEVICE: no GPU was used."
MIB = 1 << 20

SLOW_S = 0.3
"""Seconds of work that a stream still has to do when a load begins on it."""

LARGE = {"vocab_size": 40_000, "hidden_size": 256, "num_attention_heads": 4}
"""Makes partitions of several MB."""


def checkpoints(folder: Path) -> dict[str, str]:
    """Return small checkpoints by what they show: as it lies, cast and sharded, tied, fused on load, larger."""
    from tests import builders

    made = {
        "llama": builders.tiny_llama(folder),
        "llama, odd sizes, sharded, cast": builders.tiny_llama(folder, torch.float32, "20KB", **builders.ODD_SIZES),
        "qwen2, tied": builders.tiny_qwen2_tied(folder),
        "mixtral, experts fused on load": builders.tiny_mixtral(folder),
        "llama, larger": builders.tiny_llama(folder, **LARGE),
    }
    return {name: str(path) for name, path in made.items()}


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

    def __init__(self, tiny: dict[str, str], group: Any) -> None:
        self.tiny, self.group, self.device = tiny, group, group.device
        self.results: dict[str, str] = {}

    def check(self, name: str, run: Callable[[], str]) -> None:
        """Note what `run` says is wrong; an error of one rank is one of all."""
        try:
            found = run()
        except Exception as error:  # noqa: BLE001  whatever it is, it is the result
            found = f"{type(error).__name__}: {error}"
        self.results[name] = found or "ok"
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
        for name, path in self.tiny.items():
            self.check(f"parity: {name}", lambda path=path: self.load_and_compare(path, bf16, torch.bfloat16))  # type: ignore[misc]
        path = next(iter(self.tiny.values()))
        self.check("parity: cast to fp32", lambda: self.load_and_compare(path, fp32, torch.float32))
        self.check("parity: offload_param cpu, pinned", lambda: self.load_and_compare(path, pinned, torch.bfloat16))

    def training(self) -> None:
        """Losses of a few steps, against default ZeRO-3.

        transformers 5.15.0 to 5.22.2 rounds buffers to bf16 under ZeRO-3, so both train with the default buffers.
        """

        def run() -> str:
            path, config, losses = next(iter(self.tiny.values())), zero3_config("bf16"), {}
            buffers: dict[str, torch.Tensor] = {}
            for method in ("default", "lowmem"):
                job = Job(Path(path), "bf16", config, self.group.rank, self.group.world_size, self.device)
                model = LOADERS[method](job).model
                buffers = buffers or {name: buffer.clone() for name, buffer in model.named_buffers()}
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
                losses[method] = training_losses(model, config, 3, self.group.rank)
                del model
                gc.collect()
            return "" if losses["default"] == losses["lowmem"] else f"losses {losses}"

        self.check("training: losses of the default loader", run)

    def hazards(self) -> None:
        """What makes a device's load wrong where a CPU's is right."""
        path, bf16 = next(iter(self.tiny.values())), zero3_config("bf16")

        def busy_stream() -> str:
            """The memory that a load gets was freed by work of its stream that is still to come."""
            here = torch.ones(64 * MIB, dtype=torch.uint8, device="cpu", pin_memory=True)
            side = torch.Stream(device=self.device)
            with side:
                there = torch.empty_like(here, device=self.device)
                for _ in range(self._slow_copies(here)):
                    there.copy_(here, non_blocking=True)
                for size in (1 << power for power in range(9, 23)):  # blocks of any size, full of other bytes
                    torch.empty(size, dtype=torch.uint8, device=self.device).copy_(here[:size], non_blocking=True)
                return self.load_and_compare(path, bf16, torch.bfloat16)

        def default_device() -> str:
            return self.load_and_compare(path, bf16, torch.bfloat16, torch.device(self.device))

        def freed_while_copied() -> str:
            """A pinned partition goes while copies from it are queued."""
            from lowmem_load.engines.partition import new_pinned

            here = torch.zeros(32 * MIB, dtype=torch.uint8, device="cpu", pin_memory=True)
            there, slow = (torch.empty_like(here, device=self.device) for _ in range(2))
            partition = new_pinned(here.numel(), torch.uint8).fill_(7)
            for _ in range(self._slow_copies(here)):
                slow.copy_(here, non_blocking=True)
            there.copy_(partition, non_blocking=True)
            del partition
            gc.collect()
            return "" if bool((there == 7).all().item()) else "other bytes arrived"

        self.check("hazard: a stream that is still busy", busy_stream)
        self.check("hazard: a default device", default_device)
        self.check("hazard: pinned memory freed while it is copied", freed_while_copied)

    def _slow_copies(self, memory: torch.Tensor) -> int:
        """Return how many copies of pinned memory to the device take `SLOW_S`."""
        there = torch.empty_like(memory, device=self.device)
        there.copy_(memory)  # the first one is slower
        torch.accelerator.synchronize(self.device)
        start = time.perf_counter()
        there.copy_(memory)
        torch.accelerator.synchronize(self.device)
        return 1 + int(SLOW_S / (time.perf_counter() - start))

    def memory(self) -> None:
        """Device memory of a load in addition to what is kept."""
        self.check("memory: bf16", lambda: self._memory_of_a_load(zero3_config("bf16"), 0))
        from lowmem_load.files.uploads import NUM_STREAMS, SLOT_BYTES

        limit = NUM_STREAMS * SLOT_BYTES
        self.check("memory: cast to fp32", lambda: self._memory_of_a_load(zero3_config("fp32"), limit))

    def _memory_of_a_load(self, ds_config: dict[str, Any], limit: int) -> str:
        from lowmem_load import load_model

        module = torch.get_device_module(self.device)
        statistics: Any = module if hasattr(module, "memory_stats") else torch.accelerator
        statistics.reset_peak_memory_stats()
        # What tensors ask for: CUDA's allocator may give a block that is up to 1 MiB larger.
        start = statistics.memory_stats()["requested_bytes.all.current"]
        model = load_model(self.tiny["llama, larger"], ds_config)
        kept = [parameter.ds_tensor for parameter in model.parameters()] + list(model.buffers())
        above = statistics.memory_stats()["requested_bytes.all.peak"] - start - sum(tensor.nbytes for tensor in kept)
        if above <= limit:
            return ""
        return f"{above} bytes of device memory in addition to what is kept, at most {limit} are stated"


def run(tiny: dict[str, str], is_simulated: bool) -> dict[str, str]:
    """Run all checks as one of the ranks; return "ok", or what is wrong, by check. Collective."""
    if is_simulated:
        from tests.device.simulated import install

        install()
    from lowmem_load.distributed.process_group import DistributedInterface

    checks = Checks(tiny, DistributedInterface())
    checks.parity()
    checks.memory()
    checks.hazards()
    checks.training()
    return checks.results


def failures(results: Sequence[dict[str, str]]) -> list[str]:
    """Return a line for each check that was not right on some rank."""
    return [
        f"{name}, rank {rank}: {text}"
        for rank, checks in enumerate(results)
        for name, text in checks.items()
        if text != "ok"
    ]


def num_devices(is_simulated: bool) -> int:
    """Return how many ranks there can be; raises SystemExit where there is no accelerator."""
    if is_simulated:
        return 2  # unless SIM_DEVICES says otherwise, which the ranks see
    if not torch.accelerator.is_available():
        raise SystemExit("gpu_check: torch finds no accelerator on this machine; --simulated runs on the simulated one")
    return torch.accelerator.device_count()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, help="one for each device by default")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "gpu_check", help="logs")
    parser.add_argument("--simulated", action="store_true", help="on the simulated device of tests/device")
    options = parser.parse_args(arguments)
    num_ranks = options.ranks or num_devices(options.simulated)
    with tempfile.TemporaryDirectory() as folder:
        args = checkpoints(Path(folder)), options.simulated
        results = run_on_ranks(run, *args, out=options.out, world_size=num_ranks, on_gpu=not options.simulated)
    wrong = failures(results)
    log("\n".join([*([SIMULATED] if options.simulated else []), *machine_lines(), *wrong]))
    log(f"{len(results[0])} checks on each of {num_ranks} ranks, {len(wrong)} failed")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
