"""Opens a ZeRO checkpoint of DeepSpeed and checks its files against each other. Reads no weights.

Under stage 3 each rank saves model states and optimizer states. Under stages 1 and 2 there is one file of model states
for all ranks, with the full 16-bit weights.

[Note: swapped states] DeepSpeed copies the swapper's folder of each rank into the checkpoint. In the rank's file of
optimizer states the tensors of a swapped sub-group are empty, and their attribute `ds_id` names the file that has the
elements, in fp32, with padding at its end. Sub-groups of less than 1 MiB are not swapped, and saved as usual.

Source: deepspeed 0.16.4 to 0.19.8 `runtime/engine.py`, `_save_checkpoint`, `_save_zero_checkpoint` and
`save_checkpoint`; `runtime/swap_tensor/optimizer_utils.py`, `SwapTensorContext` and `_get_state_tensors`;
`runtime/zero/stage3.py`, `_rigid_state_dict`; `runtime/zero/stage_1_and_2.py` and `runtime/bf16_optimizer.py`,
`state_dict`; `utils/zero_to_fp32.py`, `_zero2_merge_trainable_params`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lowmem_load.errors import CheckpointError, UnsupportedError
from lowmem_load.formats.inert_pickle import Tensor
from lowmem_load.formats.plain_values import member, shown
from lowmem_load.formats.torch_zip import TorchObjects, describe_objects
from lowmem_load.io.executor import Executor
from lowmem_load.io.fill import read_whole
from lowmem_load.planning.expression import Shape, Source, numel
from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.planning.regions import partition_numel
from lowmem_load.training_checkpoints.zero_checkpoint import (
    COUNTERS,
    FP32,
    REPLICATED_FILE,
    Checkpoint,
    SavedParameter,
    at,
    base_optimizer,
    find_folder,
    group_numels,
    place_fragments,
    place_groups,
)

_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt|mp_rank_00_model_states\.pt")
_STATES_FOR_ALL = "mp_rank_00_model_states.pt"

_MASTERS = {3: "fp32_flat_groups", 2: "single_partition_of_fp32_groups"}
"""Entry with the fp32 values, by stage."""

_STAGES = {"optimizer_states": 1, "gradients": 2, "weights": 3}
"""Stage by name of DeepSpeed's `ZeroStageEnum`."""

_SWAPPED = "offloaded_tensors"
"""Folder of the swapper's files, in the folder of the tag."""

_SWAPPED_DTYPE = torch.float32

STEPS = "global_steps"
"""Key of the number of steps, in the model states and in the file of partial ZeRO-3 (since 0.4.0)."""

STEP = "step"
"""Key of the number of steps, in an optimizer's state of a parameter."""

_OF_BLOCKS = ("__bnb_optimizer_quant_state__", "absmax", "qmap")
"""Beginnings of the keys under which bitsandbytes keeps states of 8 bits, which it quantizes in blocks."""


def open_checkpoint(folder: str, executor: Executor, *, with_moments: bool = True) -> Checkpoint:
    """Return what a checkpoint holds. Everything that decides what lies where is checked.

    The executor reads small values, and keeps the files open. Without the moments nothing is asked of the optimizer's
    states but the number of steps: optimizers of 8 bits keep them in blocks, which are no elements of parameters.
    """
    model_names, optim_names = _names(folder)
    stage = 2 if model_names[0] == _STATES_FOR_ALL else 3
    files = Files(folder, executor)
    models, optims = [files.open(name) for name in model_names], [files.open(name) for name in optim_names]
    groups, frozen = _shapes(models)
    _check_worlds(models, optims, stage)
    trained = trained_parameters(files, groups, optims, stage, with_moments=with_moments)
    first, tree, path = models[0], models[0].tree, models[0].path
    module: dict[Any, Any] = at(tree, "module", dict, path)
    names = [name for name in at(tree, "buffer_names", list, path) if isinstance(name, str)]
    buffers = {name: files.replicated(first, name, module[name]) for name in names if name in module}
    shared: dict[str, str] = at(tree, "shared_params", dict, path)
    if not all(isinstance(name, str) for pair in shared.items() for name in pair):
        raise CheckpointError(f"{path}: its 'shared_params' are malformed")
    if stage == 2:
        known = {*trained, *shared, *buffers}
        rest = {name: value for name, value in module.items() if isinstance(name, str) and isinstance(value, Tensor)}
        others = {name: files.replicated(first, name, value) for name, value in rest.items() if name not in known}
        frozen = frozen if frozen is not None else ({} if others else None)
    else:
        others = {name: files.fragments(models, name, shape) for name, shape in (frozen or {}).items()}
    return Checkpoint(
        folder=folder,
        world_size=len(optims),
        parameters={**trained, **others},
        lacks_frozen=frozen is None,
        shared=shared,
        replicated={**buffers, **_replicated(files, first)},
        optimizer=zero_state(optims[0], stage),
        states=models,
        files=files.opened,
        _executor=executor,
    )


