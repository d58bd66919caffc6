"""The DeepSpeed seam: the only module that touches DeepSpeed's private names and the `ds_*` attributes of parameters.

Written for deepspeed 0.19.8, `runtime/zero/partition_parameters.py`. What stock `zero.Init` does to a parameter is:
allocate it whole, broadcast it from rank 0, attach the ZeRO methods (`_convert_to_deepspeed_param`), allocate
`ds_tensor` (this rank's partition, padded to the same size on all ranks), copy the partition, free the whole. Here
the parameter starts with no elements, the same methods are attached, and `ds_tensor` is allocated to be filled
directly; `zero.Init` is constructed for its settings but never entered as a context, so none of its patches of
`torch` and `nn.Module` happen.

Glossary: `ds_numel` of a parameter is the unpadded count, `ds_tensor.ds_numel` the padded partition count,
`ds_numel_aligned` the padded count of the whole; `ds_status` says whether the whole is available on this rank,
`ds_tensor.status` whether the partition is.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from torch import nn

from .errors import IncompatibleVersionError, UnsupportedError
from .plan import FlatRange

SUPPORTED = "deepspeed >=0.19.8,<0.20"


def _check_contract() -> None:
    """Raise when a private name that this module relies on is absent or has another form."""
    try:
        from deepspeed.runtime import keep_in_fp32
        from deepspeed.runtime.zero import partition_parameters as pp
        from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
        from deepspeed.runtime.zero.utils import is_zero_param

        names = (
            *("_convert_to_deepspeed_param", "_aligned_size", "_partition_world_size", "_partition_rank"),
            *("_enable_mem_efficient_linear", "get_partition_dp_group"),
        )
        missing = [f"zero.Init.{name}" for name in names if not callable(getattr(pp.Init, name, None))]
        parameters = inspect.signature(pp.Init.__init__).parameters
        missing += [f"zero.Init({name})" for name in ("module", "config_dict_or_path") if name not in parameters]
        missing += [
            f"keep_in_fp32.{name}"
            for name in ("keep_in_fp32_pattern", "buffers_to_keep_in_fp32")
            if not callable(getattr(keep_in_fp32, name, None))
        ]
        missing += [name for name in ("param_id", "apply_param_persistence") if not hasattr(pp.Init, name)]
        assert pp.ZeroParamStatus.NOT_AVAILABLE and pp.PartitionedParamStatus.AVAILABLE
        assert OffloadDeviceEnum.cpu and OffloadDeviceEnum.nvme and callable(is_zero_param)
    except (ImportError, AttributeError) as error:
        missing = [str(error)]
    if missing:
        raise IncompatibleVersionError(
            f"deepspeed {deepspeed.__version__} lacks {', '.join(missing)}; lowmem_load was written for {SUPPORTED}"
        )


_check_contract()

from deepspeed.accelerator import get_accelerator  # noqa: E402  the contract gives the better error
from deepspeed.runtime.keep_in_fp32 import buffers_to_keep_in_fp32, keep_in_fp32_pattern  # noqa: E402
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum  # noqa: E402
from deepspeed.runtime.zero.partition_parameters import (  # noqa: E402
    Init,
    PartitionedParamStatus,
    ZeroParamStatus,
)
from deepspeed.runtime.zero.utils import is_zero_param  # noqa: E402


@dataclass(frozen=True, slots=True)
class Destination:
    """Memory of one partition: `tensor[i]` is element `flat_range.start + i`; what lies beyond the range is padding."""

    tensor: torch.Tensor
    flat_range: FlatRange


class Partitioner:
    """Makes ZeRO-3 parameters whose partitions are allocated but not yet filled.

    Needs an initialised DeepSpeed `comm` and `LOCAL_RANK` (see `distributed.DistributedInterface`).

    Args:
        ds_config: resolved (no "auto" that ZeRO-3 reads), stage 3.
    """

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self._init = Init(module=None, config_dict_or_path=dict(ds_config))
        if self._init.quantized_weights or self._init.quantized_nontrainable_weights:
            raise UnsupportedError(
                "zero_quantized_weights and zero_quantized_nontrainable_weights cannot be streamed yet; "
                "remove them from zero_optimization"
            )
        if self._init.remote_device == OffloadDeviceEnum.nvme:
            raise UnsupportedError("offload_param.device 'nvme' cannot be streamed yet; use 'cpu' or remove it")
        if self._init.quantized_initialization:
            raise UnsupportedError("weight_quantization.quantized_initialization quantizes whole layers; remove it")
        if self._init.mem_efficient_linear:
            # entering zero.Init would do it; engines of stock and streamed models must run the same linear
            self._init._enable_mem_efficient_linear()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which DeepSpeed will run: bfloat16, float16 or float32 as the ds_config says."""
        dtype: torch.dtype = self._init.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Where whole parameters are gathered and buffers live."""
        device: torch.device = self._init.local_device
        return device

    def reserve_ids(self, module: nn.Module) -> dict[int, int]:
        """Return the `ds_id` of each parameter by `id(parameter)`, in the order in which zero.Init would give them.

        zero.Init converts the parameters of a module when its `__init__` returns, so children come first.
        """
        ids: dict[int, int] = {}
        for owner in _post_order(module, set()):
            for parameter in owner.parameters(recurse=False):
                if id(parameter) not in ids and not is_zero_param(parameter):
                    ids[id(parameter)] = Init.param_id
                    Init.param_id += 1
        return ids

    def ranges(self, numel: int) -> list[FlatRange]:
        """Return the flat ranges that this rank holds of a parameter of `numel` elements, without padding.

        The first is the partition; a second one is hpZ's secondary partition, shared within a node.
        """
        init = self._init
        ranges = [_clipped(init.rank, -(-numel // init.dp_world_size), numel)]
        if init.zero_param_process_group is not None:
            aligned = -(-numel // init.dp_world_size) * init.dp_world_size
            ranges.append(_clipped(init.rank_in_group, aligned // init.num_ranks_in_param_group, numel))
        return ranges

    def new_parameter(self, shape: torch.Size, dtype: torch.dtype, requires_grad: bool, ds_id: int) -> nn.Parameter:
        """Return a ZeRO-3 parameter of `shape` whose partition is not allocated yet. Allocates no element."""
        empty = torch.empty(0, dtype=dtype, device=self.device)
        parameter = nn.Parameter(empty, requires_grad=requires_grad)
        next_id = Init.param_id
        self._init._convert_to_deepspeed_param(parameter)
        Init.param_id = next_id  # ids were reserved in zero.Init's order; this one is not new
        parameter.ds_id = ds_id
        parameter.ds_shape = shape
        parameter.ds_numel = shape.numel()
        parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
        return parameter

    def allocate(self, parameter: nn.Parameter) -> list[Destination]:
        """Allocate the partition(s) of `parameter`, padding zeroed; the rest is the caller's to fill.

        Memory: exactly the partitions. Stock leaves the padding uninitialised, so hashes of its partitions differ
        from run to run; here they do not.
        """
        init = self._init
        aligned = init._aligned_size(parameter)
        partition = self._new_partition(aligned // init._partition_world_size(parameter), parameter.dtype)
        parameter.ds_tensor = partition
        parameter.ds_numel_aligned = aligned
        tensors = [partition]
        if init.zero_param_process_group is not None:
            secondary = self._new_partition(aligned // init.num_ranks_in_param_group, parameter.dtype)
            parameter.ds_secondary_tensor = secondary
            tensors.append(secondary)
        return [
            Destination(_zero_padding(tensor, flat_range.numel), flat_range)
            for tensor, flat_range in zip(tensors, self.ranges(parameter.ds_numel), strict=True)
        ]

    def fp32_buffers(self, module: nn.Module) -> list[torch.Tensor]:
        """Return the buffers that the model or the ds_config (data_types.keep_in_fp32_modules) names for fp32."""
        pattern = keep_in_fp32_pattern(module, self._init.keep_in_fp32_modules, self.dtype)
        return [] if pattern is None else buffers_to_keep_in_fp32(module, pattern)

    def _new_partition(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        device = self._init.remote_device
        partition = torch.empty(numel, dtype=dtype, device=str(getattr(device, "value", device)))
        if device == OffloadDeviceEnum.cpu and self._init.pin_memory:
            partition = get_accelerator().pin_memory(partition)
        partition.requires_grad = False
        partition.ds_numel = numel
        partition.status = PartitionedParamStatus.AVAILABLE
        partition.final_location = None
        return partition


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Return whether `parameter` is a ZeRO-3 parameter."""
    return bool(is_zero_param(parameter))


