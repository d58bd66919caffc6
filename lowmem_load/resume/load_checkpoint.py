"""load_checkpoint: open, plan, agree, read, agree. `zero_checkpoint.py` finds where the elements lie."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from lowmem_load.distributed.environment import cores, ranks_on_node
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.errors import CheckpointError, ConfigError, UnsupportedError, listed
from lowmem_load.files.executor import Executor, refuse_left
from lowmem_load.files.fill import Part, fill, read_whole
from lowmem_load.files.memory import naming_shortage
from lowmem_load.files.remote_file import requests_in_flight
from lowmem_load.files.stand_ins import origin
from lowmem_load.load.checks import agree_on_bytes, identify_files
from lowmem_load.load.execute import reading
from lowmem_load.renamed import renamed_keywords
from lowmem_load.symbolic.attributes import EXTRA_STATE
from lowmem_load.text import fingerprint
from lowmem_load.training_checkpoints.zero_checkpoint import (
    FP32,
    SavedParameter,
    ZeroCheckpoint,
    differences_of,
    find_folder,
    open_checkpoint,
)
from lowmem_load.weights_out.rank_shards import Wrapper, ranks_of

if TYPE_CHECKING:
    from lowmem_load.engines.engine_states import HeldParameter, Zero3State

NUM_THREADS = 4
"""Reads of cached files in flight at most, on each rank."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What `load_checkpoint` is asked to load; see its arguments."""

    tag: str | None
    strict: bool
    optimizer: bool
    scheduler: bool
    counters: bool
    allow_pickle: bool


@renamed_keywords(trusted="allow_pickle")
def load_checkpoint(
    engine: Any,
    load_dir: str | os.PathLike[str],
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    *,
    allow_pickle: bool = False,
) -> tuple[str | None, dict[str, Any]]:
    """Load what DeepSpeed's `save_checkpoint` has written, on any number of ranks, with any offload.

    Call on every rank. It has the arguments and the result of `engine.load_checkpoint`. Each rank reads its own
    partitions from the files of all ranks that saved. The checkpoint was saved under ZeRO-3, perhaps with the optimizer
    on nvme. Everything is checked before anything is changed. If a read fails afterwards, the engine cannot be run
    until a checkpoint is loaded again.

    Args:
        engine: engine of ZeRO-3, or a `PartialEngine`. It may have stepped.
        load_dir: folder that `save_checkpoint` was given, on a file system that all ranks share. Nodes may have it
            under different paths.
        tag: tag of the checkpoint. Default: the one that the file `latest` names.
        load_module_strict: whether the checkpoint must have each parameter, buffer and extra state of the module, and
            no others. If False, those that it lacks stay as they are, and the optimizer's state for such parameters
            becomes zero. Default: True.
        load_optimizer_states: whether to load moments, hyperparameters and loss scale. The fp32 weights are always
            loaded. Default: True.
        load_lr_scheduler_states: whether to load the state of the lr scheduler, if the engine has one. Default: True.
        load_module_only: whether to load weights and buffers only, so that counters and schedulers stay as well.
            Default: False.
        allow_pickle: whether Python may unpickle the model states if the client state has objects that only their own
            code can make. This runs code from the file. Default: False.

    Returns:
        Folder of the tag, and the client_state that `save_checkpoint` was given, with DeepSpeed's version and
        configuration. Each rank gets its own client state, buffers and extra states of modules if as many ranks resume
        as saved, otherwise those of rank 0. (None, {}) if the file `latest` is missing.

    Only weights that DeepSpeed keeps in full between steps cross the network.
    Memory: the optimizer's moments, if it has not stepped yet; 16 MiB for each reading thread if values are cast.

    Raises:
        CheckpointError: it is incomplete, malformed, truncated, of another model, not the same on all ranks, or has
            objects in its client state, without `allow_pickle`.
        ConfigError: it is of another optimizer.
        UnsupportedError: the engine is not one of plain ZeRO-3, the checkpoint has another kind of parallelism or has
            in full what the engine partitions, or the optimizer's states were asked for and have 8 bits.
        RankError: another rank failed; the same error is raised on every rank.

    Example:
        engine.save_checkpoint("checkpoints")  # on 8 ranks
        engine, *_ = deepspeed.initialize(model=model, config=ds_config)  # later, on 16
        folder, client_state = load_checkpoint(engine, "checkpoints")
    """
    if isinstance(engine, Wrapper):  # a `PartialEngine`, which calls this for its ZeRO-3 engine
        flags = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        partial: Any = engine
        loaded: tuple[str | None, dict[str, Any]] = partial.load_checkpoint(
            load_dir, tag, *flags, allow_pickle=allow_pickle
        )
        return loaded
    rest = not load_module_only
    wanted = Wanted(
        tag, load_module_strict, load_optimizer_states and rest, load_lr_scheduler_states and rest, rest, allow_pickle
    )
    return _load_zero3(engine, origin(os.fspath(load_dir)), wanted)


