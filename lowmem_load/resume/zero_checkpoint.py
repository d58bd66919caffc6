"""A ZeRO checkpoint of DeepSpeed: what lies where in its files.

There are two kinds of folder: what `save_checkpoint` writes on N ranks, and what `ds_to_universal` makes of it. Both
hold torch zips. Their directories and pickles are read, and no pickle is run (`formats/inert_pickle.py`).

Source: deepspeed 0.19.8 `runtime/engine.py`, `_save_checkpoint` and `_save_zero_checkpoint`;
`checkpoint/ds_to_universal.py`, `main`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowmem_load.errors import CheckpointError, listed
from lowmem_load.formats.inert_pickle import Foreign, Tensor
from lowmem_load.formats.plain_objects import plain
from lowmem_load.formats.torch_zip import TorchObjects
from lowmem_load.io.executor import Executor, read_whole
from lowmem_load.planning.expression import Shape
from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.resume.zero_layout import SavedParameter

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""Entries of the model states that count steps."""

OF_DEEPSPEED = frozenset(
    {
        *("module", "optimizer", "lr_scheduler", "data_sampler", "random_ltd", "global_steps", "skipped_steps"),
        *("dp_world_size", "mp_world_size", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    }
)
"""Entries of the model states that are not client state: those that DeepSpeed's `load_checkpoint` leaves out."""

_MAX_SCALAR_NUMEL = 1 << 20
"""Most elements of a tensor in a scheduler's or the user's own state, which is read at once."""


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
        return {name: one for name, one in self.parameters.items() if name in module}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The hyperparameters of each of the optimizer's groups."""
        groups = base_optimizer(self.optimizer, self.folder).get("param_groups")
        found = plain(groups, f"{self.folder}: param_groups", self._reader(None))
        if not isinstance(found, list) or not all(isinstance(group, dict) for group in found):
            raise CheckpointError(f"{self.folder}: its optimizer's param_groups are no list of dicts")
        return found

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

        Raises:
            CheckpointError: the entry holds such objects.
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


def find_folder(folder: str | os.PathLike[str], tag: str | None, latest: Sequence[str] = ("latest",)) -> str | None:
    """Return the folder of a tag. Without a tag, a file of the checkpoint folder names it; None if there is no file.

    `latest` has the names of files that may hold the tag. The first one that exists counts.

    Raises:
        CheckpointError: there is no such tag.
    """
    root, named_by = os.fspath(folder), "tag"
    if tag is None:
        path = next((path for name in latest if os.path.isfile(path := os.path.join(root, name))), None)
        if path is None:
            return None
        named_by = os.path.basename(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            tag = file.read(4096).strip()
    found = os.path.join(root, str(tag))
    if str(tag) in ("", os.curdir, os.pardir) or os.path.basename(str(tag)) != str(tag) or not os.path.isdir(found):
        there = sorted(entry.name for entry in os.scandir(root) if entry.is_dir()) if os.path.isdir(root) else []
        raise CheckpointError(
            f"{root}: no checkpoint {tag!r}, which {named_by!r} names; there are: {listed(there) or 'none'}"
        )
    return found


def base_optimizer(zero: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the state dict of torch's optimizer in that of a ZeRO optimizer. Stages name it differently."""
    for key in ("optimizer_state_dict", "base_optimizer_state"):
        if key in zero:
            found: dict[str, Any] = at(zero, key, dict, path)
            return found
    return zero  # a universal checkpoint of stages 1 and 2 has its groups here


def at(tree: Any, key: str | int, kind: type, path: str) -> Any:
    """Return an entry of a tree; raise CheckpointError if there is none of this kind."""
    found = tree.get(key) if isinstance(tree, dict) else None
    if not isinstance(found, kind):
        raise CheckpointError(f"{path}: no {key!r} in it; it is no checkpoint that DeepSpeed has saved under ZeRO")
    return found


def differences_of(
    found: Mapping[str, Shape], expected: Mapping[str, Shape], unknown: Iterable[str], owner: str
) -> str:
    """Return how saved parameters differ from expected ones, by name and shape; empty text if they do not.

    `unknown` are names that the owner of the expected ones, "engine" or "model", does not have.
    """
    shapes = [
        f"{name} is {found[name]}, not {shape}" for name, shape in expected.items() if found.get(name, shape) != shape
    ]
    lists = {
        "missing": sorted(set(expected) - set(found)),
        f"not in the {owner}": sorted(unknown),
        "of another shape": shapes,
    }
    return "; ".join(f"{what}: {', '.join(names[:4])} ({len(names)})" for what, names in lists.items() if names)
