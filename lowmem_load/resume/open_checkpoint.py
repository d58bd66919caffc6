"""Opens a ZeRO checkpoint of DeepSpeed and checks its files against each other. Reads no weights.

Under stage 3 each rank saves model states and optimizer states. Under stages 1 and 2 there is one file of model states
for all ranks, with the full 16-bit weights.

Source: deepspeed 0.19.8 `runtime/engine.py`, `_save_checkpoint` and `_save_zero_checkpoint`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from lowmem_load.errors import CheckpointError, UnsupportedError
from lowmem_load.formats.inert_pickle import Tensor, shown
from lowmem_load.formats.torch_zip import TorchObjects
from lowmem_load.io.executor import Executor
from lowmem_load.partial.partial_checkpoint import REPLICATED_FILE
from lowmem_load.planning.expression import Shape
from lowmem_load.resume.zero_checkpoint import COUNTERS, Checkpoint, SavedParameter, at, find_folder
from lowmem_load.resume.zero_files import Files, trained_parameters, zero_state

_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt|mp_rank_00_model_states\.pt")
_STATES_FOR_ALL = "mp_rank_00_model_states.pt"


def open_checkpoint(folder: str, executor: Executor) -> Checkpoint:
    """Return what a checkpoint holds. Everything that decides what lies where is checked.

    The executor reads small values, and keeps the files open.
    """
    model_names, optim_names = _names(folder)
    stage = 2 if model_names[0] == _STATES_FOR_ALL else 3
    files = Files(folder, executor)
    models, optims = [files.open(name) for name in model_names], [files.open(name) for name in optim_names]
    groups, frozen = _shapes(models)
    _check_worlds(models, optims, stage)
    trained = trained_parameters(files, groups, optims, stage)
    first, tree, path = models[0], models[0].tree, models[0].path
    module: dict[Any, Any] = at(tree, "module", dict, path)
    names = [name for name in at(tree, "buffer_names", list, path) if isinstance(name, str)]
    buffers = {name: files.replicated(first, name, module[name]) for name in names if name in module}
    shared: dict[str, str] = at(tree, "shared_params", dict, path)
    if not all(isinstance(name, str) for pair in shared.items() for name in pair):
        raise CheckpointError(f"{path}: its 'shared_params' are malformed")
    if stage == 2:
        known = {*trained, *shared, *buffers}
        rest = {name: each for name, each in module.items() if isinstance(name, str) and isinstance(each, Tensor)}
        others = {name: files.replicated(first, name, each) for name, each in rest.items() if name not in known}
        frozen = frozen if frozen is not None else ({} if others else None)
    else:
        others = {name: files.fragments(models, name, shape) for name, shape in (frozen or {}).items()}
    return Checkpoint(
        folder=folder,
        world_size=len(optims),
        parameters={**trained, **others},
        lacks_frozen=frozen is None,
        shared=shared,
        replicated={**buffers, **_replicated(files)},
        optimizer=zero_state(optims[0], stage),
        states=models,
        files=files.opened,
        _executor=executor,
    )


def saved_by(load_dir: str | os.PathLike[str], tag: str | None) -> int | None:
    """Return how many ranks saved a checkpoint under ZeRO-3; None for another one, or if that is unknown."""
    try:
        folder = find_folder(load_dir, tag)
        names = [] if folder is None else sorted(os.listdir(folder))
        states = [name for name in names if (match := _STATES.fullmatch(name)) and match[3] == "model"]
        if folder is None or not states:
            return None
        with Executor() as executor:
            # Every file of model states says it, so ranks that see different files find the same number.
            file = Files(folder, executor).open(states[0])
            count: int = at(file.tree, "dp_world_size", int, file.path)
            return count
    except (CheckpointError, OSError):  # whoever loads it says what is wrong
        return None


def _names(folder: str) -> tuple[list[str], list[str]]:
    """Return the files of model states and those of optimizer states, by rank."""
    names = sorted(os.listdir(folder))
    found: dict[str, dict[int, str]] = {"model": {}, "optim": {}}
    for name in names:
        match = _STATES.fullmatch(name)
        is_other = name.startswith(("mp_rank_", "layer_", "expp_rank_")) and name != _STATES_FOR_ALL
        if is_other or (match and int(match[2] or 0)):
            raise UnsupportedError(
                f"{folder}: {name}: is of tensor, pipeline or expert parallelism; load it with the engine's own "
                "load_checkpoint"
            )
        if match is not None:
            rank = int(match[1] or 0)
            other = found[match[3] or "model"].setdefault(rank, name)
            if other != name:
                raise CheckpointError(
                    f"{folder}: {other} and {name} are both of rank {rank}: two jobs saved into one folder; remove the "
                    "files of one"
                )
    models, optims = ([by_rank[rank] for rank in sorted(by_rank)] for by_rank in found.values())
    if not models or not optims:
        raise CheckpointError(
            f"{folder}: holds no {'optimizer' if models else 'model'} states of ZeRO: expected files "
            f"zero_pp_rank_*_mp_rank_00_model_states.pt (of stages 1 and 2 {_STATES_FOR_ALL}) and "
            "*zero_pp_rank_*_mp_rank_00_optim_states.pt. Of a universal checkpoint, name the one that it was made of"
        )
    return models, optims


def _shapes(models: Sequence[TorchObjects]) -> tuple[list[dict[str, Shape]], dict[str, Shape] | None]:
    """Return names and shapes of the groups' parameters, and of the frozen ones, if they were saved."""
    read = []
    for file in models:
        frozen = file.tree.get("frozen_param_shapes")
        groups = [_checked(file, group) for group in at(file.tree, "param_shapes", list, file.path)]
        read.append((groups, None if frozen is None else _checked(file, frozen)))
        if read[-1] != read[0]:
            raise CheckpointError(f"{file.path}: has other parameters than {os.path.basename(models[0].path)}")
    return read[0]


