"""What is known of ZeRO-3 parameters, and of what an engine will do with them. Part of the DeepSpeed seam.

Written for deepspeed 0.16.4 to 0.19.8. Glossary: `ds/partition.py`.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lowmem_load.contract import DEEPSPEED, require
from lowmem_load.ds.releases import KEEPS_FP32, has, refuse_absent_fp32
from lowmem_load.errors import UnsupportedError
from lowmem_load.planning.ranges import FlatRange, partition_range

require(
    DEEPSPEED,
    {
        **({KEEPS_FP32: ("buffers_to_keep_in_fp32", "keep_in_fp32_pattern")} if has(KEEPS_FP32) else {}),
        "deepspeed.runtime.zero.partition_parameters": (
            *("GatheredParameters", "PartitionedParamStatus.AVAILABLE", "ZeroParamStatus.AVAILABLE"),
        ),
        "deepspeed.runtime.zero.utils": ("is_zero_param",),
        "deepspeed.utils": ("safe_get_local_fp32_param",),
        "deepspeed.runtime.swap_tensor.partitioned_param_swapper:AsyncPartitionedParameterSwapper": (
            *("available_swap_in_buffers", "remove_partition_and_release_buffers", "swap_in"),
            "synchronize_reads",
        ),
    },
)

import deepspeed.comm as dist  # noqa: E402  the contract gives the better error
from deepspeed.runtime.zero.partition_parameters import (  # noqa: E402
    GatheredParameters,
    PartitionedParamStatus,
    ZeroParamStatus,
)
from deepspeed.runtime.zero.utils import is_zero_param  # noqa: E402
from deepspeed.utils import safe_get_local_fp32_param  # noqa: E402


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Return whether `parameter` is a ZeRO-3 parameter."""
    return bool(is_zero_param(parameter))


def is_sliced(parameter: torch.Tensor) -> bool:
    """Return whether DeepSpeed's tensor parallelism (AutoTP) has left this rank a slice of `parameter`.

    Source: deepspeed 0.19.8 `module_inject/layers.py:501`.
    """
    return bool(getattr(parameter, "tensor_model_parallel", False))


def whole_numel(parameter: torch.Tensor) -> int:
    """Return how many elements `parameter` has in all, partitioned or not."""
    numel: int = parameter.ds_numel if is_zero_param(parameter) else parameter.numel()
    return numel


def partition_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's partition of a ZeRO-3 parameter, flat, padding included; shares its memory."""
    partition: torch.Tensor = parameter.ds_tensor
    return partition


def group_size_of(parameter: torch.Tensor) -> int:
    """Return among how many ranks a ZeRO-3 parameter is cut up."""
    size: int = dist.get_world_size(group_of(parameter))
    return size


def group_of(parameter: torch.Tensor) -> Any:
    """Return the group of torch.distributed among whose ranks a ZeRO-3 parameter is cut up.

    Source: deepspeed 0.19.6 `mics.py:176` and `mics.py:307`: under MiCS it is the shard group, `ds_process_group` all.
    """
    mics = getattr(parameter, "comm", None)
    return parameter.ds_process_group if mics is None else mics.param_shard_group


def replicas_group_of(parameter: torch.Tensor) -> Any:
    """Return the group of torch.distributed of all ranks that hold partitions of a ZeRO-3 parameter, its copies too."""
    return parameter.ds_process_group


def is_first_replica(parameter: torch.Tensor) -> bool:
    """Return whether this rank holds the first of the copies of a ZeRO-3 parameter; there are several under MiCS."""
    group, all_copies = group_of(parameter), replicas_group_of(parameter)
    if group is all_copies:
        return True
    first = min(dist.get_all_ranks_from_group(all_copies))
    return first in dist.get_all_ranks_from_group(group)