def steps_of(folder: str, rank: int) -> str:
    """Return how many steps the engine had made that saved a rank's model states, as text."""
    names, _ = _names(folder)
    with Executor() as executor:
        return shown(Files(folder, executor).open(names[min(rank, len(names) - 1)]).tree.get(STEPS))


def check_steps(folder: str, replicated: str, partitioned: str) -> None:
    """Raise CheckpointError if the file of partial ZeRO-3 and those of DeepSpeed are of different steps."""
    if replicated != partitioned:
        raise CheckpointError(
            f"{os.path.join(folder, REPLICATED_FILE)}: was saved at step {replicated}, DeepSpeed's files at "
            f"{partitioned}: a save over an earlier one did not end; take another checkpoint"
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
    by_kind: dict[str, dict[int, str]] = {"model": {}, "optim": {}}
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
            other = by_kind[match[3] or "model"].setdefault(rank, name)
            if other != name:
                raise CheckpointError(
                    f"{folder}: {other} and {name} are both of rank {rank}: two jobs saved into one folder; remove the "
                    "files of one"
                )
    models, optims = ([by_rank[rank] for rank in sorted(by_rank)] for by_rank in by_kind.values())
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
        if isinstance(count, list) and count and all(type(number) is int and number == count[0] for number in count):
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


def _replicated(files: Files, states: TorchObjects) -> dict[str, SavedParameter]:
    """Return what partial ZeRO-3 saved in full: buffers, and parameters with their fp32 values."""
    if not os.path.exists(os.path.join(files.folder, REPLICATED_FILE)):
        return {}
    file = files.open(REPLICATED_FILE)
    tree, path = file.tree, file.path
    check_steps(files.folder, shown(tree.get(STEPS, states.tree.get(STEPS))), shown(states.tree.get(STEPS)))
    masters = at(at(tree, "whole", dict, path), "masters", dict, path)
    tensors = {**at(tree, "buffers", dict, path), **at(tree, "parameters", dict, path), **masters}
    return {name: files.replicated(file, name, tensor) for name, tensor in tensors.items()}


def _checked(file: TorchObjects, shapes: Any) -> dict[str, Shape]:
    is_right = isinstance(shapes, dict) and all(
        isinstance(name, str) and isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
        for name, shape in shapes.items()
    )
    if not is_right:
        raise CheckpointError(f"{file.path}: its parameters' shapes are malformed")
    return {name: tuple(shape) for name, shape in shapes.items()}


# -- tensors in the files ----------------------------------------------------------------------------------------------


class Files:
    """The files of one checkpoint, in the folder of the tag; `opened` has those that were opened, in order."""

    def __init__(self, folder: str, executor: Executor) -> None:
        self.folder, self._executor = folder, executor
        self.opened: list[PlannedFile] = []

    def open(self, name: str) -> TorchObjects:
        """Return the contents of a torch file, without weights."""
        path = os.path.join(self.folder, name)
        with self._executor.sources.reading(path) as source:
            file = describe_objects(source)
        self.opened.append(PlannedFile(path, file.nbytes, file.digest, file.version))
        return file

    def flat(self, file: TorchObjects, tensor: Any, what: str, size: int | None) -> Source:
        """Return where the elements of a tensor lie: `size` of them, or any number if that is None."""
        if not isinstance(tensor, Tensor) or (size is not None and math.prod(tensor.size) != size):
            actual = f"is of shape {tensor.size}" if isinstance(tensor, Tensor) else "is absent"
            expected = "a tensor" if size is None else f"{size} elements"
            raise CheckpointError(f"{file.path}: {what} {actual}, expected {expected}, as the model states say")
        expression = file.expression(tensor, what)
        if not isinstance(expression, Source):
            raise CheckpointError(f"{file.path}: {what} is not contiguous")
        return Source(expression.path, what, expression.start, (numel(expression),), expression.dtype)

    def flat_or_swapped(self, file: TorchObjects, tensor: Any, what: str, size: int, rank: int, ranks: int) -> Source:
        """Return where the elements of a rank's tensor lie. See [Note: swapped states]."""
        is_swapped = isinstance(tensor, Tensor) and not math.prod(tensor.size) and "ds_id" in tensor.attributes
        if not is_swapped or not size:
            return self.flat(file, tensor, what, size)
        path = self._swap_file(rank, ranks, tensor, what)
        if not os.path.exists(path):
            raise CheckpointError(f"{path}: is missing, with {what} of an optimizer that was on nvme")
        with self._executor.sources.reading(path) as source:
            nbytes, version = source.nbytes, source.version
        if nbytes < size * _SWAPPED_DTYPE.itemsize:
            raise CheckpointError(f"{path}: has {nbytes} bytes, expected {size} elements of {_SWAPPED_DTYPE}: {what}")
        self.opened.append(PlannedFile(path, nbytes, "", version))
        return Source(path, what, 0, (size,), _SWAPPED_DTYPE)

    def scalar(self, file: TorchObjects, value: Any, key: str) -> Any:
        """Return a number, text or tensor of the optimizer; a tensor is read."""
        if isinstance(value, Tensor):
            return read_whole(self._executor, file.expression(value, key))
        if not isinstance(value, int | float | str | None):
            raise CheckpointError(f"{file.path}: {key!r:.80} of the optimizer is no number, text or tensor")
        return value

    def fragments(self, models: Sequence[TorchObjects], name: str, shape: Shape) -> SavedParameter:
        """Return a frozen parameter of which each rank saved its partition."""
        size, what = partition_numel(math.prod(shape), len(models)), f"fragment of {name}"
        tensors = [(file, at(file.tree, "frozen_param_fragments", dict, file.path).get(name)) for file in models]
        saved = place_fragments(name, shape, [self.flat(file, tensor, what, size) for file, tensor in tensors])
        whole = at(models[0].tree, "module", dict, models[0].path).get(name)
        if isinstance(whole, Tensor) and whole.dtype.is_floating_point != saved.dtype.is_floating_point:
            raise UnsupportedError(
                f"{models[0].path}: {name} is {whole.dtype}, and was saved as {saved.dtype} without the scales: "
                "zero_quantized_nontrainable_weights has quantized it"
            )
        return saved

    def replicated(self, file: TorchObjects, name: str, tensor: Any) -> SavedParameter:
        """Return a tensor that was saved in full."""
        shape = tensor.size if isinstance(tensor, Tensor) else ()
        return place_fragments(name, shape, [self.flat(file, tensor, name, math.prod(shape))])

    def _swap_file(self, rank: int, ranks: int, tensor: Tensor, what: str) -> str:
        name = tensor.attributes["ds_id"]
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]{1,200}", name):
            raise CheckpointError(
                f"{self.folder}: {what} was on nvme under the name {shown(name)}, which is none of DeepSpeed's"
            )
        own = os.path.join(self.folder, _SWAPPED, f"rank{rank:02d}")
        if not os.path.isdir(own):
            if ranks > 1:
                raise CheckpointError(
                    f"{own}: is missing, with the states of an optimizer that was on nvme: ranks of deepspeed 0.17 and "
                    "older overwrite each other's copies, and with use_node_local_storage each node has its own"
                )
            own = os.path.join(self.folder, _SWAPPED)
        return os.path.join(own, f"{name}.tensor.swp")


