"""The simulated accelerator as torch and DeepSpeed see it: device type "sim", `torch.sim`, backend "simccl".

Importing this makes it the accelerator of the process, for good. A process that is to fork imports it in the child.
"""

import importlib.util
import types
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.device.build import NAME as EXTENSION
from tests.device.build import build

NAME = "sim"
BACKEND = "simccl"


class Copy(NamedTuple):
    """A copy that was made: bytes, seconds of time.perf_counter, and the thread and stream that asked for it."""

    kind: str
    bytes: int
    begin: float
    end: float
    thread: int
    stream: int
    device: int


def _load() -> Any:
    spec = importlib.util.spec_from_file_location(EXTENSION, build())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


native = _load()


class _Module(types.ModuleType):
    """What `torch.sim` offers, as torch.cuda does."""

    Event = torch.Event

    def Stream(self, device: Any = None, priority: int = 0) -> torch.Stream:  # noqa: N802  torch's name
        return torch.Stream(device=self.device(device), priority=priority)

    @staticmethod
    def device(index: Any = None) -> torch.device:
        """Returns the device that an index, a name or None (the current one) stands for."""
        if isinstance(index, str):
            index = torch.device(index)
        if isinstance(index, torch.device):
            index = index.index
        return torch.device(NAME, native.current_device() if index is None else int(index))

    def is_available(self) -> bool:
        return native.device_count() > 0

    device_count = staticmethod(native.device_count)
    current_device = staticmethod(native.current_device)

    def set_device(self, device: Any) -> None:
        native.set_device(self.device(device).index)

    def synchronize(self, device: Any = None) -> None:
        native.synchronize(self.device(device).index)

    current_stream = staticmethod(torch.accelerator.current_stream)
    memory_allocated = staticmethod(torch.accelerator.memory_allocated)
    max_memory_allocated = staticmethod(torch.accelerator.max_memory_allocated)

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Does nothing: random numbers are the CPU's."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def _group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    return native.collectives(dist.ProcessGroupGloo(store, rank, size, options), rank, size)


torch.utils.rename_privateuse1_backend(NAME)
module = _Module(f"torch.{NAME}")
torch._register_device_module(NAME, module)
torch.utils.generate_methods_for_privateuse1_backend()
dist.Backend.register_backend(BACKEND, _group, devices=[NAME])


def set_speed(copy_gbps: float = 0, pageable_gbps: float = 0) -> None:
    """Sets the bandwidth of each copy engine, in 1e9 bytes per second; 0 is as fast as memcpy."""
    native.set_speed(copy_gbps, pageable_gbps)


def set_capacity(num_bytes: int) -> None:
    """Sets the memory of each device."""
    native.set_capacity(num_bytes)


def reset() -> None:
    """Forgets the counters and the timeline."""
    native.reset()


def counters() -> dict[str, tuple[int, int]]:
    """Returns what was counted: times and bytes, by name."""
    return native.counters()


def timeline() -> list[Copy]:
    """Returns the copies between host and devices, in the order in which they ended."""
    return [Copy(*entry) for entry in native.timeline()]


def install() -> None:
    """Makes this DeepSpeed's accelerator. Before anything asks DeepSpeed for one."""
    from deepspeed.accelerator import set_accelerator

    from tests.device.accelerator import SimulatedAccelerator

    set_accelerator(SimulatedAccelerator())
