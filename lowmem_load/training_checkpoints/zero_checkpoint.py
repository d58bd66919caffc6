"""A ZeRO checkpoint of DeepSpeed, and where the elements of its parameters lie in the files.

`save_checkpoint` writes torch zips on N ranks. Their directories and pickles are read, and no pickle is run
(`formats/inert_pickle.py`).

[Note: flat groups] Under stage 3 each of N ranks saves one flat tensor per sub-group of the optimizer, in fp32, and one
for each of its moments. It holds the rank's partitions of the sub-group's parameters, one after the other, each padded
to `ceil(numel / N)` elements. So element `i` of a parameter is element `offset + i % size` of rank `i // size`.
`sub_group_size` counts elements of a rank, so the sub-groups depend on N too: parameters are found by the names and
shapes that the file gives for each sub-group. Of each frozen parameter, each rank's file of model states has one padded
fragment.

[Note: chains] Stages 1 and 2 put the replicated parameters of each optimizer group one after the other, pad each of
them and the end, and cut the result into N flat tensors of equal length. The fp32 values are saved without the padding
at the end, so the last tensors may be shorter or empty. Moments are saved with it.

Source: deepspeed 0.19.8 `runtime/engine.py`, `_save_checkpoint`, `_save_zero_checkpoint`, `_get_zero_param_shapes` and
`_get_zero_frozen_param_attributes`; `runtime/zero/stage3.py`, `_create_fp16_sub_groups` and `_rigid_state_dict`;
`runtime/zero/stage_1_and_2.py`, `__init__` and `state_dict`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lowmem_load.errors import CheckpointError, listed
from lowmem_load.formats.inert_pickle import Foreign, Tensor
from lowmem_load.formats.plain_values import plain
from lowmem_load.formats.torch_zip import TorchObjects
from lowmem_load.io.executor import Executor
from lowmem_load.io.fill import read_whole
from lowmem_load.planning.expression import Expression, Shape, Source, concat, reshape
from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.planning.regions import FlatRange, partition_numel

REPLICATED_FILE = "lowmem_load_whole_states.pt"
"""A file in the folder of the tag, next to DeepSpeed's. Its name must not change, or older checkpoints do not load."""

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""Entries of the model states that count steps."""

OF_DEEPSPEED = (
    *("module", "optimizer", "lr_scheduler", "data_sampler", "random_ltd", "global_steps", "skipped_steps"),
    *("dp_world_size", "mp_world_size", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
)
"""Entries of the model states that are not client state: those that DeepSpeed's `load_checkpoint` leaves out."""

_MAX_SCALAR_NUMEL = 1 << 20
"""Most elements of a tensor in a scheduler's or the user's own state, which is read at once."""


