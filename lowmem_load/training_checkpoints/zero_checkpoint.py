"""Opens a ZeRO-3 checkpoint of DeepSpeed: checks its files against each other, and finds the elements of parameters.

`save_checkpoint` writes torch zips on N ranks: model states and optimizer states of each. Their directories and pickles
are read, no pickle is run (`files/inert_pickle.py`), and no weights are read. What a client or an lr scheduler has put
into the model states is made of what was read so (`plain_values.py`).

[Note: flat groups] Each of N ranks saves one flat tensor per sub-group of the optimizer, in fp32, and one for each of
its moments. It has the rank's partitions of the sub-group's parameters, one after the other, each padded to
`ceil(numel / N)` elements. So element `i` of a parameter is element `offset + i % size` of rank `i // size`.
`sub_group_size` counts elements of a rank, so the sub-groups depend on N too: parameters are found by the names and
shapes that the file gives for each sub-group. For each frozen parameter, each rank's file of model states has one
padded fragment.

[Note: swapped states] DeepSpeed copies the swapper's folder of each rank into the checkpoint. In the rank's file of
optimizer states the tensors of a swapped sub-group are empty, and their attribute `ds_id` names the file that has the
elements, in fp32, with padding at its end. Sub-groups of less than 1 MiB are not swapped, and saved as usual.

Source: deepspeed 0.18.4 to 0.19.8 `runtime/engine.py`, `_save_checkpoint`, `_save_zero_checkpoint`,
`_get_zero_param_shapes` and `_get_zero_frozen_param_attributes`; `runtime/zero/stage3.py`, `_create_fp16_sub_groups`
and `_rigid_state_dict`; `runtime/swap_tensor/optimizer_utils.py`, `SwapTensorContext`; `utils/zero_to_fp32.py`.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lowmem_load.errors import CheckpointError, UnsupportedError, listed
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import read_whole
from lowmem_load.files.inert_pickle import Foreign, Tensor, is_shape, shown
from lowmem_load.files.source import LocalFile, read_bytes
from lowmem_load.files.stand_ins import is_url, open_file, origin
from lowmem_load.files.torch_zip import TorchObjects, describe_objects
from lowmem_load.planning.expression import Shape, Source
from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.planning.proof import prove_names
from lowmem_load.planning.regions import partition_numel
from lowmem_load.training_checkpoints.names import OF_ACTIVATIONS
from lowmem_load.training_checkpoints.plain_values import NeedsCodeError, PlainValues, numpy_number
from lowmem_load.training_checkpoints.saved_state import BandedTensor, Files, check_written_together, own_files

logger = logging.getLogger(__name__)

REPLICATED_FILE = "lowmem_load_whole_states.pt"
"""A file in the folder of the tag, next to DeepSpeed's. Its name must not change, or older checkpoints do not load."""

PLACEHOLDER = "lowmem_load_placeholder"
"""A parameter of partial ZeRO-3, of one element, in no state dict: DeepSpeed makes no ZeRO-3 optimizer without one that
trains."""

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""Entries of the model states that count steps."""

OF_DEEPSPEED = (
    *("module", "optimizer", "lr_scheduler", "data_sampler", "random_ltd", "global_steps", "skipped_steps"),
    *("dp_world_size", "mp_world_size", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
)
"""Entries of the model states that are not client state: those that DeepSpeed's `load_checkpoint` leaves out."""

_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt")

_OF_SWAPPER = ".tensor.swp"
"""How the names of the swapper's files end."""

STEPS = "global_steps"
"""Key of the number of steps, in the model states and in the file of partial ZeRO-3 (since 0.4.0)."""

STEP = "step"
"""Key of the number of steps, in an optimizer's state of a parameter."""

_OF_BLOCKS = ("__bnb_optimizer_quant_state__", "absmax", "qmap")
"""Beginnings of the keys under which bitsandbytes keeps states of 8 bits, which it quantizes in blocks."""

