"""What this rank owns of a model that is saved or sent, which elements it writes, and what the other ranks own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from lowmem_load.distributed.environment import has_group
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.distributed.steps import Alone, RankGroup
from lowmem_load.engines.mesh import all_ranks, cuts_of, is_first_replica, local_shard, reshard
from lowmem_load.errors import ConfigError, UnsupportedError, listed
from lowmem_load.planning.expression import Source
from lowmem_load.planning.regions import NOTHING, Distribution, FlatRange, OnFirst, Partitions, Region, Rule
from lowmem_load.symbolic.lazy import values_of
from lowmem_load.text import fingerprint

MemoryPiece: TypeAlias = "tuple[torch.Tensor, Region]"
"""Flat memory, and the elements of the full tensor that it contains, in order."""


@dataclass(frozen=True, slots=True)
class RankShard:
    """What this rank owns of a parameter or buffer. Only a DTensor has grids."""

    source: Source  # the full tensor in the plan: its first name, its shape, and the dtype of its memory
    tensor: torch.Tensor
    local_region: Region  # elements in its memory; rank 0 counts as the only owner of a replicated tensor
    region: Region  # elements that this rank writes: the local ones on their first owner, none on the other owners
    is_partitioned: bool  # whether it is a ZeRO-3 parameter
    is_master: bool  # whether its fp32 values are written

    @property
    def state(self) -> tuple[int, ...]:
        """Differs once the memory was changed or replaced. torch sees no changes by DeepSpeed's optimizers."""
        if is_dtensor(self.tensor):
            # Operations on it are seen on the DTensor, those of FSDP2 on its memory, which moves.
            memory = local_shard(self.source.name, self.tensor, needs_memory=True)[1]
            return memory._version, self.tensor._version  # noqa: SLF001  torch documents it
        memory, is_moved = self.tensor, not isinstance(self.tensor, nn.Parameter)  # modules may replace their buffers
        if self.is_partitioned:
            memory, is_moved = zero3().partition_of(self.tensor), zero3().may_be_on_nvme(self.tensor)
        return memory._version, 0 if is_moved else memory.data_ptr()  # noqa: SLF001

    @contextlib.contextmanager
    def memory(self) -> Iterator[list[MemoryPiece]]:
        """Yield the memory with the elements that this rank writes, in one piece."""
        with self.flat() as memory:
            yield [(memory, self.region)]

    @contextlib.contextmanager
    def flat(self) -> Iterator[torch.Tensor]:
        """Yield the flat memory: that of `local_region` in order; of a replicated tensor, all of it on each rank."""
        if is_dtensor(self.tensor):
            yield local_shard(self.source.name, self.tensor, needs_memory=True)[1]
        elif not self.is_partitioned:
            yield values_of(self.tensor.detach()).reshape(-1)
        elif self.is_master:
            yield zero3().master_partition(self.tensor).detach()
        else:
            with zero3().partition_in_memory(self.tensor, self.source.name) as partition:
                yield partition.detach()


def zero3() -> Any:
    """Return `engines.parameters`, which knows ZeRO-3 parameters. None without DeepSpeed: then there are none."""
    if "deepspeed" not in sys.modules:
        return None
    from lowmem_load.engines import parameters

    return parameters


class Wrapper(nn.Module):
    """Base class of the engines of lowmem_load: trains the model in its attribute `module`."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside engines, DDP and what torch.compile returns. FSDP2 shards it again.

    They are known by their classes: a model may have a child of any name.

    Raises:
        UnsupportedError: FSDP1 wraps a part of it.
    """
    inside: dict[type, str] = dict.fromkeys(
        (Wrapper, nn.DataParallel, DistributedDataParallel, AveragedModel), "module"
    )
    if zero3() is not None:
        inside |= dict.fromkeys(zero3().ENGINES, "module")
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:  # torch.compile imports it
        inside[dynamo.OptimizedModule] = "_orig_mod"  # as accelerate does
    while attribute := next((name for cls, name in inside.items() if isinstance(model, cls)), ""):
        model = getattr(model, attribute)
    reshard(model)
    return model


def rank_shards(model: nn.Module, rank: int, *, masters: bool) -> list[RankShard]:
    """Return each parameter and buffer of a model once.

    Every rank writes its partitions. Rank 0 writes what is replicated: the values of the ranks may differ (buffers,
    adapters that each rank initialized for itself), and a mixture would not be the model of any rank. With `masters`,
    the optimizer's fp32 values of partitioned parameters are written where there are some.
    """
    named = list(nn.Module.named_parameters(model))  # one of a class of its own may leave some out
    places = zero3().gathered_by_others([parameter for _, parameter in named]) if zero3() is not None else []
    if open_ones := [named[place][0] for place in places]:
        raise ConfigError(
            f"{listed(open_ones, 3)}: gathered by an open deepspeed.zero.GatheredParameters. Changes reach the "
            "partitions when the block ends: call save_model after it, on all ranks"
        )
    shards: dict[int, RankShard] = {}
    for name, tensor in (*named, *nn.Module.named_buffers(model)):
        if id(tensor) not in shards:
            shards[id(tensor)] = rank_shard_of(name, tensor, rank, masters=masters)
    return list(shards.values())


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "device_mesh")