FP32 = "fp32"
"""Key of a parameter's values, beside the keys of the moments. Values of frozen parameters may have 16 bits."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The elements of one parameter, or of one of its moments, in the flat tensors of all ranks.

    Element `i` of the parameter is element `offset + (i + shift) % size` of the flat tensor of rank
    `(i + shift) // size`. See [Note: flat groups], where `shift` is 0, and [Note: chains], where `offset` is 0.
    """

    flats: tuple[Source, ...]
    size: int
    offset: int = 0
    shift: int = 0

    def part(self, wanted: FlatRange) -> Expression:
        """Return the elements `wanted` of the parameter: a run of each file that holds some of them."""
        start, end = self.shift + wanted.start, self.shift + wanted.end
        runs: list[Source] = []
        for rank in range(start // self.size, -(-end // self.size)) if wanted.numel else ():
            first, last = max(start, rank * self.size), min(end, (rank + 1) * self.size)
            flat, skipped = self.flats[rank], self.offset + first - rank * self.size
            runs.append(replace(flat, start=flat.start + skipped * flat.dtype.itemsize, shape=(last - first,)))
        return concat(runs, 0) if len(runs) > 1 else runs[0] if runs else replace(self.flats[0], shape=(0,))


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """A parameter of a checkpoint.

    Attributes:
        name, shape: in the model that was saved.
        pieces: of its values (`FP32`) and of each of the optimizer's moments.
        group: number of its sub-group; None for a parameter that the optimizer did not have.
        scalars: other values that the optimizer keeps for the sub-group: the number of steps.
    """

    name: str
    shape: Shape
    pieces: Mapping[str, Pieces]
    group: int | None
    scalars: Mapping[str, Any] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.pieces[FP32].flats[0].dtype

    @property
    def whole(self) -> Expression:
        """All of the values."""
        return reshape(self.pieces[FP32].part(FlatRange(0, self.numel)), self.shape)

    def part(self, elements: FlatRange) -> tuple[Expression, FlatRange]:
        """Return an expression that has these elements of the values, and where in it they are."""
        return self.pieces[FP32].part(elements), FlatRange(0, elements.numel)


def group_numels(groups: Sequence[Mapping[str, Shape]], world_size: int) -> list[int]:
    """Return how many elements each sub-group's flat tensor has on a rank, padding included."""
    return [sum(partition_numel(math.prod(shape), world_size) for shape in group.values()) for group in groups]


def place_groups(
    groups: Sequence[Mapping[str, Shape]],
    flats: Sequence[Sequence[Mapping[str, Source]]],
    scalars: Sequence[Mapping[str, Any]],
    paddings: Sequence[Sequence[int]] | None = None,
) -> dict[str, SavedParameter]:
    """Return the trained parameters by name, given the flat tensors of each rank, group and key.

    `paddings` are the elements behind each parameter of each group under stages 1 and 2; None under stage 3.
    """
    parameters: dict[str, SavedParameter] = {}
    for number, group in enumerate(groups):
        of_ranks = {key: tuple(by_group[number][key] for by_group in flats) for key in flats[0][number]}
        start = needed = 0
        for position, (name, shape) in enumerate(group.items()):
            if paddings is None:
                size = partition_numel(math.prod(shape), len(of_ranks[FP32]))
                pieces = {key: Pieces(ranks, size, offset=start) for key, ranks in of_ranks.items()}
                start += size
            else:
                pieces = {key: Pieces(ranks, ranks[0].shape[0], shift=start) for key, ranks in of_ranks.items()}
                needed = start + math.prod(shape)
                start = needed + paddings[number][position]
            parameters[name] = SavedParameter(name, tuple(shape), pieces, number, scalars[number])
        for ranks in of_ranks.values():
            _check_dtypes(ranks)
            if paddings is not None:
                _check_chain(ranks, needed)
    return parameters


def _check_dtypes(flats: Sequence[Source]) -> None:
    first = flats[0]
    if any(flat.dtype != first.dtype for flat in flats):
        raise CheckpointError(f"{first.path}: {first.name} is {first.dtype}, and on other ranks of another dtype")


def _check_chain(flats: Sequence[Source], needed: int) -> None:
    size = max(flat.shape[0] for flat in flats)
    for rank, flat in enumerate(flats):
        mine = min(max(0, needed - rank * size), size)
        if flat.shape[0] < mine or needed > size * len(flats):
            raise CheckpointError(
                f"{flat.path}: {flat.name} has {flat.shape[0]} elements, but {needed} of {len(flats)} ranks with at "
                f"most {size} each are expected, as the model states say"
            )


def place_fragments(name: str, shape: Shape, fragments: Sequence[Source]) -> SavedParameter:
    """Return a frozen parameter: one padded fragment per rank, or one fragment that is the whole parameter."""
    _check_dtypes(fragments)
    pieces = Pieces(tuple(fragments), partition_numel(math.prod(shape), len(fragments)))
    return SavedParameter(name, tuple(shape), {FP32: pieces}, None)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A ZeRO checkpoint.

    Attributes:
        folder: of the tag.
        world_size: number of ranks that saved it.
        parameters: by name: first the trained ones in the optimizer's order, then the frozen ones.
        lacks_frozen: whether it was saved with `exclude_frozen_parameters`.
        shared: names that stand for another parameter, by name.
        replicated: tensors that every rank had in full, by name: buffers, and those that partial ZeRO-3 leaves whole.
        optimizer: the tree that the ZeRO optimizer of rank 0 saved.
        states: the tree of model states of each rank; one for all ranks under stages 1 and 2.
        files: all files.
    """

    folder: str
    world_size: int
    parameters: Mapping[str, SavedParameter]
    lacks_frozen: bool
    shared: Mapping[str, str]
    replicated: Mapping[str, SavedParameter]
    optimizer: Mapping[str, Any]
    states: Sequence[TorchObjects]
    files: Sequence[PlannedFile]
    _executor: Executor = field(repr=False)

    @property
    def of_module(self) -> dict[str, SavedParameter]:
        """The parameters in the module's state dict. Partial ZeRO-3 may give the optimizer others too."""
        module = at(self.states[0].tree, "module", dict, self.states[0].path)
        return {name: parameter for name, parameter in self.parameters.items() if name in module}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The hyperparameters of each of the optimizer's groups."""
        groups = base_optimizer(self.optimizer, self.folder).get("param_groups")
        param_groups = plain(groups, f"{self.folder}: param_groups", self._reader(None))
        if not isinstance(param_groups, list) or not all(isinstance(group, dict) for group in param_groups):
            raise CheckpointError(f"{self.folder}: its optimizer's param_groups are no list of dicts")
        return param_groups

    @property
    def loss_scaler(self) -> tuple[str, dict[str, Any]]:
        """The name of the class of the loss scaler, and its attributes."""
        scaler = self.optimizer.get("loss_scaler")
        if not isinstance(scaler, Foreign) or not isinstance(scaler.state, dict):
            return "", {}
        attributes = plain(scaler.state, f"{self.folder}: loss_scaler", self._reader(None))
        return scaler.name.rpartition(".")[2], attributes

    @property
    def counters(self) -> dict[str, int]:
        """The engine's counters of steps."""
        tree = self.states[0].tree
        return {key: tree[key] for key in COUNTERS if type(tree.get(key)) is int}

    def state(self, key: str, rank: int = 0, *, trusted: bool = False) -> Any:
        """Return an entry of a rank's model states as Python objects; None if there is none.

        If `trusted`, Python unpickles the file where the entry holds objects of other classes.
        """
        file = self.states[rank]
        try:
            return plain(file.tree.get(key), f"{os.path.basename(file.path)}: {key}", self._reader(file))
        except CheckpointError as error:
            if not trusted:
                raise CheckpointError(
                    f"{self.folder}: {error}. If you trust whoever has saved it, pass trusted=True, which lets Python "
                    "unpickle this file"
                ) from error
        return torch.load(file.path, map_location="cpu", mmap=True, weights_only=False).get(key)

    def client_state(self, rank: int, *, trusted: bool) -> dict[str, Any]:
        """Return what a rank's model states hold besides DeepSpeed's own entries. See `state`."""
        keys = [key for key in self.states[rank].tree if key not in OF_DEEPSPEED]
        return {key: self.state(key, rank, trusted=trusted) for key in keys}

    def _reader(self, file: TorchObjects | None) -> Any:
        def read(tensor: Tensor, where: str) -> torch.Tensor:
            if file is None or math.prod(tensor.size) > _MAX_SCALAR_NUMEL:
                raise CheckpointError(f"{where} is a tensor of shape {tensor.size}, expected a small value")
            return read_whole(self._executor, file.expression(tensor, where))

        return read


def find_folder(folder: str | os.PathLike[str], tag: str | None) -> str | None:
    """Return the folder of a tag. Without a tag, the file `latest` names it; None if that is not there."""
    root, named_by = os.fspath(folder), "tag"
    if tag is None:
        path, named_by = os.path.join(root, "latest"), "latest"
        if not os.path.isfile(path):
            return None
        with open(path, encoding="utf-8", errors="replace") as file:
            tag = file.read(4096).strip()
    tag = str(tag)
    path_of_tag = os.path.join(root, tag)
    if tag in ("", os.curdir, os.pardir) or os.path.basename(tag) != tag or not os.path.isdir(path_of_tag):
        there = sorted(entry.name for entry in os.scandir(root) if entry.is_dir()) if os.path.isdir(root) else []
        raise CheckpointError(
            f"{root}: no checkpoint {tag!r}, which {named_by!r} names; there are: {listed(there) or 'none'}"
        )
    return path_of_tag


def base_optimizer(zero: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the state dict of torch's optimizer in that of a ZeRO optimizer."""
    key = "optimizer_state_dict" if "optimizer_state_dict" in zero else "base_optimizer_state"
    state: dict[str, Any] = at(zero, key, dict, path)
    return state


def at(tree: Any, key: str | int, kind: type, path: str) -> Any:
    """Return an entry of a tree; raise CheckpointError if there is none of this kind."""
    entry = tree.get(key) if isinstance(tree, dict) else None
    if not isinstance(entry, kind):
        raise CheckpointError(f"{path}: no {key!r} in it; it is no checkpoint that DeepSpeed has saved under ZeRO")
    return entry


def differences_of(
    saved: Mapping[str, Shape], expected: Mapping[str, Shape], unknown: Iterable[str], owner: str
) -> str:
    """Return how saved parameters differ from expected ones; "" if not. The owner does not have the `unknown` ones."""
    shapes = [
        f"{name} is {saved[name]}, not {shape}" for name, shape in expected.items() if saved.get(name, shape) != shape
    ]
    lists = {
        "missing": sorted(set(expected) - set(saved)),
        f"not in the {owner}": sorted(unknown),
        "of another shape": shapes,
    }
    return "; ".join(f"{what}: {', '.join(names[:4])} ({len(names)})" for what, names in lists.items() if names)
