"""Page-locked host memory for partitions, allocated as such so that nothing is copied into it later."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

MIN_REGISTERED_BYTES = 1 << 20
"""From this size on, memory is mapped and registered with the device. torch rounds a pinned block up to a power of two,
and never gives it back."""


def new_pinned(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return flat page-locked memory, uninitialised; ordinary memory if the accelerator is the CPU.

    Source: deepspeed 0.19.8 `accelerator/abstract_accelerator.py`: `pin_empty` and `register_host_memory`, which older
    releases lack; `utils/pin_memory.py`: the "native" backend, which does not round up.
    """
    accelerator = get_accelerator()
    nbytes = numel * dtype.itemsize
    is_native = os.environ.get("DS_PIN_MEMORY_BACKEND", "torch").strip().lower() == "native"
    if nbytes >= MIN_REGISTERED_BYTES and not is_native and accelerator.device_name() != "cpu":
        registered = _registered(accelerator, nbytes)
        if registered is not None:
            return registered.view(dtype)
    if hasattr(accelerator, "pin_empty"):
        pinned: torch.Tensor = accelerator.pin_empty(numel, dtype=dtype)
        return pinned
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=accelerator.device_name() != "cpu")


def _registered(accelerator: Any, nbytes: int) -> torch.Tensor | None:
    """Return bytes that are registered with the device until their last view is gone; None if it registers none.

    The bytes share no page with others, since a page is registered once. They start their storage, since torch looks
    there whether a tensor is pinned.
    """
    if not hasattr(accelerator, "register_host_memory"):
        return None
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    whole_pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        is_registered = accelerator.register_host_memory(memory.data_ptr(), whole_pages)
    except RuntimeError:  # CUDA's raises where others return False
        is_registered = False
    if not is_registered:
        return None
    device, address = accelerator.current_device(), memory.data_ptr()
    weakref.finalize(memory.untyped_storage(), _unregister, accelerator, device, address).atexit = False
    return memory


def _unregister(accelerator: Any, device: int, address: int) -> None:
    """Unregister memory that is about to be freed, after the copies that read it."""
    with contextlib.suppress(RuntimeError):  # an error of earlier work on the device, which its caller gets as well
        accelerator.synchronize(device)
    accelerator.unregister_host_memory(address)
