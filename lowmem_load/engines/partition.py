"""Makes ZeRO-3 parameters whose partitions are allocated but not filled, with DeepSpeed's own code.

`zero.Init` of DeepSpeed allocates a parameter in full, broadcasts it from rank 0, attaches the ZeRO methods
(`_convert_to_deepspeed_param`), allocates `ds_tensor` (this rank's partition, padded to the same size on all ranks),
copies the partition and frees the rest. Here the parameter starts with no elements, gets the same methods, and
`ds_tensor` is allocated for the caller to fill. `zero.Init` is constructed for its settings but never entered.

Glossary: `ds_numel` of a parameter is its unpadded count, `ds_numel_aligned` the padded one. `ds_tensor.ds_numel` is
the padded count of the partition. `ds_status` says whether the full parameter is available on this rank,
`ds_tensor.status` whether the partition is.

Written for deepspeed 0.18.4 to 0.19.8, `runtime/zero/partition_parameters.py`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import mmap
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed import DeepSpeedConfig
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups
from torch import nn

from lowmem_load.engines.ops import load_async_io
from lowmem_load.engines.parameters import is_partitioned
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.foreign_names import DEEPSPEED, absent, require, require_attributes
from lowmem_load.planning.regions import FlatRange, partition_range, secondary_range
from lowmem_load.text import size

_ZERO = "deepspeed.runtime.zero.partition_parameters"

require(
    DEEPSPEED,
    {
        f"{_ZERO}:Init": (
            *("_aligned_size", "_convert_to_deepspeed_param", "get_partition_rank", "num_partitions", "param_id"),
        ),
        _ZERO: ("ZeroParamStatus.NOT_AVAILABLE", "PartitionedParamStatus.AVAILABLE"),
        "deepspeed.ops.op_builder": ("AsyncIOBuilder",),
        "deepspeed.runtime.swap_tensor.partitioned_param_swapper:AsyncPartitionedParameterSwapper": (
            *("_io_aligned_numel", "available_swap_in_buffers", "get_buffer", "get_path", "swap_out_and_release"),
            *("swappable_tensor", "synchronize_writes"),
        ),
        "deepspeed.runtime.zero.linear": ("zero3_linear_wrap",),
        "deepspeed.runtime.zero.offload_config": ("OffloadDeviceEnum.cpu", "OffloadDeviceEnum.nvme"),
        "deepspeed.utils.groups": ("_get_zero_param_intra_parallel_group",),
    },
)

from deepspeed.runtime.zero.linear import zero3_linear_wrap  # noqa: E402  the contract gives the better error
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum  # noqa: E402
from deepspeed.runtime.zero.partition_parameters import Init, PartitionedParamStatus, ZeroParamStatus  # noqa: E402

MIN_REGISTERED_BYTES = 1 << 20
"""From this size on, memory is mapped and registered with the device. torch rounds a pinned block up to a power of two,
and never gives it back."""

HAS_AUTOEP = "deepspeed.module_inject.auto_ep_config"
"""Module of DeepSpeed that reads expert_parallel."""


class Partitioner:
    """Makes ZeRO-3 parameters as a `zero.Init` of DeepSpeed does. Needs DeepSpeed's `comm` and `LOCAL_RANK`.

    `rank` and `world_size` are those of the group among whose ranks parameters are partitioned; `secondary` those of
    the group that shares hpZ's secondary partitions, (0, 0) without hpZ.
    """

    def __init__(self, init: Any, swap_folder: Folder | None = None) -> None:
        require_attributes(
            DEEPSPEED,
            init,
            (
                *("ds_process_group", "dtype", "local_device", "mem_efficient_linear", "module"),
                *("num_ranks_in_param_group", "param_swapper", "pin_memory"),
                *("quantized_nontrainable_weights", "rank_in_group", "remote_device", "zero_param_process_group"),
            ),
        )
        self._init = init
        self.swapping = None if init.param_swapper is None else Swapping(init.param_swapper, swap_folder)
        self.group, self.module = init.ds_process_group, init.module
        self.dtype: torch.dtype = init.dtype
        self.device: torch.device = init.local_device
        self.rank: int = init.get_partition_rank()
        self.world_size: int = init.num_partitions
        self.secondary: tuple[int, int] = (0, 0)
        if init.zero_param_process_group is not None:
            self.secondary = init.rank_in_group, init.num_ranks_in_param_group

    @classmethod
    def from_config(cls, ds_config: Mapping[str, Any], group: Any = None) -> Partitioner:
        """Return one that partitions among the ranks of `group`, None for all."""
        refuse_what_is_absent(ds_config)
        num_ranks = mpu = None
        if group is not None:
            num_ranks = dist.get_world_size(group) // ds_config.get("sequence_parallel_size", 1)
            mpu = SimpleNamespace(get_data_parallel_world_size=lambda: num_ranks)  # all that DeepSpeedConfig asks of it
        check_by_deepspeed(ds_config, num_ranks)
        swap_folder = _prepare_swapper(ds_config)
        secondary_size = ds_config["zero_optimization"].get("zero_hpz_partition_size", 1)
        init = Init(
            module=None,
            config_dict_or_path=dict(ds_config),
            data_parallel_group=group,
            zero_param_parallel_group=_secondary_group(secondary_size),
            mpu=mpu,
        )
        partitioner = cls(init, swap_folder)
        if init.mem_efficient_linear:  # zero.Init does this when it is entered
            enable = getattr(init, "_enable_mem_efficient_linear", None)  # since deepspeed 0.19.4
            if enable is not None:
                enable()
            else:
                torch.nn.functional.linear = zero3_linear_wrap
        return partitioner

    def reserve_ids(self, module: nn.Module) -> dict[int, int]:
        """Return the `ds_id` of each parameter by `id(parameter)`, in the order in which zero.Init would give them."""
        ids: dict[int, int] = {}
        # zero.Init converts the parameters of a module when its __init__ returns, so children come first.
        for owner in _children_first(module, set()):
            for parameter in owner.parameters(recurse=False):
                if id(parameter) not in ids and not is_partitioned(parameter):
                    ids[id(parameter)] = Init.param_id
                    Init.param_id += 1
        return ids

    def new_parameter(self, shape: torch.Size, dtype: torch.dtype, requires_grad: bool, ds_id: int) -> nn.Parameter:
        """Return a ZeRO-3 parameter of `shape` whose partition is not allocated yet."""
        # Without elements: DeepSpeed would partition what is there. Its true shape is set below.
        parameter = nn.Parameter(torch.empty(0, dtype=dtype, device=self.device), requires_grad=requires_grad)
        next_id = Init.param_id
        self.convert(parameter)
        Init.param_id = next_id  # ids were reserved in zero.Init's order; this one is not new
        parameter.ds_id = ds_id
        parameter.ds_shape = shape
        parameter.ds_numel = shape.numel()
        return parameter

    def takes(self, parameter: torch.Tensor) -> bool:
        """Return whether `convert` and `allocate` do all that DeepSpeed does with a parameter that it partitions.

        It cuts some for groups of their own (AutoEP), and quantizes frozen ones.
        """
        is_quantized = self._init.quantized_nontrainable_weights and not parameter.requires_grad
        return not (is_partitioned(parameter) or is_quantized or hasattr(parameter, "ds_zero_partition_process_group"))

    def convert(self, parameter: nn.Parameter) -> None:
        """Give a parameter what makes it one of ZeRO-3. It keeps its elements, and has no partition yet."""
        self._init._convert_to_deepspeed_param(parameter)
        # What it sets under another name would keep the value of the empty parameter.
        require_attributes(
            DEEPSPEED,
            parameter,
            ("ds_id", "ds_numel", "ds_process_group", "ds_secondary_tensor", "ds_shape", "ds_status", "ds_tensor"),
        )
        parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE

    def make_room(self, wait: Callable[[], object]) -> None:
        """Make room for one more partition. `wait`, which fills all that were allocated, may be called first."""
        if self.swapping is not None and self.swapping.is_swap_due:
            wait()  # the buffers are written now
            self.swapping.swap_out()

    def finish(self) -> None:
        """Write partitions that belong on nvme to their files, once all are filled."""
        if self.swapping is not None:
            self.swapping.finish()

    def allocate(self, parameter: nn.Parameter) -> list[tuple[FlatRange, torch.Tensor]]:
        """Allocate the partition of `parameter` and, under hpZ, its secondary partition; the caller fills them.

        Returns the elements of the parameter that belong in each, and its memory, where padding follows them. Under
        offload_param to nvme it is one of the swapper's buffers, so `make_room` must come before, and `finish` last.
        """
        init = self._init
        if not parameter.requires_grad and init.quantized_nontrainable_weights:
            raise UnsupportedError(
                "zero_quantized_nontrainable_weights: this model has frozen parameters when it is loaded, for which "
                f"deepspeed {deepspeed.__version__} copies weights into int8 memory without quantizing them "
                "(partition_parameters.py, _partition_param); freeze them after the load, or remove the setting"
            )
        aligned = init._aligned_size(parameter)
        padded_numel = aligned // self.world_size
        if self.swapping is not None and self.swapping.swaps(padded_numel):
            partition = _as_partition(self.swapping.buffer(parameter, padded_numel), OffloadDeviceEnum.nvme)
        else:
            partition = self._new_partition(padded_numel, parameter.dtype)
        parameter.ds_tensor = partition
        parameter.ds_numel_aligned = aligned
        parts = [(partition_range(parameter.ds_numel, self.rank, self.world_size), partition)]
        rank, num_ranks = self.secondary
        if num_ranks:
            secondary = self._new_partition(aligned // num_ranks, parameter.dtype)
            parameter.ds_secondary_tensor = secondary
            parts.append((secondary_range(parameter.ds_numel, rank, self.world_size, num_ranks)[0], secondary))
        for region, memory in parts:
            memory[region.numel :].zero_()  # DeepSpeed leaves it uninitialized, so its hashes differ from run to run
        return parts

    def _new_partition(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        remote = self._init.remote_device  # nvme takes only partitions that are large enough
        device = "cpu" if remote == OffloadDeviceEnum.nvme else str(getattr(remote, "value", remote))
        if device == "cpu" and self._init.pin_memory:
            return _as_partition(new_pinned(numel, dtype))
        return _as_partition(torch.empty(numel, dtype=dtype, device=device))


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """Yield the distinct modules, each after its children."""
    seen.add(id(module))
    for child in module.children():
        if id(child) not in seen:
            yield from _children_first(child, seen)
    yield module


def check_by_deepspeed(ds_config: Mapping[str, Any], world_size: int | None = None) -> None:
    """Raise ConfigError for what DeepSpeed would refuse in a job of this many ranks; None: in the one that runs."""
    try:
        if world_size is None:
            DeepSpeedConfig(dict(ds_config))
        else:
            _ConfigOfAJob(dict(ds_config), world_size)
    except Exception as error:  # of any class, since it does not check types
        problem = re.sub(r"\n *For further information visit .*", "", f"{type(error).__name__}: {error}")
        raise ConfigError(f"deepspeed {deepspeed.__version__} refuses the ds_config: {problem}") from error


class _ConfigOfAJob(DeepSpeedConfig):
    """A DeepSpeedConfig of a job that need not run. DeepSpeed itself counts one rank where it has no process group."""

    def __init__(self, ds_config: dict[str, Any], num_ranks: int) -> None:
        self._num_ranks = num_ranks
        super().__init__(ds_config)

    @property
    def world_size(self) -> int:
        return self._num_ranks

    @world_size.setter
    def world_size(self, counted: int) -> None:
        """Ignore what DeepSpeed has counted."""


def _secondary_group(num_ranks: int) -> Any:
    """Return the hpZ group that an earlier model has made, if any: DeepSpeed cannot make another."""
    group = groups._get_zero_param_intra_parallel_group() if num_ranks > 1 else None
    if group is not None and dist.get_world_size(group) != min(num_ranks, dist.get_world_size()):
        raise ConfigError(
            f"zero_hpz_partition_size {num_ranks}: an earlier model in this process has {dist.get_world_size(group)}, "
            "and DeepSpeed has one size per process; use the same"
        )
    return group


def _as_partition(memory: torch.Tensor, final_location: OffloadDeviceEnum | None = None) -> torch.Tensor:
    """Set the attributes that DeepSpeed reads on a partition, and return it."""
    partition = memory.requires_grad_(False)
    partition.ds_numel = partition.numel()
    partition.status = PartitionedParamStatus.AVAILABLE
    partition.final_location = final_location
    return partition


def new_pinned(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return flat page-locked memory, uninitialized; ordinary memory if the accelerator is the CPU."""
    accelerator, nbytes = get_accelerator(), numel * dtype.itemsize
    is_device = accelerator.device_name() != "cpu"
    # Older releases lack register_host_memory and pin_empty.
    if is_device and nbytes >= MIN_REGISTERED_BYTES and hasattr(accelerator, "register_host_memory"):
        registered = _registered(accelerator, nbytes)
        if registered is not None:
            return registered.view(dtype)
    if hasattr(accelerator, "pin_empty"):
        return accelerator.pin_empty(numel, dtype=dtype)
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=is_device)


