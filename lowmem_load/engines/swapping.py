"""The swapper of offload_param to nvme: its folder, its buffers and its files.

zero.Init makes it (`runtime/swap_tensor/partitioned_param_swapper.py` of deepspeed 0.18.4 to 0.19.8). It allocates all
buffers at once, empties its folder, and does not check that a file has all bytes that were written to it.
"""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lowmem_load.engines.ops import load_async_io
from lowmem_load.errors import ConfigError
from lowmem_load.foreign_names import DEEPSPEED, require, require_attributes
from lowmem_load.text import size

require(
    DEEPSPEED,
    {
        "deepspeed.ops.op_builder": ("AsyncIOBuilder",),
        "deepspeed.runtime.zero.offload_config": ("OffloadDeviceEnum.nvme",),
        "deepspeed.runtime.swap_tensor.partitioned_param_swapper:AsyncPartitionedParameterSwapper": (
            *("_io_aligned_numel", "available_swap_in_buffers", "get_buffer", "get_path", "swap_out_and_release"),
            *("swappable_tensor", "synchronize_writes"),
        ),
    },
)

from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum  # noqa: E402  the contract gives the better error

Folder = tuple[str, str]
"""The nvme_path and the precision of a swapper: DeepSpeed has a folder for each of these."""

_LIVE: weakref.WeakValueDictionary[Folder, Any] = weakref.WeakValueDictionary()
"""The live swappers of this process by folder."""


def prepare(ds_config: Mapping[str, Any]) -> Folder | None:
    """Return the folder of the swapper that zero.Init will make; None if it will make none.

    Raises ConfigError for what zero.Init does not check, or reports badly.
    """
    offload = ds_config["zero_optimization"].get("offload_param") or {}
    if offload.get("device") != OffloadDeviceEnum.nvme:
        return None
    enabled = [name for name in ("bf16", "fp16") if ds_config.get(name, {}).get("enabled")]
    folder = os.path.realpath(offload["nvme_path"]), " ".join(enabled)
    if folder in _LIVE:
        gc.collect()  # parameters and their methods refer to each other
    if folder in _LIVE:
        raise ConfigError(
            f"offload_param.nvme_path {folder[0]}: has the weights of another model of this process, and DeepSpeed "
            "would delete them; give each model a folder of its own"
        )
    if (ds_config.get("aio") or {}).get("use_gds"):
        return folder  # another op, which needs no libaio
    try:
        load_async_io()  # zero.Init loads it too, but raises RuntimeError for other reasons as well
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"offload_param.device 'nvme': DeepSpeed cannot build or load its async_io op: {error}; install libaio "
            "(libaio-dev on Debian) and what else it names, or use device 'cpu'"
        ) from error
    return folder


class Swapping:
    """Partitions in the buffers of a swapper: half of the buffers are written to files while the others are filled."""

    def __init__(self, swapper: Any, folder: Folder | None) -> None:
        require_attributes(
            DEEPSPEED, swapper, ("elements_per_buffer", "param_buffer_count", "swap_element_size", "swap_folder")
        )
        self._swapper = swapper
        self._filling: list[nn.Parameter] = []
        self._writing: list[tuple[str, int]] = []  # path and final length in bytes of each file
        if folder is not None:  # else it is an engine's own
            _LIVE[folder] = swapper

    def swaps(self, numel: int) -> bool:
        """Return whether partitions of `numel` elements are large enough for files."""
        return bool(self._swapper.swappable_tensor(numel=numel))

    def buffer(self, parameter: nn.Parameter, numel: int) -> torch.Tensor:
        """Return memory for a partition of `parameter` in one of the buffers. `swap_out` must follow."""
        swapper = self._swapper
        if numel > swapper.elements_per_buffer:
            raise ConfigError(
                f"offload_param.buffer_size is {swapper.elements_per_buffer} elements, but a partition of a parameter "
                f"of shape {tuple(parameter.ds_shape)} has {numel}; raise it to at least that"
            )
        partition = torch.empty(0, dtype=parameter.dtype, device="cpu")
        partition.data = swapper.get_buffer(parameter, numel).data
        self._filling.append(parameter)
        return partition

    def files(self, numels: Iterable[int]) -> dict[str, int]:
        """Return how many bytes partitions of `numels` elements will take in files, by folder."""
        # Source: deepspeed 0.19.8 partitioned_param_swapper.py, get_buffer: a file is as long as the aligned buffer.
        swapper = self._swapper
        swapped = [numel for numel in numels if self.swaps(numel)]
        return {swapper.swap_folder: sum(map(swapper._io_aligned_numel, swapped)) * swapper.swap_element_size}

    @property
    def is_swap_due(self) -> bool:
        """Whether `swap_out` is due: half of the buffers are filled, or none is free."""
        is_half = 2 * len(self._filling) >= self._swapper.param_buffer_count
        return is_half or bool(self._swapper.available_swap_in_buffers() == 0)

    def swap_out(self) -> None:
        """Start to write the filled buffers to files; return when a buffer is free."""
        self._await_writes()
        if self._filling:
            parameters, self._filling = self._filling, []
            # DeepSpeed releases the buffers only after the writes, whatever the argument says.
            self._swapper.swap_out_and_release(parameters, async_op=True, force_buffer_release=True)
            for parameter in parameters:
                partition = parameter.ds_tensor
                nbytes = partition.ds_numel * partition.element_size()
                self._writing.append((self._swapper.get_path(parameter, must_exist=True), nbytes))
        if self._swapper.available_swap_in_buffers() == 0:
            self._await_writes()

    def finish(self) -> None:
        """Write all filled buffers to files, and free them."""
        self.swap_out()
        self._await_writes()

    def _await_writes(self) -> None:
        if not self._writing:
            return
        self._swapper.synchronize_writes()
        files, self._writing = self._writing, []
        for path, written in files:
            nbytes = os.stat(path).st_size if os.path.exists(path) else 0
            if nbytes < written:  # DeepSpeed would train on zeros
                free = shutil.disk_usage(os.path.dirname(path)).free
                raise ConfigError(
                    f"offload_param.nvme_path: {path} has {nbytes} bytes after {written} were written to it "
                    f"({size(free)} are free there); free space, or name another folder"
                )
