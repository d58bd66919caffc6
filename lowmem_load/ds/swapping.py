"""The swapper of offload_param to nvme: whose folder is whose, its buffers, and what it writes to files.

DeepSpeed makes one in zero.Init (`runtime/swap_tensor/partitioned_param_swapper.py`, 0.16.4 to 0.19.8). It allocates
all buffers at once, empties its folder, and does not look whether what it wrote is there.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import weakref
from collections.abc import Iterable, Mapping, Sized
from typing import Any, ClassVar

import deepspeed
import torch
from torch import nn

from lowmem_load.contract import DEEPSPEED, require, require_attributes
from lowmem_load.ds.extensions import load_async_io
from lowmem_load.errors import ConfigError

_SWAPPER = "deepspeed.runtime.swap_tensor.partitioned_param_swapper:AsyncPartitionedParameterSwapper"


require(
    DEEPSPEED,
    {
        "deepspeed.ops.op_builder": ("AsyncIOBuilder",),
        "deepspeed.runtime.zero.offload_config": ("OffloadDeviceEnum.nvme",),
        _SWAPPER: (
            "_io_aligned_numel",
            "available_swap_in_buffers",
            "get_buffer",
            "get_path",
            "swap_out_and_release",
            "swappable_tensor",
            "synchronize_writes",
        ),
    },
    arguments={
        f"{_SWAPPER}.swappable_tensor": ("numel",),
        f"{_SWAPPER}.swap_out_and_release": ("async_op", "force_buffer_release"),
    },
)

from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum  # noqa: E402  the contract gives the better error

Folder = tuple[str, str]
"""What tells apart the folders of swappers: nvme_path and precision."""


def folder_of(ds_config: Mapping[str, Any]) -> Folder | None:
    """Return the folder of the swapper that zero.Init will make; None if it will make none.

    That there is an nvme_path was checked by `targets/zero3.py`.
    """
    offload = ds_config["zero_optimization"].get("offload_param") or {}
    if offload.get("device") != OffloadDeviceEnum.nvme:
        return None
    enabled = [name for name in ("bf16", "fp16") if ds_config.get(name, {}).get("enabled")]
    return os.path.realpath(offload["nvme_path"]), " ".join(enabled)


def prepare(folder: Folder, ds_config: Mapping[str, Any], offload: Any) -> None:
    """Do before zero.Init what it would not do, or fail at in ways that nobody understands.

    `offload` is DeepSpeed's own reading of the section offload_param.

    Raises:
        ConfigError: the folder holds another model, its buffers do not fit into memory, or there is no libaio.
    """
    Swapping.refuse_held(folder)
    _refuse_buffers(offload, itemsize=2 if folder[1] else 4)
    _load_async_io(ds_config)


class Swapping:
    """Partitions that lie in the buffers of a swapper until they are written to its files.

    Half of the buffers are written from while the others are read into.

    Raises:
        IncompatibleVersionError: it has not set what this module reads of it.
    """

    # Live ones, by folder. Per process, as are the folders on disk that they stand for: DeepSpeed empties such a
    # folder whenever it makes a swapper.
    _live: ClassVar[weakref.WeakValueDictionary[Folder, Any]] = weakref.WeakValueDictionary()

    def __init__(self, swapper: Any, folder: Folder) -> None:
        require_attributes(
            DEEPSPEED,
            swapper,
            (
                *("aio_read_handle", "aio_write_handle", "buffers", "elements_per_buffer", "param_buffer_count"),
                *("swap_element_size", "swap_folder", "use_gds"),
            ),
        )
        self._swapper = swapper
        self._filling: list[nn.Parameter] = []
        self._writing: list[tuple[str, int]] = []  # paths, and bytes that each will have
        Swapping._live[folder] = swapper
        _free_with_last_view(swapper, self._writing)

    @classmethod
    def refuse_held(cls, folder: Folder) -> None:
        """Raise ConfigError if a live model's weights lie in the folder: DeepSpeed empties it for each swapper.

        Source: deepspeed 0.19.8 `partitioned_param_swapper.py`, `_configure_aio`.
        """
        if folder in cls._live:
            gc.collect()  # parameters and their methods refer to each other
        if folder in cls._live:
            raise ConfigError(
                f"offload_param.nvme_path {folder[0]} holds the weights of another model of this "
                "process, and DeepSpeed would delete them; give each model a folder of its own"
            )

    def swaps(self, numel: int) -> bool:
        """Return whether partitions of `numel` elements are large enough for files."""
        return bool(self._swapper.swappable_tensor(numel=numel))

    def buffer(self, parameter: nn.Parameter, numel: int) -> torch.Tensor:
        """Return memory for a partition of `parameter` in one of the buffers. `swap_out` must follow.

        Raises:
            ConfigError: the buffers are too small.
        """
        swapper = self._swapper
        if numel > swapper.elements_per_buffer:
            raise ConfigError(
                f"offload_param.buffer_size is {swapper.elements_per_buffer} elements, but a partition of a parameter "
                f"of shape {tuple(parameter.ds_shape)} has {numel}; raise it to at least that"
            )
        partition = torch.empty(0, dtype=parameter.dtype, device="cpu")
        try:
            partition.data = swapper.get_buffer(parameter, numel).data
        except AssertionError as error:  # before deepspeed 0.17.1 it has to be smaller
            raise ConfigError(
                f"offload_param.buffer_size is {swapper.elements_per_buffer} elements, and deepspeed "
                f"{deepspeed.__version__} does not fill a buffer: {error}; raise it"
            ) from error
        self._filling.append(parameter)
        return partition

    def files(self, numels: Iterable[int]) -> dict[str, int]:
        """Return what will be written of partitions of `numels` elements, in bytes, by folder.

        Source: deepspeed 0.19.8 `partitioned_param_swapper.py`, `get_buffer`: a file is as long as the aligned buffer.
        """
        swapper = self._swapper
        swapped = [numel for numel in numels if self.swaps(numel)]
        return {swapper.swap_folder: sum(map(swapper._io_aligned_numel, swapped)) * swapper.swap_element_size}

    @property
    def needs_room(self) -> bool:
        """Whether it is time to `swap_out`: half of the buffers are filled, or none is free."""
        is_half = 2 * len(self._filling) >= self._swapper.param_buffer_count
        return is_half or bool(self._swapper.available_swap_in_buffers() == 0)

    def swap_out(self) -> None:
        """Start writing the partitions that lie in the buffers to their files; return when a buffer is free.

        Raises: see `finish`.
        """
        self._await_writes()
        if self._filling:
            parameters, self._filling = self._filling, []
            # The buffers are not released before the writes have ended, whatever the argument says.
            self._swapper.swap_out_and_release(parameters, async_op=True, force_buffer_release=True)
            for parameter in parameters:
                partition = parameter.ds_tensor
                nbytes = partition.ds_numel * partition.element_size()
                self._writing.append((self._swapper.get_path(parameter, must_exist=True), nbytes))
        if self._swapper.available_swap_in_buffers() == 0:
            self._await_writes()

    def finish(self) -> None:
        """Write all that lies in the buffers to its files, and free the buffers.

        Raises:
            ConfigError: a file is shorter than what was written: DeepSpeed does not look, and would train on zeros.
        """
        self.swap_out()
        self._await_writes()

    def _await_writes(self) -> None:
        """Wait for writes that were started, and free their buffers."""
        if not self._writing:
            return
        self._swapper.synchronize_writes()
        files = list(self._writing)
        self._writing.clear()
        for path, written in files:
            found = os.stat(path).st_size if os.path.exists(path) else 0
            if found < written:
                free = shutil.disk_usage(os.path.dirname(path)).free
                raise ConfigError(
                    f"offload_param.nvme_path: {path} has {found} bytes after {written} were written to it ({free} "
                    "bytes are free there); free space, or name another folder"
                )


def _refuse_buffers(offload: Any, itemsize: int) -> None:
    """Raise ConfigError if the swapper's buffers are larger than the machine's memory: DeepSpeed allocates them.

    Source: deepspeed 0.19.8 `partitioned_param_swapper.py`, `_configure_aio`.
    """
    nbytes = offload.buffer_count * offload.buffer_size * itemsize
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if nbytes > memory:
        raise ConfigError(
            f"offload_param: {offload.buffer_count} buffers (buffer_count) of {offload.buffer_size} elements "
            f"(buffer_size) are {nbytes} bytes, this machine has {memory}; lower buffer_size to what the largest "
            "partition of a parameter needs"
        )


def _load_async_io(ds_config: Mapping[str, Any]) -> None:
    """Build and load the op by which zero.Init's swapper will reach its files.

    zero.Init would do so too, but raises RuntimeError for other reasons as well, which have nothing to do with libaio.

    Raises:
        ConfigError: it cannot be built, or not be loaded.
    """
    if (ds_config.get("aio") or {}).get("use_gds"):
        return  # another op, which needs no libaio
    try:
        load_async_io()
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"offload_param.device 'nvme': DeepSpeed cannot build or load its async_io op: {error}; install libaio "
            "(libaio-dev on Debian) and what else it names, or use device 'cpu'"
        ) from error


def _free_with_last_view(swapper: Any, writing: Sized) -> None:
    """Have the swapper's page-locked buffers freed once no tensor lies in them; DeepSpeed keeps them for ever.

    They are GBs with DeepSpeed's defaults, and each load that fails would leave as much behind. What one still writes
    from, as `writing` says, is waited for.

    Source: deepspeed 0.19.8 `deepspeed_pin_tensor.cpp`, `alloc`: a process-wide table owns the memory.
    """
    if swapper.use_gds:
        return  # memory of the device, which torch owns
    storage = swapper.buffers.untyped_storage()
    handles = swapper.aio_read_handle, swapper.aio_write_handle
    weakref.finalize(storage, _free_locked, *handles, storage.data_ptr(), writing).atexit = False


def _free_locked(handle: Any, write_handle: Any, address: int, writing: Sized) -> None:
    if writing:
        write_handle.wait()
    handle.free_cpu_locked_tensor(torch.frombuffer((ctypes.c_char * 1).from_address(address), dtype=torch.uint8))