# -- trained parameters ----------------------------------------------------------------------------------------------


def zero_state(file: TorchObjects, stage: int) -> dict[str, Any]:
    """Return the saved state of a ZeRO optimizer of a stage: 3, or 2 for 1 and 2, which are saved alike."""
    state: dict[str, Any] = at(file.tree, "optimizer_state_dict", dict, file.path)
    saved_stage = member(state.get("zero_stage", 1), _STAGES)  # BF16_Optimizer, which is stage 1, does not save it
    if saved_stage not in ((3,) if stage == 3 else (1, 2)):
        expected = "3" if stage == 3 else "1 or 2"
        raise UnsupportedError(f"{file.path}: was saved under ZeRO stage {shown(saved_stage)}, expected {expected}")
    if state.get("ds_zero_partition_groups") is not None:
        raise UnsupportedError(f"{file.path}: has experts that are partitioned among fewer ranks (AutoEP)")
    return state


def trained_parameters(
    files: Files,
    groups: Sequence[Mapping[str, Shape]],
    optims: Sequence[TorchObjects],
    stage: int,
    *,
    with_moments: bool,
) -> dict[str, SavedParameter]:
    """Return the trained parameters by name, of stage 3, or 2 for 1 and 2."""
    paddings = None if stage == 3 else _paddings(optims, groups)
    flats: list[list[dict[str, Source]]] = []
    scalars: list[list[dict[str, Any]]] = []
    for rank, file in enumerate(optims):
        mine, others = _states_of(files, file, groups, rank, len(optims), stage, with_moments=with_moments)
        flats.append(mine)
        scalars.append(others)
        if any(group.keys() != flats[0][0].keys() for group in mine):
            raise CheckpointError(f"{file.path}: sub-groups with other states than {', '.join(sorted(flats[0][0]))}")
        if [group.get(STEP) for group in others] != [group.get(STEP) for group in scalars[0]]:
            raise CheckpointError(
                f"{file.path}: has made other steps than {os.path.basename(optims[0].path)}: a save over an "
                "earlier one did not end; take another checkpoint"
            )
    return place_groups(groups, flats, scalars[0], paddings)