def _load_zero3(engine: Any, name: str, wanted: Wanted) -> tuple[str | None, dict[str, Any]]:
    from lowmem_load.engines.engine_states import Zero3State, unusable_until_filled

    ranks = ranks_of(engine)
    with ranks.session("load_checkpoint"), _make_executor(ranks) as executor:
        with ranks.step("opening the checkpoint", name=name) as step:
            refuse_left(name)  # a swapper uses its buffers for other parts of the engine
            state = Zero3State(engine)
            folder = find_folder(name, wanted.tag)
            step.digest = {"files": "none: the file 'latest' is missing"}
            if folder is not None:
                checkpoint = open_checkpoint(
                    folder, executor, with_moments=wanted.optimizer, rank=ranks.rank, world_size=ranks.world_size
                )
                saved = _match(checkpoint, state, wanted)
                moments, scalars = _optimizer_states(checkpoint, saved, state) if wanted.optimizer else ((), [])
                scheduler, client_state, extra_states = checkpoint.python_states(
                    state.extra_states, executor, allow_pickle=wanted.allow_pickle
                )
                loads_scheduler = wanted.scheduler and engine.lr_scheduler is not None
                if loads_scheduler and scheduler is None:
                    raise CheckpointError(f"{folder}: has no lr scheduler; pass load_lr_scheduler_states=False")
                step.digest = _compared(checkpoint, state, wanted)
                step.payload = identify_files(checkpoint.files)
        if folder is None:
            return None, {}
        # Two saves of one run have equal names, sizes and shapes.
        agree_on_bytes(ranks, folder, checkpoint.files, executor.sources, step.payloads)
        with unusable_until_filled(engine):
            _fill(ranks, checkpoint, saved, moments, state, executor, name)
            with ranks.step("setting scalars, scheduler and counters", name=name):
                for number, values in enumerate(scalars):
                    state.set_scalars(number, values)
                if wanted.optimizer:
                    state.set_groups(checkpoint.param_groups)
                    scaler, attributes = checkpoint.loss_scaler
                    state.set_loss_scale(scaler, attributes, overflow=bool(checkpoint.optimizer.get("overflow")))
                if loads_scheduler:
                    engine.lr_scheduler.load_state_dict(scheduler)
                for key, extra_state in extra_states.items():
                    state.extra_states[key].set_extra_state(extra_state)
                if wanted.counters:
                    state.set_counters(checkpoint.counters, len(checkpoint.states))
            state.finish()
    return folder, client_state


def _make_executor(ranks: RankGroup) -> Executor:
    in_flight = requests_in_flight(ranks_on_node(ranks.world_size))
    return Executor(num_threads=min(NUM_THREADS, cores(1)), num_if_cold=in_flight)


def _compared(checkpoint: ZeroCheckpoint, state: Zero3State, wanted: Wanted) -> dict[str, str]:
    files = sorted((os.path.basename(file.path), file.nbytes, file.digest) for file in checkpoint.files)
    parameters = [f"{parameter.name} {parameter.shape}" for parameter in state.parameters]
    return {
        **{key: repr(value) for key, value in asdict(wanted).items()},
        "files": listed([f"{name} ({nbytes} bytes)" for name, nbytes, _ in files]),
        "headers of the files": fingerprint(map(str, files)),
        "parameters of the engine": fingerprint(parameters),
    }


# -- what the engine has of the checkpoint ---------------------------------------------------------------------------


def _match(checkpoint: ZeroCheckpoint, state: Zero3State, wanted: Wanted) -> dict[str, SavedParameter]:
    """Return the saved parameters that the engine has, by name."""
    expected: dict[str, Any] = {parameter.name: parameter for parameter in state.parameters}
    frozen = {parameter.name for parameter in state.frozen}
    optional = {*state.optional, *(frozen if checkpoint.lacks_frozen else ())}
    if in_full := [name for name in expected if name in checkpoint.replicated]:
        raise UnsupportedError(
            f"{checkpoint.folder}: {listed(in_full, 4)}: partial ZeRO-3 has saved them in full, and this engine "
            "partitions them; partition the same modules as the run that saved"
        )
    saved = {name: parameter for name, parameter in checkpoint.parameters.items() if name in expected}
    if wanted.optimizer:
        differ = [name for name, parameter in saved.items() if (parameter.group is None) != (name in frozen)]
        if differ:
            raise CheckpointError(
                f"{checkpoint.folder}: {listed(sorted(differ))}: trained only in the checkpoint or only in the engine, "
                "so the optimizer's states do not match; pass load_optimizer_states=False"
            )
    for parameter in state.parameters:
        if parameter.name not in saved:
            continue
        stored = saved[parameter.name].values.dtype
        is_mixed = len({dtype.is_floating_point for dtype in (stored, parameter.dtype, parameter.tensor.dtype)}) > 1
        if is_mixed or (hasattr(parameter.tensor, "quant_state") and stored != parameter.dtype):  # of bitsandbytes
            raise UnsupportedError(
                f"{parameter.name}: was saved as {stored}, and is {parameter.tensor.dtype} here, in partitions of "
                f"{parameter.dtype}; quantized weights cannot be filled by others"
            )
    without_shape = torch.empty(0)
    module = (name for name in checkpoint.own.tree["module"] if isinstance(name, str))
    extra_states = {name: without_shape for name in module if name.rpartition(".")[2] == EXTRA_STATE}
    expected |= {**state.buffers, **dict.fromkeys(state.extra_states, without_shape)}
    values = {name: parameter.values for name, parameter in saved.items()}
    found = {**checkpoint.replicated, **extra_states, **values}
    found = {name: tensor for name, tensor in found.items() if name in expected}
    required = expected.keys() - optional if wanted.strict else set()
    compared = {name: each for name, each in expected.items() if name in found or name in required}
    in_module = {name for name in checkpoint.parameters if checkpoint.own_name(name) in checkpoint.module}
    unknown = {*in_module, *extra_states} - set(expected) if wanted.strict else ()
    if differences := differences_of(found, compared, unknown, "engine"):
        raise CheckpointError(f"{checkpoint.folder}: is a checkpoint of another model: {differences}")
    return saved


