"""Properties of ZeRO-3 parameters: shapes, groups, partitions, gathering. For the words see `engines/partition.py`."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed import DeepSpeedEngine, InferenceEngine
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_local_fp32_param
from torch import nn

from lowmem_load.errors import UnsupportedError
from lowmem_load.foreign_names import DEEPSPEED, require
from lowmem_load.planning.regions import FlatRange, partition_range

require(
    DEEPSPEED,
    {
        "deepspeed.runtime.zero.partition_parameters": (
            "PartitionedParamStatus.AVAILABLE",
            "ZeroParamStatus.AVAILABLE",
        ),
        "deepspeed.runtime.zero.utils": ("is_zero_param",),
        "deepspeed.runtime.swap_tensor.partitioned_param_swapper:AsyncPartitionedParameterSwapper": (
            *("available_swap_in_buffers", "remove_partition_and_release_buffers", "swap_in"),
            *("swap_out_and_release", "synchronize_reads"),
        ),
    },
)

from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus, ZeroParamStatus  # noqa: E402
from deepspeed.runtime.zero.utils import is_zero_param  # noqa: E402  the contract gives the better error

ENGINES = (DeepSpeedEngine, InferenceEngine)
"""Classes of engines. Their `module` is the model."""


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Return whether `parameter` is a ZeRO-3 parameter."""
    return bool(is_zero_param(parameter))


def may_be_on_nvme(parameter: torch.Tensor) -> bool:
    """Return whether the partition of a ZeRO-3 parameter comes from nvme, and so has no place of its own in memory."""
    return getattr(parameter, "nvme_swapper", None) is not None


def refuse_parallel(name: str, parameter: torch.Tensor) -> None:
    """Raise UnsupportedError for a parameter of which other ranks own other rows or experts.

    Source: deepspeed 0.19.8 `module_inject/layers.py:501`, `moe/experts.py:25`, `module_inject/auto_ep_layer.py:673`.
    """
    is_expert = not getattr(parameter, "allreduce", True) and getattr(parameter, "group_name", "") != "ep_size_1"
    if is_expert or getattr(parameter, "tensor_model_parallel", False):
        kind = "expert" if is_expert else "tensor"
        raise UnsupportedError(f"{name}: is split by DeepSpeed's {kind} parallelism; use the engine's own methods")


def full_numel(parameter: torch.Tensor) -> int:
    """Return the number of elements of `parameter`, partitioned or not."""
    return parameter.ds_numel if is_zero_param(parameter) else parameter.numel()


def partition_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's partition of a ZeRO-3 parameter, flat, padding included; shares its memory."""
    return parameter.ds_tensor


def group_of(parameter: torch.Tensor) -> Any:
    """Return the process group among whose ranks a ZeRO-3 parameter is partitioned."""
    return parameter.ds_process_group


def has_master(parameter: torch.Tensor) -> bool:
    """Return whether an optimizer of DeepSpeed keeps fp32 master values of a ZeRO-3 parameter."""
    # Source: deepspeed 0.19.8 utils/tensor_fragment.py, safe_get_local_fp32_param.
    return getattr(parameter, "_z3_optimizer", None) is not None and parameter.requires_grad


def master_partition(parameter: torch.Tensor) -> torch.Tensor:
    """Return the fp32 master values of this rank's partition of a ZeRO-3 parameter, flat, padding included."""
    return safe_get_local_fp32_param(parameter).detach().reshape(-1)


def optimizers_of(engine: Any, parameters: Iterable[torch.Tensor]) -> list[Any]:
    """Return the optimizers that train ZeRO-3 parameters, or an engine's, with those of torch inside of them."""
    # Source: deepspeed 0.19.8 engine.py, _configure_optimizer; stage3.py:807.
    outer = [getattr(engine, "optimizer", None), *(getattr(p, "_z3_optimizer", None) for p in parameters)]
    optimizers = {id(optimizer): optimizer for optimizer in outer if optimizer is not None}
    for optimizer in list(optimizers.values()):
        while (optimizer := getattr(optimizer, "optimizer", None)) is not None and id(optimizer) not in optimizers:
            optimizers[id(optimizer)] = optimizer
    return list(optimizers.values())


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the full shape of a ZeRO-3 parameter."""
    return tuple(parameter.ds_shape)


def held_range(parameter: torch.Tensor) -> FlatRange:
    """Return the elements of a ZeRO-3 parameter in this rank's partition, without padding."""
    group = group_of(parameter)
    return partition_range(parameter.ds_numel, dist.get_rank(group), dist.get_world_size(group))


@contextlib.contextmanager
def partition_in_memory(parameter: torch.Tensor, name: str) -> Iterator[torch.Tensor]:
    """Yield this rank's partition of a ZeRO-3 parameter, flat, padding included, read from nvme if it is there."""
    partition = parameter.ds_tensor
    if partition.status != PartitionedParamStatus.AVAILABLE:
        parameter.nvme_swapper.synchronize_reads()  # it may be on its way
    if partition.status == PartitionedParamStatus.AVAILABLE:
        yield partition
        return
    if not parameter.nvme_swapper.available_swap_in_buffers():
        raise UnsupportedError(
            f"{name}: its partition is on nvme, and all buffers that DeepSpeed reads it with are in use; call this "
            "between steps, or raise offload_param.buffer_count"
        )
    parameter.nvme_swapper.swap_in([parameter], async_op=False)
    try:
        yield partition
    finally:
        parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])


def gathered_by_others(parameters: Sequence[torch.Tensor]) -> list[int]:
    """Return the positions of the parameters that an open `GatheredParameters` block has gathered.

    Changes in such a block reach the partitions only at its end. Engines gather without one.
    """
    available = {
        id(parameter): position
        for position, parameter in enumerate(parameters)
        if is_zero_param(parameter) and parameter.ds_status == ZeroParamStatus.AVAILABLE
    }
    if not available:
        return []
    # Older releases do not mark its parameters, but in all releases it is an object that lives while it is open.
    blocks = [block for block in gc.get_objects() if type(block) is GatheredParameters and block.enabled]
    gathered_ids = {id(parameter) for block in blocks for parameter in block.params}
    return [position for key, position in available.items() if key in gathered_ids]
