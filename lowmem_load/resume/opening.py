"""Opens a checkpoint that DeepSpeed has saved under ZeRO-3: checks its files against each other. Reads no weights.

Source: deepspeed 0.19.8 `runtime/engine.py`, `_save_checkpoint` and `_save_zero_checkpoint`;
`checkpoint/ds_to_universal.py`, `main`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lowmem_load.errors import CheckpointError, UnsupportedError, listed
from lowmem_load.formats.inert_objects import Foreign
from lowmem_load.formats.pickled_tensor import Tensor
from lowmem_load.formats.torch_zip import TorchObjects, describe_objects
from lowmem_load.partial.checkpoint import REPLICATED_FILE
from lowmem_load.planning.expression import Shape, Source, numel
from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.read.executor import Executor
from lowmem_load.read.whole import read_whole
from lowmem_load.resume.checkpoint import COUNTERS, Checkpoint, at
from lowmem_load.resume.layout import FP32, Pieces, SavedParameter, group_numels, place_fragments, place_groups

UNIVERSAL_KEYS = (FP32, "exp_avg", "exp_avg_sq")
"""Files of a parameter in a universal checkpoint: its values, and the moments of Adam."""

UNIVERSAL_STATE = "optimizer_state.pt"
"""File of a universal checkpoint with what the ZeRO optimizer has saved, on rank 0."""

_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt")


def open_checkpoint(folder: str, executor: Executor) -> Checkpoint:
    """Return what a checkpoint holds; everything that decides what lies where is checked.

    Args:
        folder: of the tag.
        executor: reads small values, and keeps the files open.

    Raises:
        CheckpointError: a file is absent, truncated, malformed, or does not go with the others.
        UnsupportedError: it is of another stage, or of model, pipeline or expert parallelism.
    """
    return _Opening(folder, executor)()


class _Opening:
    """Opens the files of one checkpoint."""

    def __init__(self, folder: str, executor: Executor) -> None:
        self._folder, self._executor = folder, executor
        self._files: list[PlannedFile] = []

    def __call__(self) -> Checkpoint:
        paths = self._paths()
        is_universal = os.path.isdir(os.path.join(self._folder, "zero"))
        if not paths["model"] or not (paths["optim"] or is_universal):
            raise CheckpointError(
                f"{self._folder}: holds no checkpoint of ZeRO-3: expected files "
                "zero_pp_rank_*_mp_rank_00_model_states.pt and *zero_pp_rank_*_mp_rank_00_optim_states.pt"
            )
        models = [self._open(path) for path in paths["model"]]
        groups, frozen = self._shapes(models)
        if is_universal:
            file = self._open(os.path.join(self._folder, "zero", UNIVERSAL_STATE))
            optimizer, trained = _zero_state(file), self._universal(groups, file)
        else:
            optims = [self._open(path) for path in paths["optim"]]
            self._check_worlds(models, optims)
            optimizer = _zero_state(optims[0])
            trained = self._trained(groups, optims)
        return Checkpoint(
            folder=self._folder,
            world_size=len(models),
            is_universal=is_universal,
            parameters={**trained, **self._frozen(frozen or {}, models)},
            lacks_frozen=frozen is None,
            shared=_shared(models[0]),
            whole={**self._whole(models[0]), **self._replicated()},
            optimizer=optimizer,
            states=models,
            files=self._files,
            _executor=self._executor,
        )

    def _paths(self) -> dict[str, list[str]]:
        """Return the files of model and optimizer states, by rank."""
        found: dict[str, dict[int, str]] = {"model": {}, "optim": {}}
        for name in sorted(entry.name for entry in os.scandir(self._folder)):
            match = _STATES.fullmatch(name)
            if name.startswith(("mp_rank_", "layer_", "expp_rank_")) or (match and int(match[2])):
                raise UnsupportedError(
                    f"{self._folder}: {name}: is of another ZeRO stage, or of tensor, pipeline or expert parallelism; "
                    "load it with the engine's own load_checkpoint"
                )
            if match is None:
                continue
            rank = int(match[1])
            if rank in found[match[3]]:
                other = os.path.basename(found[match[3]][rank])
                raise CheckpointError(
                    f"{self._folder}: {other} and {name} are both of rank {rank}: two jobs have saved into one "
                    "folder; remove the files of one"
                )
            found[match[3]][rank] = os.path.join(self._folder, name)
        for kind, by_rank in found.items():
            missing = sorted(set(range(max(by_rank, default=-1) + 1)) - set(by_rank))
            if missing:
                raise CheckpointError(
                    f"{self._folder}: no {kind} states of rank(s) {listed(list(map(str, missing)))}, but of rank "
                    f"{max(by_rank)}; every rank that resumes reads from the files of all: copy them to one folder"
                )
        return {kind: [by_rank[rank] for rank in sorted(by_rank)] for kind, by_rank in found.items()}

    def _open(self, path: str) -> TorchObjects:
        if not os.path.exists(path):
            raise CheckpointError(f"{path}: is missing; the checkpoint is incomplete")
        with self._executor.sources.reading(path) as source:
            file = describe_objects(source)
        self._files.append(PlannedFile(path, file.nbytes, file.digest, file.version))
        return file

    def _shapes(self, models: Sequence[TorchObjects]) -> tuple[list[dict[str, Shape]], dict[str, Shape] | None]:
        """Return names and shapes of the sub-groups' parameters, and of the frozen ones: equal in all files."""
        read = [(_groups_of(file), _shapes_of(file, "frozen_param_shapes")) for file in models]
        for file, shapes in zip(models, read, strict=True):
            if shapes != read[0]:
                raise CheckpointError(f"{file.path}: has other parameters than {os.path.basename(models[0].path)}")
        return read[0]

    def _check_worlds(self, models: Sequence[TorchObjects], optims: Sequence[TorchObjects]) -> None:
        """Raise unless every file says that as many ranks have saved as there are files of each kind."""
        counts = {file.path: file.tree.get("dp_world_size") for file in models}
        counts |= {file.path: _zero_state(file).get("partition_count") for file in optims}
        for file in models:
            if any(file.tree.get(key) != models[0].tree.get(key) for key in COUNTERS):
                raise CheckpointError(
                    f"{file.path}: was saved at step {file.tree.get('global_steps')!r:.20}, "
                    f"{os.path.basename(models[0].path)} at {models[0].tree.get('global_steps')!r:.20}: a save over "
                    "an earlier one did not end; take another checkpoint"
                )
        for path, count in counts.items():
            if count != len(models) or count != len(optims):
                raise CheckpointError(
                    f"{path}: was saved by {count} ranks, but there are {len(models)} files of model states and "
                    f"{len(optims)} of optimizer states: some are missing, or left from another save"
                )

    def _trained(self, groups: list[dict[str, Shape]], optims: Sequence[TorchObjects]) -> dict[str, SavedParameter]:
        numels = group_numels(groups, len(optims))
        keys: list[str] = []
        flats: dict[str, list[list[Source]]] = {}
        scalars: list[dict[str, Any]] = [{} for _ in groups]
        for file in optims:
            by_group = self._flat_states(file, numels)
            found = sorted({key for states in by_group for key, value in states.items() if isinstance(value, Source)})
            keys = keys or found
            if found != keys or any(not isinstance(states.get(key), Source) for states in by_group for key in keys):
                raise CheckpointError(f"{file.path}: sub-groups with other states than {', '.join(keys)}")
            for key in keys:
                flats.setdefault(key, []).append([states[key] for states in by_group])
            others = [{key: value for key, value in one.items() if key not in keys} for one in by_group]
            scalars = others if file is optims[0] else scalars
            if [one.get("step") for one in others] != [one.get("step") for one in scalars]:
                raise CheckpointError(
                    f"{file.path}: has made other steps than {os.path.basename(optims[0].path)}: a save over an "
                    "earlier one did not end; take another checkpoint"
                )
        return place_groups(groups, flats, scalars)

    def _flat_states(self, file: TorchObjects, numels: list[int]) -> list[dict[str, Any]]:
        """Return what a rank has for each sub-group: flat tensors as sources, and other values."""
        zero = _zero_state(file)
        masters = at(zero, "fp32_flat_groups", list, file.path)
        base = at(zero, "optimizer_state_dict", dict, file.path)
        states = at(base, "state", dict, file.path)
        groups = at(base, "param_groups", list, file.path)
        order = [number for group in groups for number in at(group, "params", list, file.path)]
        if len(masters) != len(numels) or order != list(range(len(numels))):
            raise CheckpointError(f"{file.path}: {len(masters)} flat groups, its model states name {len(numels)}")
        found = []
        for number, (master, size) in enumerate(zip(masters, numels, strict=True)):
            if isinstance(master, Tensor) and size and not math.prod(master.size):
                raise UnsupportedError(
                    f"{file.path}: its optimizer states were on nvme (offload_optimizer), so they lie in the "
                    "swapper's own files; load it with the engine's own load_checkpoint on as many ranks"
                )
            entries: dict[str, Any] = {FP32: self._flat(file, master, f"flat group {number}", size)}
            for key, value in (at(states, number, dict, file.path) if number in states else {}).items():
                if isinstance(value, Tensor) and value.size:
                    entries[key] = self._flat(file, value, f"{key} of group {number}", size)
                else:
                    entries[key] = self._scalar(file, value, key)
            found.append(entries)
        return found

    def _scalar(self, file: TorchObjects, value: Any, key: str) -> Any:
        if isinstance(value, Tensor):
            return read_whole(self._executor, file.expression(value, key))
        if not isinstance(value, int | float | str | None):
            raise CheckpointError(f"{file.path}: {key!r:.80} of the optimizer is no number, text or tensor")
        return value

    def _universal(self, groups: list[dict[str, Shape]], file: TorchObjects) -> dict[str, SavedParameter]:
        states = at(at(_zero_state(file), "optimizer_state_dict", dict, file.path), "state", dict, file.path)
        # The number of steps is that of the first sub-group: as DeepSpeed itself reads it.
        state = at(states, 0, dict, file.path) if 0 in states else {}
        first = {key: self._scalar(file, value, key) for key, value in state.items() if _is_scalar(value)}
        found: dict[str, SavedParameter] = {}
        for number, group in enumerate(groups):
            for name, shape in group.items():
                size = math.prod(shape)
                flats = {key: (self._parameter_file(name, key, size),) for key in UNIVERSAL_KEYS}
                pieces = {key: Pieces(each, 0, size) for key, each in flats.items()}
                found[name] = SavedParameter(name, shape, pieces, number, first)
        return found

    def _parameter_file(self, name: str, key: str, size: int) -> Source:
        """Return the one tensor of `zero/<parameter>/<key>.pt`, flat."""
        if os.path.isabs(name) or ".." in name.split("/"):
            raise CheckpointError(f"{self._folder}: a parameter is named {name!r:.80}")
        file = self._open(os.path.join(self._folder, "zero", name, f"{key}.pt"))
        tensor = file.tree.get("param") if isinstance(file.tree, dict) else file.tree
        return self._flat(file, tensor, name, size)

    def _frozen(self, shapes: Mapping[str, Shape], models: Sequence[TorchObjects]) -> dict[str, SavedParameter]:
        found: dict[str, SavedParameter] = {}
        for name, shape in shapes.items():
            (size,) = group_numels([{name: shape}], len(models))
            fragments = []
            for file in models:
                fragment = at(file.tree, "frozen_param_fragments", dict, file.path).get(name)
                fragments.append(self._flat(file, fragment, f"fragment of {name}", size))
            found[name] = place_fragments(name, shape, fragments)
        return found

    def _whole(self, file: TorchObjects) -> dict[str, SavedParameter]:
        """Return the buffers that the module's state dict has."""
        module = at(file.tree, "module", dict, file.path)
        named = at(file.tree, "buffer_names", list, file.path)
        names = [name for name in named if isinstance(name, str) and name in module]
        return {name: self._one(file, name, module[name]) for name in names}

    def _replicated(self) -> dict[str, SavedParameter]:
        """Return what partial ZeRO-3 has saved whole: buffers, parameters, and the fp32 values of those."""
        path = os.path.join(self._folder, REPLICATED_FILE)
        if not os.path.exists(path):
            return {}
        file = self._open(path)
        masters = at(at(file.tree, "whole", dict, path), "masters", dict, path)
        held = {**at(file.tree, "buffers", dict, path), **at(file.tree, "parameters", dict, path), **masters}
        return {name: self._one(file, name, tensor) for name, tensor in held.items()}

    def _one(self, file: TorchObjects, name: str, tensor: Any) -> SavedParameter:
        shape = tensor.size if isinstance(tensor, Tensor) else ()
        return place_fragments(name, shape, [self._flat(file, tensor, name, math.prod(shape))])

    def _flat(self, file: TorchObjects, tensor: Any, what: str, size: int) -> Source:
        if not isinstance(tensor, Tensor) or math.prod(tensor.size) != size:
            held = f"is of shape {tensor.size}" if isinstance(tensor, Tensor) else "is absent"
            raise CheckpointError(f"{file.path}: {what} {held}, expected {size} elements, as the model states say")
        expression = file.expression(tensor, what)
        if not isinstance(expression, Source):
            raise CheckpointError(f"{file.path}: {what} does not lie in one run")
        return Source(expression.path, what, expression.start, (numel(expression),), expression.dtype)