def _optimizer_states(
    checkpoint: ZeroCheckpoint, saved: Mapping[str, SavedParameter], state: Zero3State
) -> tuple[tuple[str, ...], list[Mapping[str, Any]]]:
    """Return the keys of the moments, and what else the optimizer saved for the parameters of each sub-group of now."""
    param_groups = checkpoint.param_groups
    # Before the optimizer's first step nothing has moments.
    keys = next((parameter.tensors.keys() for parameter in saved.values() if parameter.group is not None), {FP32})
    moments = tuple(sorted(keys - {FP32}))
    state.check_groups(param_groups, frozenset(moments))
    owner = {sub: index for index, owned in enumerate(param_groups) for sub in owned["params"]}
    scalars: list[Mapping[str, Any]] = []
    for number, parameters in enumerate(state.sub_groups):
        group = {each.name: saved[each.name] for each in parameters if each.name in saved}
        scalars.append(next((parameter.scalars for parameter in group.values()), {}))
        for name, parameter in group.items():
            if owner.get(parameter.group) != state.group_of(number):
                raise ConfigError(
                    f"{name}: is in group {state.group_of(number)} of the optimizer, and was in group "
                    f"{owner.get(parameter.group)} when the checkpoint was saved"
                )
            if repr(parameter.scalars) != repr(scalars[-1]):
                raise ConfigError(f"sub-group {number}: its parameters have made different numbers of steps")
    return moments, scalars


# -- filling ---------------------------------------------------------------------------------------------------------


def _fill(
    ranks: RankGroup,
    checkpoint: ZeroCheckpoint,
    saved: Mapping[str, SavedParameter],
    moments: Sequence[str],
    state: Zero3State,
    executor: Executor,
    name: str,
) -> None:
    num_bytes = sum(
        parameter.mine.numel * tensor.dtype.itemsize
        for parameter in state.parameters
        if parameter.name in saved
        for tensor in saved[parameter.name].tensors.values()
    )
    step = reading(ranks, name, [executor], num_bytes, bar="Resuming", title="reading the checkpoint")
    with step as done:
        state.prepare()
        for number, group in enumerate(state.sub_groups):
            nbytes = sum(parameter.numel for parameter in group) * len(moments) * torch.float32.itemsize
            shortage = naming_shortage(f"optimizer states of sub-group {number}", nbytes)
            with shortage, state.memory(number, moments) as (master, of_moments):
                fill(_parts(group, saved, {FP32: master, **of_moments}), executor, done.on_part)
        for parameter in state.frozen:
            with state.frozen_memory(parameter) as memory:
                fill(_parts([parameter], saved, {FP32: memory}), executor, done.on_part)
        for key, buffer in state.buffers.items():
            if key in checkpoint.replicated:
                buffer.detach().copy_(read_whole(executor, checkpoint.replicated[key].whole))
        executor.sources.check_unchanged()


def _parts(
    parameters: Sequence[HeldParameter], saved: Mapping[str, SavedParameter], memory: Mapping[str, torch.Tensor]
) -> list[Part]:
    """Return the parts of memory that the checkpoint fills; make padding, and moments that it lacks, zero.

    `memory` has that of the values and of each moment, in which the parameters lie one after the other.
    """
    parts = []
    for parameter in parameters:
        for key, flat in memory.items():
            partition, numel = flat.narrow(0, parameter.first, parameter.numel), parameter.mine.numel
            if parameter.name in saved:
                partition[numel:].zero_()  # padding, which DeepSpeed steps as well
                values, elements = saved[parameter.name].tensors[key].part(parameter.mine)
                parts.append(Part(f"{parameter.name} ({key})", values, elements, partition[:numel]))
            elif key != FP32:
                partition.zero_()
    return parts
