"""What this rank holds of a model that is saved, and which elements this rank writes."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.planning.expression import Source
from lowmem_load.planning.ranges import FlatRange, flat_ranges

Piece: TypeAlias = "tuple[torch.Tensor, int]"
"""Flat memory, and the number of its first element in the whole tensor."""


@dataclass(frozen=True, slots=True)
class LocalShard:
    """What this rank holds of a parameter or buffer.

    Attributes:
        source: the whole tensor in the plan: its first name, its shape, and the dtype of its memory.
        tensor: the parameter or buffer.
        mine: elements that this rank writes, in the order of its memory. Only a DTensor has more than one range.
        is_partitioned, is_master: whether it is a ZeRO-3 parameter, and whether its fp32 values are written.
    """

    source: Source
    tensor: torch.Tensor
    mine: tuple[FlatRange, ...]
    is_partitioned: bool
    is_master: bool

    @contextlib.contextmanager
    def memory(self) -> Iterator[list[Piece]]:
        """Yield the pieces of memory that hold the elements this rank writes, and of whole tensors all others."""
        if is_dtensor(self.tensor):
            from lowmem_load.dtensor.shards import local_shard

            _, memory = local_shard(self.source.name, self.tensor, needs_memory=True)
            ends = itertools.accumulate(part.numel for part in self.mine)
            yield [(memory[end - part.numel : end], part.start) for part, end in zip(self.mine, ends, strict=True)]
        elif not self.is_partitioned:
            yield [(self.tensor.detach().reshape(-1), 0)]
        elif not self.mine:  # another replica's are written
            yield []
        else:
            from lowmem_load.ds.parameters import master_partition, partition_in_memory

            (mine,), name = self.mine, self.source.name
            is_master, tensor = self.is_master, self.tensor
            held = contextlib.nullcontext(master_partition(tensor)) if is_master else partition_in_memory(tensor, name)
            with held as partition:
                yield [(partition.detach()[: mine.numel], mine.start)]


def local_shards(model: nn.Module, rank: int, *, masters: bool) -> list[LocalShard]:
    """Return each parameter and buffer of a model once.

    Every rank writes its partitions. Rank 0 writes what all ranks hold in full: their values may differ (buffers,
    adapters that each rank initialised for itself), and a mixture would be no rank's model. With `masters`, the
    optimizer's fp32 values of partitioned parameters are written where there are some.
    """
    named = list(model.named_parameters())
    if "deepspeed" in sys.modules:
        from lowmem_load.ds.parameters import gathered_by_others

        open_ones = [named[position][0] for position in gathered_by_others([parameter for _, parameter in named])]
        if open_ones:
            raise ConfigError(
                f"{open_ones[0]}: is gathered by an open deepspeed.zero.GatheredParameters"
                f"{f', with {len(open_ones) - 1} more' if len(open_ones) > 1 else ''}. Changes reach the partitions "
                "when the block ends: call save_model after it, on all ranks"
            )
    found: dict[int, LocalShard] = {}
    for name, tensor in (*named, *model.named_buffers()):
        if id(tensor) not in found:
            found[id(tensor)] = local_shard_of(name, tensor, rank, masters=masters)
    return list(found.values())


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing DTensor."""
    return hasattr(tensor, "device_mesh")


def group_of(tensor: torch.Tensor) -> Any:
    """Return the group of torch.distributed whose ranks hold the pieces of a tensor; None if each holds it in full."""
    if is_dtensor(tensor):
        from lowmem_load.dtensor.shards import all_ranks

        return all_ranks()
    if "deepspeed" in sys.modules:  # else nothing can be partitioned
        from lowmem_load.ds.parameters import is_partitioned, replicas_group_of

        return replicas_group_of(tensor) if is_partitioned(tensor) else None
    return None


def local_shard_of(name: str, tensor: torch.Tensor, rank: int, *, masters: bool) -> LocalShard:
    """Return what this rank holds of a tensor. Of ranks that hold the same, the first one writes it."""
    if isinstance(tensor, nn.Parameter) and "deepspeed" in sys.modules:
        from lowmem_load.ds import parameters

        if getattr(tensor, "tensor_model_parallel", False):  # source: deepspeed 0.19.8 module_inject/layers.py:501
            raise UnsupportedError(f"{name}: is split by DeepSpeed's tensor parallelism; use the engine's own methods")
        if parameters.is_partitioned(tensor):
            # DeepSpeed quantizes frozen weights where zero_quantized_nontrainable_weights says so.
            stored = parameters.partition_of(tensor).dtype
            if stored.is_floating_point != tensor.dtype.is_floating_point:
                raise UnsupportedError(f"{name}: is {tensor.dtype}, but its partitions hold {stored}, quantized")
            is_master = masters and tensor.dtype != torch.float32 and parameters.has_master(tensor)
            dtype = torch.float32 if is_master else tensor.dtype
            mine: tuple[FlatRange, ...] = ()
            if parameters.is_first_replica(tensor):
                mine = (parameters.held_range(tensor),)
            return LocalShard(Source("", name, 0, parameters.full_shape(tensor), dtype), tensor, mine, True, is_master)
    source = Source("", name, 0, tuple(tensor.shape), tensor.dtype)
    if is_dtensor(tensor):
        from lowmem_load.dtensor.shards import is_first_replica, local_shard

        grid, _ = local_shard(name, tensor, needs_memory=True)
        runs = tuple(flat_ranges(grid, source.shape)) if is_first_replica(tensor) else ()
        return LocalShard(source, tensor, runs, False, False)
    if tensor.is_meta or tensor.layout is not torch.strided:
        state = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
        raise UnsupportedError(f"{name}: is {state}, so it has no values")
    mine = (FlatRange(0, tensor.numel()),) if rank == 0 else ()
    return LocalShard(source, tensor, mine, False, False)