def _registered(accelerator: Any, nbytes: int) -> torch.Tensor | None:
    """Return bytes that are registered with the device until their last view is gone; None if it registers none."""
    # Pages of their own, since a page is registered once, at the start of a storage, where torch looks for pinned ones.
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
    with contextlib.suppress(RuntimeError):  # an error of earlier work on the device, which its caller gets as well
        accelerator.synchronize(device)  # copies may still read it
    accelerator.unregister_host_memory(address)


# -- the swapper of offload_param to nvme ------------------------------------------------------------------------------

# zero.Init makes it (`runtime/swap_tensor/partitioned_param_swapper.py`). It allocates all buffers at once, empties its
# folder, and does not check that a file has all bytes that were written to it.

Folder = tuple[str, str]
"""The nvme_path and the precision of a swapper: DeepSpeed has a folder for each of these."""

_LIVE: weakref.WeakValueDictionary[Folder, Any] = weakref.WeakValueDictionary()
"""The live swappers of this process by folder."""


def _prepare_swapper(ds_config: Mapping[str, Any]) -> Folder | None:
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


# -- what the installed release lacks, and would ignore silently -------------------------------------------------------


def has(module: str) -> bool:
    """Return whether the installed DeepSpeed has a module, without importing it."""
    return importlib.util.find_spec(module) is not None


def refuse_what_is_absent(ds_config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for the first setting that the installed DeepSpeed or this accelerator does not have."""
    section = ds_config["zero_optimization"]
    for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if section.get(name) and get_accelerator().device_name() == "cpu":
            raise UnsupportedError(f"{name}: DeepSpeed's quantizer is a CUDA kernel; remove it on CPU")
    if (ds_config.get("expert_parallel") or {}).get("enabled") and not has(HAS_AUTOEP):
        raise absent("expert_parallel")
