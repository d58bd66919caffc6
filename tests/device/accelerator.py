"""DeepSpeed's view of the simulated device: what CUDA_Accelerator answers where that differs from the CPU's."""

import contextlib
import functools
from typing import Any

import torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from tests.device.simulated import BACKEND, NAME, module, native


def _tensor(dtype: torch.dtype) -> property:
    return property(lambda _: functools.partial(torch.tensor, dtype=dtype, device=NAME))


class SimulatedAccelerator(CPU_Accelerator):
    """An asynchronous device with streams, events and memory of its own. Operators are the CPU's."""

    _torch_pins_host_memory = True
    pin_memory = DeepSpeedAccelerator.pin_memory
    is_pinned = DeepSpeedAccelerator.is_pinned
    _torch_pin_memory = DeepSpeedAccelerator._torch_pin_memory
    _torch_empty_pinned = DeepSpeedAccelerator._torch_empty_pinned

    def __init__(self) -> None:
        super().__init__()
        self._name, self._communication_backend_name = NAME, BACKEND

    def is_synchronized_device(self) -> bool:
        return False

    def is_fp16_supported(self) -> bool:
        return True

    def device_name(self, device_index: Any = None) -> str:
        return NAME if device_index is None else f"{NAME}:{device_index}"

    def device(self, device_index: Any = None) -> torch.device:
        return torch.device(NAME, device_index)

    set_device = module.set_device
    current_device = module.current_device
    device_count = module.device_count
    synchronize = module.synchronize
    current_stream = default_stream = module.current_stream
    memory_allocated = module.memory_allocated
    max_memory_allocated = module.max_memory_allocated
    Stream, Event = module.Stream, module.Event

    def current_device_name(self) -> str:
        return f"{NAME}:{module.current_device()}"

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext() if stream is None else stream

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def memory_reserved(self, device_index: Any = None) -> int:
        return torch.accelerator.memory_reserved(module.device(device_index))

    def max_memory_reserved(self, device_index: Any = None) -> int:
        return torch.accelerator.max_memory_reserved(module.device(device_index))

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def reset_peak_memory_stats(self, device_index: Any = None) -> None:
        torch.accelerator.reset_peak_memory_stats(module.device(device_index))

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: Any = None) -> Any:
        return torch.accelerator.memory_stats(module.device(device_index))

    def total_memory(self, device_index: Any = None) -> int:
        return torch.accelerator.get_memory_info(module.device(device_index))[1]

    def available_memory(self, device_index: Any = None) -> int:
        return torch.accelerator.get_memory_info(module.device(device_index))[0]

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        native.register_host_memory(address, num_bytes)
        return True

    def unregister_host_memory(self, address: int) -> None:
        native.unregister_host_memory(address)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == NAME

    def visible_devices_envs(self) -> list[str]:
        return ["SIM_VISIBLE_DEVICES"]

    ByteTensor = _tensor(torch.uint8)
    BFloat16Tensor = _tensor(torch.bfloat16)
    FloatTensor = _tensor(torch.float)
    HalfTensor = _tensor(torch.half)
    IntTensor = _tensor(torch.int)
    LongTensor = _tensor(torch.long)
