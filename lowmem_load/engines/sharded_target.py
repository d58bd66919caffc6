"""The target of `load_into`: the parameters and buffers of a model that its owner has sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from lowmem_load.config.settings import Settings
from lowmem_load.engines.mesh import dtypes_of_computation, holders, local_shard, part_of
from lowmem_load.engines.target import HostBytes, Layout, Made, Target
from lowmem_load.errors import CheckpointError, ConfigError, UnsupportedError
from lowmem_load.files.memory import untouched_bytes
from lowmem_load.models.wrappers import named_tensors, plain_name, refuse_differences
from lowmem_load.planning.load_plan import SHARDED, TargetPlan
from lowmem_load.planning.regions import FlatRange, Grid
from lowmem_load.quantized.format import packed_parameters


class ShardedModel:
    """The tensors of a sharded transformers model, under each of the names that a checkpoint gives them.

    `left` has the names of those that the caller fills. `planned_device` is the type of device that will have the
    shards, for a plan of a model without memory. `is_skeleton`: transformers has built the model and tied nothing yet.
    """

    def __init__(
        self,
        model: nn.Module,
        left: Collection[str] = (),
        planned_device: str | None = None,
        *,
        is_skeleton: bool = False,
    ) -> None:
        self.model = model
        self.left, self.planned_device = {plain_name(model, name) for name in left}, planned_device
        self.is_skeleton = is_skeleton
        self.casts = dtypes_of_computation(model)
        self.parameters, self.buffers = _tensors(model, self.left)
        self._shards = {
            id(tensor): local_shard(name, tensor, needs_memory=planned_device is None)
            for name, tensor in {**self.parameters, **self.buffers}.items()
        }

    def shard(self, tensor: torch.Tensor) -> tuple[Grid, torch.Tensor]:
        """Return which elements of one of the tensors this rank owns, and its memory. See `local_shard`."""
        return self._shards[id(tensor)]

    def tie(self, groups: Iterable[Sequence[str]]) -> None:
        """Have a skeleton share one parameter among the names of each group, and no others.

        Raise CheckpointError if the model of a caller shares one among several groups, which have values of their own.
        """
        users: dict[int, str] = {}
        for group in groups:
            names = [name for name in group if name in self.parameters]
            for name in names:
                if self.is_skeleton and self.parameters[name] is not self.parameters[names[0]]:
                    # Nothing reads into the memory of the second one, which goes with it. A module that is in several
                    # places has the parameter under several names.
                    self._shards.pop(id(self.parameters[name]), None)
                    owner, _, last = name.rpartition(".")
                    setattr(self.model.get_submodule(owner), last, self.parameters[names[0]])
                    self.parameters[name] = self.parameters[names[0]]
                other = users.setdefault(id(self.parameters[name]), name)
                if other not in names:
                    raise CheckpointError(
                        f"{other} and {name}: the model has one parameter for both, but an ordinary load gives each "
                        "its own: their tensors in the files differ, or the class does not declare the tie in "
                        "_tied_weights_keys. Give each a parameter before you shard the model: "
                        f"set tie_word_embeddings=False in its configuration, or {name} to "
                        "nn.Parameter(torch.empty_like(...)); load_model with the mesh does so by itself"
                    )

    def check_names(self, described: nn.Module) -> None:
        """Raise CheckpointError unless a described model has parameters and buffers of the same names and shapes."""
        parameters, buffers = _tensors(described, self.left)
        for kind, present, expected in (
            ("parameters", self.parameters, parameters),
            ("buffers", self.buffers, buffers),
        ):
            problems = {
                f"{kind} that neither a file nor a rule fills": present.keys() - expected.keys(),
                f"{kind} of the checkpoint that the model lacks": expected.keys() - present.keys(),
                f"{kind} of other shapes": [
                    f"{name} {tuple(present[name].shape)} instead of {tuple(expected[name].shape)}"
                    for name in present.keys() & expected.keys()
                    if present[name].shape != expected[name].shape
                ],
            }
            refuse_differences(
                f"{type(described).__name__}: the model and its checkpoint do not match",
                problems,
                "Build the model from the configuration of the checkpoint. Name what you have added to it in `skip`, "
                "and fill that yourself",
            )

    def fill_buffers(self, described: nn.Module) -> None:
        """Copy the buffers of a loaded model. Buffers are small: each rank has read them in full."""
        for name, buffer in _tensors(described, self.left)[1].items():
            grid, memory = self.shard(self.buffers[name])
            memory.copy_(part_of(buffer, grid))


class Unfilled(Target):
    """Every parameter without memory on this rank: it is filled by others, or later. A `Target`."""

    device = torch.device("cpu")

    def layout(self, name: str, parameter: torch.Tensor) -> Layout:
        """See `Target`."""
        return Layout(SHARDED, parameter.dtype, (FlatRange(0, 0),), (0,), on_host=True)

    def make(self, plan: TargetPlan, parameter: nn.Parameter, wait: Callable[[], None]) -> Made:
        """See `Target`."""
        values = torch.empty(plan.shape, dtype=plan.dtype, device="meta")
        return nn.Parameter(values, requires_grad=parameter.requires_grad), [torch.empty(0, dtype=plan.dtype)]


class Sharded(Unfilled):
    """Every parameter in the memory where its owner keeps this rank's shard. `described` is the model of that load.

    What the caller fills is `Unfilled`. Buffers are read on the host, and `ShardedModel.fill_buffers` moves them on.
    """

    def __init__(self, sharded: ShardedModel, settings: Settings, described: nn.Module) -> None:
        self._sharded, self._described, self._world_size = sharded, described, settings.world_size
        self._names: dict[str, list[str]] = {}
        self._holders: dict[Any, Sequence[int]] = {}

    def layout(self, name: str, parameter: torch.Tensor) -> Layout:
        """See `Target`. Tied parameters have one region for each tensor that the sharded model has for them."""
        # Source: transformers 5.23 `modeling_utils.py`, `PreTrainedModel.all_tied_weights_keys`: targets and sources.
        ties: Mapping[str, str] = getattr(self._described, "all_tied_weights_keys", None) or {}
        # Before `check` it is not known which parameters share a value, so any part of these may be needed.
        is_open = name in (*ties, *ties.values()) or self._plain(name) not in self._sharded.parameters
        if is_open and not self._names:
            numel = parameter.numel()
            return Layout(SHARDED, parameter.dtype, (FlatRange(0, numel),), (numel,), on_host=True)
        tensors = list(self._tensors(self._names.get(name, [name])))
        if not tensors:
            return super().layout(name, parameter)
        shards = [self._sharded.shard(tensor) for tensor in tensors]
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            raise UnsupportedError(f"{name}: tied parameters have the dtypes {dtypes}; give them one dtype")
        grids = tuple(grid for grid, _ in shards)
        on_host = all((self._sharded.planned_device or memory.device.type) == "cpu" for _, memory in shards)
        numels = tuple(grid.numel for grid in grids)
        of_grids = [holders(tensor, self._world_size, self._holders) for tensor in tensors]
        return Layout(SHARDED, dtypes.pop(), grids, numels, on_host, keeps_casts=True, holders=of_grids)

    def fp32_buffers(self, model: nn.Module) -> list[torch.Tensor]:
        """Return the buffers that the sharded model keeps in fp32: a cast to a smaller dtype would lose bits."""
        names = {name for name, buffer in self._sharded.buffers.items() if buffer.dtype == torch.float32}
        return [buffer for name, buffer in _tensors(model)[1].items() if name in names]

    def check(self, model: nn.Module) -> None:
        """See `Target`. From here on parameters are tied."""
        _check_packed(model, self._sharded)
        self._sharded.check_names(model)
        first: dict[int, str] = {}  # the name by which a plan knows a tied parameter
        for name, parameter in nn.Module.named_parameters(model, remove_duplicate=False):
            self._names.setdefault(first.setdefault(id(parameter), name), []).append(name)
        self._sharded.tie([[*map(self._plain, names)] for names in self._names.values()])

    def host_bytes(self, plans: Sequence[TargetPlan]) -> HostBytes:
        """See `Target`. The shards are there, often without pages: `to_empty` does not touch them."""
        shards = (self._sharded.shard(tensor)[1] for plan in plans for tensor in self._tensors(plan.names))
        return HostBytes(untouched=sum(untouched_bytes(memory) for memory in shards if memory.is_cpu))

    def make(self, plan: TargetPlan, parameter: nn.Parameter, wait: Callable[[], None]) -> Made:
        """Return the sharded model's parameter and its memory. See `Target`."""
        tensors = list(self._tensors(plan.names))
        if not tensors:
            return super().make(plan, parameter, wait)
        for tensor in tensors if self._sharded.is_skeleton else ():
            tensor.requires_grad_(parameter.requires_grad)  # not as the constructor has set it
        return tensors[0], [self._sharded.shard(tensor)[1] for tensor in tensors]

    def _plain(self, name: str) -> str:
        return plain_name(self._described, name)

    def _tensors(self, names: Sequence[str]) -> Iterator[nn.Parameter]:
        """Yield the distinct parameters of the sharded model that have these names."""
        parameters = self._sharded.parameters
        distinct = {id(parameters[name]): parameters[name] for name in map(self._plain, names) if name in parameters}
        yield from distinct.values()