def group_of(tensor: torch.Tensor) -> Any:
    """Return the group of torch.distributed whose ranks own the pieces of a tensor; None if it is replicated."""
    if is_dtensor(tensor):
        return all_ranks()
    parameters = zero3()
    return parameters.group_of(tensor) if parameters is not None and parameters.is_partitioned(tensor) else None


def rank_shard_of(name: str, tensor: torch.Tensor, rank: int, *, masters: bool) -> RankShard:
    """Return what this rank owns of a tensor. The first of several owners of the same elements writes them."""
    parameters = zero3()
    if isinstance(tensor, nn.Parameter) and parameters is not None:
        parameters.refuse_parallel(name, tensor)
        if parameters.is_partitioned(tensor):
            # DeepSpeed quantizes frozen weights where zero_quantized_nontrainable_weights says so.
            stored = parameters.partition_of(tensor).dtype
            if stored.is_floating_point != tensor.dtype.is_floating_point:
                raise UnsupportedError(f"{name}: is {tensor.dtype}, but its partitions are quantized, as {stored}")
            is_master = masters and tensor.dtype != torch.float32 and parameters.has_master(tensor)
            dtype = torch.float32 if is_master else tensor.dtype
            region = parameters.held_range(tensor)
            full = Source("", name, 0, parameters.full_shape(tensor), dtype)
            return RankShard(full, tensor, region, region, True, is_master)
    source = Source("", name, 0, tuple(tensor.shape), tensor.dtype)
    if is_dtensor(tensor):
        grid, _ = local_shard(name, tensor, needs_memory=True)
        return RankShard(source, tensor, grid, grid if is_first_replica(tensor) else NOTHING, False, False)
    if tensor.is_meta or tensor.layout is not torch.strided:
        state = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
        raise UnsupportedError(f"{name}: is {state}, so it has no values")
    all_or_none = FlatRange(0, tensor.numel()) if rank == 0 else NOTHING
    return RankShard(source, tensor, all_or_none, all_or_none, False, False)


def ranks_of(model: nn.Module, *, may_be_alone: bool = False) -> RankGroup:
    """Return the ranks that save a model together. Without a group they make one, unless they `may_be_alone`."""
    groups = list(dict.fromkeys(group for p in model.parameters() if (group := group_of(p)) is not None))
    if len(groups) > 1:
        raise UnsupportedError(f"the model's parameters are partitioned among {len(groups)} different groups of ranks")
    if groups or has_group():
        return RankGroup(groups[0] if groups else None)
    return Alone() if may_be_alone else DistributedInterface()


# -- what all ranks own, by rule, so that none has to be asked ---------------------------------------------------------


def rules_of(shards: Sequence[RankShard]) -> list[Rule]:
    """Return the rule by which each shard lies."""
    meshes: dict[Any, Any] = {}
    rules: list[Rule] = []
    for shard in shards:
        if is_dtensor(tensor := shard.tensor):
            rules.append(cuts_of(shard.source.name, tensor, meshes))
        else:
            rules.append(Partitions(zero3().full_numel(tensor)) if shard.is_partitioned else OnFirst(tensor.numel()))
    return rules


def layouts_by_rule(
    shards: Sequence[RankShard], rules: Sequence[Rule], rank: int, world_size: int
) -> tuple[dict[str, Distribution], str]:
    """Return the layout of each parameter, and a digest of all that the rules say.

    Raises UnsupportedError unless this rank's elements lie by the rule.
    """
    layouts: dict[Rule, Distribution] = {}
    named: dict[str, Distribution] = {}
    for shard, rule in zip(shards, rules, strict=True):
        if rule not in layouts:
            layouts[rule] = Distribution(rule.regions(world_size), shard.source.shape)
        layout = named[shard.source.name] = layouts[rule]
        by_rule, here = layout.regions[rank], shard.local_region
        if by_rule != here and by_rule.numel + here.numel:
            raise UnsupportedError(f"{shard.source.name}: this rank owns {here} of it, but by {rule} {by_rule}")
    numbers = {rule: number for number, rule in enumerate(layouts)}  # a rule may name thousands of ranks
    return named, fingerprint((*map(repr, layouts), repr([numbers[rule] for rule in rules])))