def _states_of(
    files: Files,
    file: TorchObjects,
    groups: Sequence[Mapping[str, Shape]],
    rank: int,
    num_ranks: int,
    stage: int,
    *,
    with_moments: bool,
) -> tuple[list[dict[str, Source]], list[dict[str, Any]]]:
    """Return the flat tensors and the other values that a rank saved for each group."""
    zero = zero_state(file, stage)
    base = base_optimizer(zero, file.path)
    masters = at(zero, _MASTERS[stage], list, file.path)
    states = at(base, "state", dict, file.path)
    numbers = [
        number for group in at(base, "param_groups", list, file.path) for number in at(group, "params", list, file.path)
    ]
    if len(masters) != len(groups) or numbers != list(range(len(groups))):
        raise CheckpointError(f"{file.path}: {len(masters)} flat groups, its model states name {len(groups)}")
    flats: list[dict[str, Source]] = [{} for _ in groups]
    others: list[dict[str, Any]] = [{} for _ in groups]
    for number, size in enumerate(group_numels(groups, num_ranks)):
        state = at(states, number, dict, file.path) if number in states else {}
        if not with_moments:
            state = {key: value for key, value in state.items() if key == STEP}
        elif blocks := [key for key in state if isinstance(key, str) and key.startswith(_OF_BLOCKS)]:
            raise UnsupportedError(
                f"{file.path}: {blocks[0]} of group {number}: an optimizer of 8 bits has saved its states in blocks, "
                "which end elsewhere on other ranks; load it with as many ranks by the engine's own load_checkpoint, "
                "or pass load_optimizer_states=False"
            )
        for key, value in {FP32: masters[number], **state}.items():
            what = f"flat group {number}" if key == FP32 else f"{key} of group {number}"
            if key != FP32 and not (isinstance(value, Tensor) and value.size):
                others[number][key] = files.scalar(file, value, key)
            elif stage == 3:
                flats[number][key] = files.flat_or_swapped(file, value, what, size, rank, num_ranks)
            else:
                flats[number][key] = files.flat(file, value, what, None)
    return flats, others


def _paddings(optims: Sequence[TorchObjects], groups: Sequence[Mapping[str, Shape]]) -> list[list[int]]:
    """Return how many elements lie behind each parameter of each group. Releases before 0.19.5 pad nothing."""
    none = [[0] * len(group) for group in groups]
    read = [zero_state(file, 2).get("param_alignment_paddings", none) for file in optims]
    paddings: list[Any] = read[0] if isinstance(read[0], list) else []
    is_right = [len(group) if isinstance(group, list) else -1 for group in paddings] == [len(group) for group in groups]
    if not is_right or any(
        type(padding) is not int or not 0 <= padding < 1 << 20 for group in paddings for padding in group
    ):
        raise CheckpointError(f"{optims[0].path}: its 'param_alignment_paddings' are malformed")
    for file, other in zip(optims, read, strict=True):
        if other != paddings:
            raise CheckpointError(f"{file.path}: pads parameters differently than {os.path.basename(optims[0].path)}")
    return paddings