def _is_scalar(value: Any) -> bool:
    return not (isinstance(value, Tensor) and value.size)


def _zero_state(file: TorchObjects) -> dict[str, Any]:
    """Return what the ZeRO optimizer has saved: of stage 3."""
    is_universal = os.path.basename(file.path) == UNIVERSAL_STATE and isinstance(file.tree, dict)
    state: dict[str, Any] = file.tree if is_universal else at(file.tree, "optimizer_state_dict", dict, file.path)
    stage = state.get("zero_stage")
    stage = stage.arguments[0] if isinstance(stage, Foreign) and stage.arguments else stage
    if stage != 3:
        raise UnsupportedError(f"{file.path}: was saved under ZeRO stage {stage}, expected 3")
    if state.get("ds_zero_partition_groups") is not None:
        raise UnsupportedError(f"{file.path}: has experts that are partitioned among fewer ranks (AutoEP)")
    return state


def _shared(file: TorchObjects) -> dict[str, str]:
    shared: dict[str, str] = at(file.tree, "shared_params", dict, file.path)
    if not all(isinstance(name, str) for pair in shared.items() for name in pair):
        raise CheckpointError(f"{file.path}: its 'shared_params' are malformed")
    return shared


def _groups_of(file: TorchObjects) -> list[dict[str, Shape]]:
    groups = at(file.tree, "param_shapes", list, file.path)
    return [_checked(file, group) for group in groups]


def _shapes_of(file: TorchObjects, key: str) -> dict[str, Shape] | None:
    shapes = file.tree.get(key)
    return None if shapes is None else _checked(file, shapes)


def _checked(file: TorchObjects, shapes: Any) -> dict[str, Shape]:
    is_right = isinstance(shapes, dict) and all(
        isinstance(name, str) and isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
        for name, shape in shapes.items()
    )
    if not is_right:
        raise CheckpointError(f"{file.path}: its parameters' shapes are malformed")
    return {name: tuple(shape) for name, shape in shapes.items()}