def whole_numel(parameter: torch.Tensor) -> int:
    """Return how many elements `parameter` has in all, partitioned or not."""
    numel: int = parameter.ds_numel if is_zero_param(parameter) else parameter.numel()
    return numel


def partition_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's partition of a ZeRO-3 parameter, flat, padding included; shares its memory."""
    partition: torch.Tensor = parameter.ds_tensor
    return partition


def reset_comm() -> None:
    """Forget DeepSpeed's `comm` and groups so that they can be brought up again on a new process group.

    Source: deepspeed 0.19.8 keeps the backend in the global `cdb` of `comm/comm.py`, and clones of the world group and
    of all others in `utils/groups.py`; a clone that outlives its group breaks the next `deepspeed.initialize`.
    """
    import deepspeed.comm.comm
    from deepspeed.utils import groups

    deepspeed.comm.comm.cdb = None
    groups._release_process_group_references()


def _clipped(rank: int, partition_numel: int, numel: int) -> FlatRange:
    return FlatRange(min(rank * partition_numel, numel), min((rank + 1) * partition_numel, numel))


def _zero_padding(tensor: torch.Tensor, numel: int) -> torch.Tensor:
    tensor[numel:].zero_()
    return tensor


def _post_order(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _post_order(child, seen)
    yield module