FP32 = "fp32"
"""Key of a parameter's values, next to the keys of the moments. Values of frozen parameters may have 16 bits."""


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """A parameter of a checkpoint."""

    tensors: Mapping[str, BandedTensor]  # its values (`FP32`), and each of the optimizer's moments
    group: int | None = None  # number of its sub-group; None if the optimizer did not have the parameter
    scalars: Mapping[str, Any] = field(default_factory=dict)  # what else the optimizer keeps for the sub-group

    @property
    def values(self) -> BandedTensor:
        """Its values."""
        return self.tensors[FP32]


def group_numel(group: Mapping[str, Shape], world_size: int) -> int:
    """Return how many elements a sub-group's flat tensor has on a rank, padding included."""
    return sum(partition_numel(math.prod(shape), world_size) for shape in group.values())


def place_group(
    number: int, group: Mapping[str, Shape], flats: Mapping[str, Sequence[Source]], scalars: Mapping[str, Any]
) -> dict[str, SavedParameter]:
    """Return the parameters of a sub-group by name, given its flat tensors on all ranks by key."""
    parameters: dict[str, SavedParameter] = {}
    offset = 0
    for name, shape in group.items():
        tensors = {key: partitioned(shape, of_ranks, offset) for key, of_ranks in flats.items()}
        parameters[name] = SavedParameter(tensors, number, scalars)
        offset += partition_numel(math.prod(shape), len(flats[FP32]))
    return parameters


def partitioned(shape: Shape, flats: Sequence[Source], offset: int = 0) -> BandedTensor:
    """Return a tensor of which each rank has a padded partition in its flat tensor, from element `offset` on.

    See [Note: flat groups].
    """
    first, num_elements = flats[0], math.prod(shape)
    if any(flat.dtype != first.dtype for flat in flats):
        raise CheckpointError(f"{first.path}: {first.name} is {first.dtype}, and on other ranks of another dtype")
    size = max(1, partition_numel(num_elements, len(flats)))

    def band(rank: int) -> Source:
        start = flats[rank].start + offset * first.dtype.itemsize
        return replace(flats[rank], start=start, shape=(min(size, num_elements - rank * size),))

    return BandedTensor(tuple(shape), first.dtype, range(size, size * len(flats) + 1, size), band)