def _check_worlds(models: Sequence[TorchObjects], optims: Sequence[TorchObjects], stage: int) -> None:
    for file in models:
        # Compared as they are shown: containers could take for ever to compare.
        if any(shown(file.tree.get(key)) != shown(models[0].tree.get(key)) for key in COUNTERS):
            raise CheckpointError(
                f"{file.path}: was saved at step {shown(file.tree.get('global_steps'))}, "
                f"{os.path.basename(models[0].path)} at {shown(models[0].tree.get('global_steps'))}: a save over "
                "an earlier one did not end; take another checkpoint"
            )
    counts = {file.path: file.tree.get("dp_world_size") for file in models}
    for file in optims:
        count = zero_state(file, stage).get("partition_count")
        # Stages 1 and 2 save it for each group.
        if isinstance(count, list) and count and all(type(each) is int and each == count[0] for each in count):
            count = count[0]
        counts[file.path] = count
    for path, count in counts.items():
        if count != len(optims) or len(models) != (len(optims) if stage == 3 else 1):
            raise CheckpointError(
                f"{path}: was saved by {shown(count)} ranks, but there are {len(models)} files of model states and "
                f"{len(optims)} of optimizer states: some are left from another save, or missing (copy the files of "
                "all ranks to one folder)"
            )


# -- contents of the model states ------------------------------------------------------------------------------------


def _replicated(files: Files) -> dict[str, SavedParameter]:
    """Return what partial ZeRO-3 saved in full: buffers, and parameters with their fp32 values."""
    if not os.path.exists(os.path.join(files.folder, REPLICATED_FILE)):
        return {}
    file = files.open(REPLICATED_FILE)
    tree, path = file.tree, file.path
    masters = at(at(tree, "whole", dict, path), "masters", dict, path)
    held = {**at(tree, "buffers", dict, path), **at(tree, "parameters", dict, path), **masters}
    return {name: files.replicated(file, name, tensor) for name, tensor in held.items()}


def _checked(file: TorchObjects, shapes: Any) -> dict[str, Shape]:
    is_right = isinstance(shapes, dict) and all(
        isinstance(name, str) and isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
        for name, shape in shapes.items()
    )
    if not is_right:
        raise CheckpointError(f"{file.path}: its parameters' shapes are malformed")
    return {name: tuple(shape) for name, shape in shapes.items()}