def _check_packed(described: nn.Module, sharded: ShardedModel) -> None:
    """Raise for packed weights that do not fit the sharded model, or that FSDP2 would cast as if they were numbers."""
    for name, parameter in packed_parameters(described).items():
        own = sharded.parameters.get(plain_name(described, name))
        if own is None:
            continue
        shape = tuple(parameter.shape)
        if tuple(own.shape) != shape or own.dtype != parameter.dtype:
            raise UnsupportedError(
                f"{name}: stays packed as {shape} of {parameter.dtype}, but the model has {tuple(own.shape)} of "
                f"{own.dtype}; before you shard the model set it to nn.Parameter(torch.empty({shape}, "
                f'dtype={parameter.dtype}, device="meta"), requires_grad=False)'
            )
        if casts := sharded.casts - {parameter.dtype}:
            raise ConfigError(
                f"{name}: its packed values are stored as {parameter.dtype}, and FSDP2 would cast them to "
                f"{casts.pop()} as if they were numbers (mp_policy); use that dtype as "
                f"{parameter.packing.storage_option}, and pack a checkpoint again that is packed already"
            )


def _tensors(model: nn.Module, left: Collection[str] = ()) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    named = [named for named in named_tensors(model) if named.name not in left]
    parameters = {each.name: cast("nn.Parameter", each.tensor) for each in named if each.is_parameter}
    return parameters, {each.name: each.tensor for each in named if not each.is_parameter}