@dataclass(frozen=True, slots=True)
class ZeroCheckpoint:
    """A ZeRO-3 checkpoint."""

    folder: str  # of the tag
    parameters: Mapping[str, SavedParameter]  # first the trained ones in the optimizer's order, then the frozen ones
    lacks_frozen: bool  # whether it was saved with `exclude_frozen_parameters`
    shared: Mapping[str, str]  # names that stand for another parameter, with the name of that
    replicated: Mapping[str, BandedTensor]  # saved in full: buffers, and what partial ZeRO-3 does not partition
    optimizer: Mapping[str, Any]  # the tree that the ZeRO optimizer of rank 0 saved
    states: Sequence[TorchObjects]  # the model states of each rank
    own: TorchObjects  # the model states from which this rank takes what ranks do not partition
    files: Sequence[PlannedFile]

    @property
    def of_module(self) -> dict[str, BandedTensor]:
        """The values of the parameters in the module's state dict. Partial ZeRO-3 may give the optimizer others too."""
        names = {name: own for name in self.parameters if (own := self.own_name(name)) in self.module}
        prove_names(self.folder, (), names)
        return {own: self.parameters[name].values for name, own in names.items()}

    @property
    def module(self) -> dict[Any, Any]:
        """The module's state dict."""
        found: dict[Any, Any] = at(self.states[0].tree, "module", dict, self.states[0].path)
        return found

    def own_name(self, name: str) -> str:
        """Return the name that the module's state dict has for a parameter."""
        return name_in_module(name, self.module)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The hyperparameters of each of the optimizer's groups."""
        base = at(self.optimizer, "optimizer_state_dict", dict, self.folder)
        groups = [{key: _setting(value) for key, value in group.items()} for group in base["param_groups"]]
        values = {id(value): value for group in groups for value in group.values()}  # groups may share a long list
        if not all(map(_is_setting, values.values())):
            raise CheckpointError(f"{self.folder}: its optimizer's param_groups are not numbers and text")
        return groups

    @property
    def loss_scaler(self) -> tuple[str, dict[str, Any]]:
        """The name of the class of the loss scaler, and its attributes."""
        scaler = self.optimizer.get("loss_scaler")
        if not isinstance(scaler, Foreign) or not isinstance(scaler.state, dict):
            return "", {}
        attributes = {key: value for key, value in scaler.state.items() if _is_setting(value)}
        return scaler.name.rpartition(".")[2], attributes

    @property
    def counters(self) -> dict[str, int]:
        """The engine's counters of steps."""
        tree = self.states[0].tree
        return {key: tree[key] for key in COUNTERS if type(tree.get(key)) is int}

    def python_states(
        self, extra_states: Collection[str], executor: Executor, *, allow_pickle: bool
    ) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Return this rank's state of the lr scheduler, its client state, and the extra states of these names.

        The executor reads tensors. If `allow_pickle`, Python unpickles a file that has objects of other classes.
        """
        file, values = self.own, PlainValues(self.own, executor)
        try:
            scheduler, client_state, extra = _python_states(file.tree, extra_states)
            return values.value(scheduler), values.value(client_state), values.value(extra)
        except NeedsCodeError as error:
            if not allow_pickle:
                raise CheckpointError(
                    f"{file.path}: its client state or scheduler has objects that only their own code can create; "
                    f"nothing was run: {error}. If you trust whoever has saved it, pass allow_pickle=True, which lets "
                    "Python unpickle this file"
                ) from error
        source = executor.sources.opened(file.path)
        if not isinstance(source, LocalFile):
            raise UnsupportedError(f"{file.path}: can be unpickled only on a disk; copy it there")
        tree = torch.load(source.path_of_open, map_location="cpu", mmap=True, weights_only=False)
        return copy.deepcopy(_python_states(tree, extra_states))  # not mapped


def _python_states(
    tree: Mapping[Any, Any], extra_states: Collection[str]
) -> tuple[Any, dict[Any, Any], dict[str, Any]]:
    client_state = {key: value for key, value in tree.items() if key not in OF_DEEPSPEED}
    module = tree["module"]
    return tree.get("lr_scheduler"), client_state, {name: module[name] for name in extra_states if name in module}


def name_in_module(name: str, module: Collection[str]) -> str:
    """Return the name of a tensor in a state dict, which has no part for a module that recomputes activations."""
    return name if name in module else ".".join(part for part in name.split(".") if part != OF_ACTIVATIONS)


def _setting(value: Any) -> Any:
    """Return a value, and one of Python for a number of numpy, which functions of schedulers often return."""
    number = numpy_number(value)
    return value if number is None else number.item()


def _occur_twice(containers: Collection[Any]) -> bool:
    """Return whether a container occurs twice, which DeepSpeed never writes: reading it each time may take for ever."""
    return len({id(container) for container in containers}) < len(containers)


def _is_setting(value: Any) -> bool:
    """Return whether a value of a tree is a number or text, or a list of these."""
    values = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(each, int | float | str | torch.dtype | None) for each in values)


# -- opening -----------------------------------------------------------------------------------------------------------


def open_checkpoint(
    folder: str, executor: Executor, *, with_moments: bool = True, rank: int = 0, world_size: int = 1
) -> ZeroCheckpoint:
    """Return what was saved. Everything that decides what lies where is checked.

    If as many ranks open it as have saved it, each gets its own buffers and Python's values, else those of rank 0.
    The executor reads small values, and keeps the files open. Without the moments nothing is asked of the optimizer's
    states but the number of steps: optimizers of 8 bits keep them in blocks, not as elements of parameters.
    """
    files = ZeroFiles(folder, executor)
    models, optims = (files.open_all(names, describe_objects) for names in _names(folder))
    optims = [replace(file, tree=at(file.tree, "optimizer_state_dict", dict, file.path)) for file in optims]
    groups, frozen = _shapes(models)
    _check_worlds(models, optims)
    trained = _trained(files, optims, groups, with_moments=with_moments)
    check_written_together(models, optims, [file for file in files.opened if file.path.endswith(_OF_SWAPPER)])
    _check_steps(models[0], trained)
    fragments = {name: files.fragments(models, name, shape) for name, shape in (frozen or {}).items()}
    parameters, lacks_frozen = {**trained, **fragments}, frozen is None
    own = models[rank if world_size == len(models) else 0]
    tree, path = own.tree, own.path
    module: dict[Any, Any] = at(tree, "module", dict, path)
    names = [name for name in at(tree, "buffer_names", list, path) if isinstance(name, str)]
    names = [name_in_module(name, module) for name in names]
    buffers = {name: files.replicated(own, name, module[name]) for name in names if name in module}
    replicated = {**buffers, **_replicated(files, models[0])}
    shared: dict[str, str] = at(tree, "shared_params", dict, path)
    if not all(isinstance(name, str) for pair in shared.items() for name in pair):
        raise CheckpointError(f"{path}: its 'shared_params' are malformed")
    return ZeroCheckpoint(
        folder, parameters, lacks_frozen, shared, replicated, optims[0].tree, models, own, files.opened
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
            file = Files(folder, executor).open(states[0], describe_objects)
            count: int = at(file.tree, "dp_world_size", int, file.path)
            return count
    except (CheckpointError, UnsupportedError, OSError):  # whoever loads it says what is wrong
        return None


def _names(folder: str) -> tuple[list[str], list[str]]:
    """Return the files of model states and those of optimizer states, by rank."""
    by_kind: dict[str, dict[int, str]] = {"model": {}, "optim": {}}
    for name in sorted(os.listdir(folder)):
        match = _STATES.fullmatch(name)
        if name == "mp_rank_00_model_states.pt":  # which the other stages save once for all ranks
            raise UnsupportedError(
                f"{folder}: {name}: was not saved under ZeRO-3. The zero_to_fp32.py in the folder above makes model "
                "files of ZeRO 1 and 2, and DeepSpeed's ds_to_universal.py what any engine resumes"
            )
        if name.startswith(("mp_rank_", "layer_", "expp_rank_")) or (match and int(match[2])):
            raise UnsupportedError(
                f"{folder}: {name}: is of tensor, pipeline or expert parallelism; use the engine's own load_checkpoint"
            )
        if match is not None:
            other = by_kind[match[3]].setdefault(int(match[1]), name)
            if other != name:
                raise CheckpointError(
                    f"{folder}: {other} and {name} are both of rank {match[1]}: two jobs have saved into one folder; "
                    "remove the files of one of them"
                )
    models, optims = ([by_rank[rank] for rank in sorted(by_rank)] for by_rank in by_kind.values())
    if not models or not optims:
        raise CheckpointError(
            f"{folder}: has no {'optimizer' if models else 'model'} states of ZeRO-3: expected files "
            "zero_pp_rank_*_mp_rank_00_model_states.pt and *zero_pp_rank_*_mp_rank_00_optim_states.pt. For a universal "
            "checkpoint, name the one that it was made of"
        )
    return models, optims


def _check_worlds(models: Sequence[TorchObjects], optims: Sequence[TorchObjects]) -> None:
    """Raise CheckpointError if the files are not those of all ranks of one save."""
    for file in models:
        # Compared as they are shown: containers could take for ever to compare.
        if any(shown(file.tree.get(key)) != shown(models[0].tree.get(key)) for key in COUNTERS):
            raise _of_two_saves(file, models[0])
    counts = {file.path: file.tree.get("dp_world_size") for file in models}
    for file in optims:
        if file.tree.get("ds_zero_partition_groups") is not None:
            raise UnsupportedError(f"{file.path}: has experts that are partitioned among fewer ranks (AutoEP)")
        counts[file.path] = file.tree.get("partition_count")
    for path, count in counts.items():
        if type(count) is not int or not count == len(optims) == len(models):
            raise CheckpointError(
                f"{path}: was saved by {shown(count)} ranks, but there are {len(models)} files of model states and "
                f"{len(optims)} of optimizer states: some are left from another save, or missing (copy the files of "
                "all ranks to one folder)"
            )


def _check_steps(states: TorchObjects, trained: Mapping[str, SavedParameter]) -> None:
    """Warn if the optimizer has made other steps than the model states count: they may be of two saves."""
    made = next((parameter.scalars.get(STEP) for parameter in trained.values()), None)
    made = made.item() if isinstance(made, torch.Tensor) and made.numel() == 1 else made
    num_steps, num_skipped = states.tree.get(STEPS), states.tree.get("skipped_steps")
    if not isinstance(made, int | float) or not isinstance(num_steps, int) or not isinstance(num_skipped, int):
        return
    if made != num_steps - num_skipped:
        logger.warning(
            "%s: counts %s steps, of which %s were skipped, and its optimizer has made %s. That is right if the run "
            "was once resumed without the optimizer's states; otherwise the files are of two saves: take another one",
            *(states.path, num_steps, num_skipped, made),
        )


def _of_two_saves(file: TorchObjects, other: TorchObjects) -> CheckpointError:
    steps, other_steps = (shown(tree.get(STEPS)) for tree in (file.tree, other.tree))
    return CheckpointError(
        f"{file.path}: was saved at step {steps}, {os.path.basename(other.path)} at {other_steps}: a "
        "save over an earlier one did not end; take another checkpoint"
    )


def _shapes(models: Sequence[TorchObjects]) -> tuple[list[dict[str, Shape]], dict[str, Shape] | None]:
    """Return names and shapes of the groups' parameters, and of the frozen ones, if they were saved."""
    read = []
    for file in models:
        groups, frozen = at(file.tree, "param_shapes", list, file.path), file.tree.get("frozen_param_shapes")
        if _occur_twice(groups):
            raise CheckpointError(f"{file.path}: two of its groups are one")
        names: set[str] = set()
        for shapes in [*groups, {} if frozen is None else frozen]:
            if not isinstance(shapes, dict) or not all(isinstance(n, str) and is_shape(s) for n, s in shapes.items()):
                raise CheckpointError(f"{file.path}: its parameters' shapes are malformed")
            if twice := names & shapes.keys():
                raise CheckpointError(f"{file.path}: has {listed(sorted(twice), 3)} in two groups of parameters")
            names |= shapes.keys()
        read.append((groups, frozen))
        if read[-1] != read[0]:
            raise CheckpointError(f"{file.path}: has other parameters than {os.path.basename(models[0].path)}")
    return read[0]