def has_master(parameter: torch.Tensor) -> bool:
    """Return whether an optimizer of DeepSpeed holds fp32 values of a ZeRO-3 parameter.

    Source: deepspeed 0.19.8 `utils/tensor_fragment.py`, `safe_get_local_fp32_param`.
    """
    return getattr(parameter, "_z3_optimizer", None) is not None and parameter.requires_grad


def master_partition(parameter: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values of this rank's partition of a ZeRO-3 parameter, flat, padding included."""
    values: torch.Tensor = safe_get_local_fp32_param(parameter)
    return values.detach().reshape(-1)


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a ZeRO-3 parameter as a whole."""
    return tuple(parameter.ds_shape)


def held_range(parameter: torch.Tensor) -> FlatRange:
    """Return which elements of a ZeRO-3 parameter this rank's partition has, padding apart."""
    group = group_of(parameter)
    return partition_range(parameter.ds_numel, dist.get_rank(group), dist.get_world_size(group))


@contextlib.contextmanager
def partition_in_memory(parameter: torch.Tensor, name: str) -> Iterator[torch.Tensor]:
    """Yield this rank's partition of a ZeRO-3 parameter, flat, padding included; for the block read it from nvme.

    Raises:
        UnsupportedError: all buffers of the swapper are in use.
    """
    partition = parameter.ds_tensor
    if partition.status == PartitionedParamStatus.AVAILABLE:
        yield partition
        return
    swapper = parameter.nvme_swapper
    swapper.synchronize_reads()
    is_away = partition.status != PartitionedParamStatus.AVAILABLE
    if is_away:
        if not swapper.available_swap_in_buffers():
            raise UnsupportedError(
                f"{name}: its partition is on nvme, and all buffers that DeepSpeed reads it with are in use; call this "
                "between steps, or raise offload_param.buffer_count"
            )
        swapper.swap_in([parameter], async_op=False)
    try:
        yield partition
    finally:
        if is_away:
            swapper.remove_partition_and_release_buffers([parameter])


@contextlib.contextmanager
def gathered(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Have all of these parameters whole on every rank for the block; those of no ZeRO-3 are so already.

    Collective: all ranks that hold partitions of them.
    """
    partitioned = [parameter for parameter in parameters if is_zero_param(parameter)]
    with GatheredParameters(partitioned) if partitioned else contextlib.nullcontext():
        yield


def gathered_by_others(parameters: Sequence[torch.Tensor]) -> list[int]:
    """Return which of the parameters a `GatheredParameters` block has gathered at present, as positions.

    What is changed in such a block reaches the partitions at its end. Only the newest releases mark its parameters;
    but in all of them the object of a block lives while it lasts, and an engine's own gathering needs none.

    Source: deepspeed 0.16.4 to 0.19.8 `partition_parameters.py`, `GatheredParameters`.
    """
    if not any(is_zero_param(p) and p.ds_status == ZeroParamStatus.AVAILABLE for p in parameters):
        return []
    blocks = [found for found in gc.get_objects() if type(found) is GatheredParameters and found.enabled]
    held = {id(parameter) for block in blocks for parameter in block.params}
    return [
        position
        for position, parameter in enumerate(parameters)
        if id(parameter) in held and parameter.ds_status == ZeroParamStatus.AVAILABLE
    ]


def fp32_buffers(module: nn.Module, setting: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the buffers that DeepSpeed keeps in fp32 when it trains `module` in `dtype`.

    `setting` is data_types.keep_in_fp32_modules of the ds_config, None where it is absent.

    Raises:
        UnsupportedError: the ds_config names some, and this DeepSpeed would ignore that.
    """
    refuse_absent_fp32(setting)
    if not has(KEEPS_FP32):
        return []
    from deepspeed.runtime.keep_in_fp32 import buffers_to_keep_in_fp32, keep_in_fp32_pattern

    pattern = keep_in_fp32_pattern(module, setting, dtype)
    return [] if pattern is None else buffers_to_keep_in_fp32(module, pattern)