def _replicated(files: ZeroFiles, states: TorchObjects) -> dict[str, BandedTensor]:
    """Return what partial ZeRO-3 saved in full: buffers, and parameters with their fp32 values."""
    if not os.path.exists(os.path.join(files.folder, REPLICATED_FILE)):
        return {}
    file = files.open(REPLICATED_FILE, describe_objects)
    tree, path = file.tree, file.path
    if STEPS in tree and shown(tree[STEPS]) != shown(states.tree.get(STEPS)):  # lowmem_load before 0.4 saved none
        raise _of_two_saves(file, states)
    masters = at(at(tree, "whole", dict, path), "masters", dict, path)
    tensors = {**at(tree, "buffers", dict, path), **at(tree, "parameters", dict, path), **masters}
    return {name: files.replicated(file, name, tensor) for name, tensor in tensors.items()}


class ZeroFiles(Files):
    """The files in the folder of a tag, and the tensors and numbers in them."""

    def flat(self, file: TorchObjects, tensor: Any, what: str, size: int) -> Source:
        """Return where the `size` elements of a tensor lie."""
        if not isinstance(tensor, Tensor) or math.prod(tensor.size) != size:
            actual = f"is of shape {tensor.size}" if isinstance(tensor, Tensor) else "is absent"
            raise CheckpointError(f"{file.path}: {what} {actual}, expected {size} elements, as the model states say")
        expression = file.expression(tensor, what)
        if not isinstance(expression, Source):
            raise CheckpointError(f"{file.path}: {what} is not contiguous")
        return replace(expression, shape=(size,))

    def flat_or_swapped(self, file: TorchObjects, tensor: Any, what: str, size: int, rank: int) -> Source:
        """Return where the elements of a rank's tensor lie. See [Note: swapped states]."""
        is_swapped = isinstance(tensor, Tensor) and not math.prod(tensor.size) and "ds_id" in tensor.attributes
        if not is_swapped or not size:
            return self.flat(file, tensor, what, size)
        name = tensor.attributes["ds_id"]
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]{1,200}", name):
            raise CheckpointError(f"{file.path}: {what} was on nvme as {shown(name)}, not under a name of DeepSpeed's")
        in_folder = os.path.join("offloaded_tensors", f"rank{rank:02d}", f"{name}{_OF_SWAPPER}")
        own_files(self.folder, [in_folder])  # any file could be taken for elements
        swapped = f"{what} of an optimizer that was on nvme"
        advice = "with use_node_local_storage each node has its own"
        source = self.raw(in_folder, size * torch.float32.itemsize, swapped, advice)
        return Source(source.path, what, 0, (size,), torch.float32)

    def scalar(self, file: TorchObjects, value: Any, key: str) -> Any:
        """Return a number, text or tensor of the optimizer; a tensor is read."""
        if isinstance(value, Tensor):
            return read_whole(self.executor, file.expression(value, key))
        if not isinstance(value, int | float | str | None):
            raise CheckpointError(f"{file.path}: {key!r:.80} of the optimizer is not a number, text or tensor")
        return value

    def fragments(self, models: Sequence[TorchObjects], name: str, shape: Shape) -> SavedParameter:
        """Return a frozen parameter of which each rank saved its partition."""
        size, what = partition_numel(math.prod(shape), len(models)), f"fragment of {name}"
        tensors = [(file, at(file.tree, "frozen_param_fragments", dict, file.path).get(name)) for file in models]
        saved = partitioned(shape, [self.flat(file, tensor, what, size) for file, tensor in tensors])
        module: dict[Any, Any] = at(models[0].tree, "module", dict, models[0].path)
        full = module.get(name_in_module(name, module))
        if isinstance(full, Tensor) and full.dtype.is_floating_point != saved.dtype.is_floating_point:
            raise UnsupportedError(
                f"{models[0].path}: {name} is {full.dtype}, and was saved as {saved.dtype} without the scales: "
                "zero_quantized_nontrainable_weights has quantized it"
            )
        return SavedParameter({FP32: saved})

    def replicated(self, file: TorchObjects, name: str, tensor: Any) -> BandedTensor:
        """Return a tensor that was saved in full."""
        shape = tensor.size if isinstance(tensor, Tensor) else ()
        return partitioned(shape, [self.flat(file, tensor, name, math.prod(shape))])


def _trained(
    files: ZeroFiles, optims: Sequence[TorchObjects], groups: Sequence[Mapping[str, Shape]], *, with_moments: bool
) -> dict[str, SavedParameter]:
    """Return the trained parameters by name."""
    parameters: dict[str, SavedParameter] = {}
    by_rank = [_states_of(file, len(groups), with_moments=with_moments) for file in optims]
    for number, group in enumerate(groups):
        keys, size = _flat_keys(by_rank[0][0]), group_numel(group, len(optims))
        flats: dict[str, list[Source]] = {key: [] for key in keys}
        scalars: list[dict[str, Any]] = []
        for rank, file in enumerate(optims):
            state = by_rank[rank][number]
            if _flat_keys(state) != keys:
                raise CheckpointError(f"{file.path}: sub-groups with other states than {', '.join(keys)}")
            for key, of_ranks in flats.items():
                what = f"flat group {number}" if key == FP32 else f"{key} of group {number}"
                of_ranks.append(files.flat_or_swapped(file, state[key], what, size, rank))
            scalars.append({key: files.scalar(file, value, key) for key, value in state.items() if key not in flats})
            if scalars[rank].get(STEP) != scalars[0].get(STEP):
                raise CheckpointError(
                    f"{file.path}: has made other steps than {os.path.basename(optims[0].path)}: a save over an "
                    "earlier one did not end; take another checkpoint"
                )
        parameters |= place_group(number, group, flats, scalars[0])
    return parameters


def _flat_keys(state: Mapping[str, Any]) -> list[str]:
    """Return the keys under which a rank has an element for each one of a flat tensor."""
    return sorted(key for key, value in state.items() if key == FP32 or (isinstance(value, Tensor) and value.size))


def _states_of(file: TorchObjects, num_groups: int, *, with_moments: bool) -> list[dict[str, Any]]:
    """Return what a rank saved for each group: the fp32 values, and what its optimizer keeps for it."""
    zero, path = file.tree, file.path
    base = at(zero, "optimizer_state_dict", dict, path)  # of torch's optimizer, inside of ZeRO's
    masters, saved = at(zero, "fp32_flat_groups", list, path), at(base, "state", dict, path)
    owners = at(base, "param_groups", list, path)
    params = (number for owner in owners for number in at(owner, "params", list, path))
    numbers = list(itertools.islice(params, num_groups + 1))
    if len(masters) != num_groups:
        raise CheckpointError(f"{path}: {len(masters)} flat groups, its model states name {num_groups}")
    if numbers != list(range(num_groups)):
        raise CheckpointError(f"{path}: its param_groups do not have each of the {num_groups} flat groups once")
    if _occur_twice(owners) or _occur_twice([state for state in saved.values() if isinstance(state, dict)]):
        raise CheckpointError(f"{path}: two groups of its optimizer have one state, or are one")
    states = []
    for number, master in enumerate(masters):
        state = at(saved, number, dict, path) if number in saved else {}
        blocks = [key for key in state if isinstance(key, str) and key.startswith(_OF_BLOCKS)]
        if not with_moments:
            state = {key: value for key, value in state.items() if key == STEP}
        elif FP32 in state or not all(isinstance(key, str) for key in state):
            raise UnsupportedError(
                f"{path}: the optimizer's state of group {number} has the key {FP32!r}, under which lowmem_load keeps "
                "weights, or a number as a key; load it by the engine's own load_checkpoint, or pass "
                "load_optimizer_states=False"
            )
        elif blocks:
            raise UnsupportedError(
                f"{path}: {blocks[0]} of group {number}: an optimizer of 8 bits has saved its states in blocks, "
                "which end elsewhere on other ranks; load it with as many ranks by the engine's own load_checkpoint, "
                "or pass load_optimizer_states=False"
            )
        states.append({FP32: master, **state})
    return states


def find_folder(folder: str | os.PathLike[str], tag: str | None) -> str | None:
    """Return the folder of a tag. Without a tag, the file `latest` names it; None if that is not there."""
    root, named_by = os.fspath(folder), "tag"
    if is_url(root):
        raise UnsupportedError(
            f"{origin(root)}: optimizer states are not read from stores; copy the checkpoint to a disk, or load its "
            "weights alone by weights_from="
        )
    if tag is None:
        path, named_by = os.path.join(root, "latest"), "latest"
        if not os.path.isfile(path):
            return None
        with contextlib.closing(open_file(path)) as source:
            tag = read_bytes(source, 0, 4096).decode(errors="replace").strip()
    tag = str(tag)
    path_of_tag = os.path.join(root, tag)
    if tag in ("", os.curdir, os.pardir) or os.path.basename(tag) != tag or not os.path.isdir(path_of_tag):
        there = sorted(entry.name for entry in os.scandir(root) if entry.is_dir()) if os.path.isdir(root) else []
        raise CheckpointError(
            f"{root}: no checkpoint {tag!r}, which {named_by!r} names; there are: {listed(there) or 'none'}"
        )
    return path_of_tag


def at(tree: Any, key: str | int, kind: type, path: str) -> Any:
    """Return an entry of a tree; raise CheckpointError unless it is there and of this kind."""
    entry = tree.get(key) if isinstance(tree, dict) else None
    if not isinstance(entry, kind):
        raise CheckpointError(f"{path}: no {key!r} in it; it is not a checkpoint that DeepSpeed has saved under ZeRO-3")
    return entry


def differences_of(saved: Mapping[str, Any], expected: Mapping[str, Any], unknown: Iterable[str], owner: str) -> str:
    """Return how the shapes of saved tensors differ from those of expected ones; "" if they do not.

    The owner of the expected ones does not have the `unknown` ones.
    """
    shapes = [
        f"{name} is {tuple(saved[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in saved and tuple(saved[name].shape) != tuple(tensor.shape)
    ]
    lists = {
        "missing": sorted(set(expected) - set(saved)),
        f"not in the {owner}": sorted(unknown),
        "of another shape": shapes,
    }
    return "; ".join(f"{what}: {', '.join(names[:4])} ({len(names)})" for what, names in lists.items() if names)
