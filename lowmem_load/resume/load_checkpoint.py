"""load_checkpoint: open, plan, agree, read, agree. Where the elements lie: `zero_checkpoint.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from lowmem_load.distributed.environment import cores
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.errors import CheckpointError, ConfigError, UnsupportedError, listed
from lowmem_load.files.executor import Executor, refuse_left
from lowmem_load.files.fill import Part, fill, read_whole
from lowmem_load.files.memory import naming_shortage
from lowmem_load.load.checks import agree_on_bytes, identify_files
from lowmem_load.load.execute import reading
from lowmem_load.planning.expression import Expression
from lowmem_load.planning.regions import FlatRange
from lowmem_load.renamed import renamed_keywords
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
"""Reads in flight at most, on each rank."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What `load_checkpoint` is asked to load; see its arguments."""

    tag: str | None
    strict: bool
    optimizer: bool
    scheduler: bool
    counters: bool
    allow_pickle: bool


@dataclass(frozen=True, slots=True)
class Run:
    """A run of memory: this rank's elements of one parameter (`FP32`), or of a moment of it.

    `values` are an expression, and which elements of it. Without them the checkpoint lacks the parameter: its values
    stay, moments become zero.
    """

    parameter: HeldParameter
    key: str
    values: tuple[Expression, FlatRange] | None


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """What is read of a checkpoint, and small values that were read already."""

    checkpoint: ZeroCheckpoint
    sub_groups: Sequence[Sequence[Run]]
    scalars: Sequence[Mapping[str, Any]]  # of each sub-group, what the optimizer keeps besides tensors
    moments: tuple[str, ...]  # their keys
    frozen: Sequence[Run]
    scheduler: Any  # state of the lr scheduler; None if it is not loaded
    client_state: dict[str, Any]


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

    Has the arguments and the result of `engine.load_checkpoint`. Each rank reads its own partitions from the files of
    all ranks that saved. Takes what was saved under ZeRO-3, also with the optimizer on nvme. Everything is checked
    before anything is changed. If a read fails afterwards, the engine cannot be run until a checkpoint is loaded again.

    Args:
        engine: of ZeRO-3, or a `PartialEngine`; it may have stepped.
        load_dir: the folder that `save_checkpoint` was given, on a file system that all ranks share; nodes may have it
            under different paths.
        tag: of the checkpoint. None: the one that the file `latest` names.
        load_module_strict: whether the checkpoint must have each parameter of the module, and no others. If False,
            parameters that it lacks stay as they are, and the optimizer's state for them becomes zero.
        load_optimizer_states: whether to load moments, hyperparameters and loss scale. The fp32 weights always are.
        load_lr_scheduler_states: whether to load the state of the lr scheduler, if the engine has one.
        load_module_only: load weights and buffers only; counters and schedulers stay as well.
        allow_pickle: whether Python may unpickle the model states if the client state has objects that only their own
            code can make. That runs code from the file. Default: False.

    Returns:
        Folder of the tag, and the client_state that `save_checkpoint` was given, with DeepSpeed's version and
        configuration. Each rank gets its own client state if as many ranks resume as saved, else that of rank 0.
        (None, {}) if there is no file `latest`.

    Collective: all ranks. Only weights that DeepSpeed keeps in full between steps cross the network.
    Memory: the optimizer's moments, if it has not stepped yet; 16 MiB for each reading thread where values are cast.

    Raises:
        CheckpointError: it is incomplete, malformed, truncated, of another model, not the same on all ranks, or has
            objects in its client state, without `allow_pickle`.
        ConfigError: it is of another optimizer.
        UnsupportedError: the engine is not one of plain ZeRO-3, the checkpoint has another kind of parallelism, or the
            optimizer's states were asked for and have 8 bits.
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
    return _load_zero3(engine, os.fspath(load_dir), wanted)


def _load_zero3(engine: Any, name: str, wanted: Wanted) -> tuple[str | None, dict[str, Any]]:
    from lowmem_load.engines.engine_states import Zero3State, unusable_until_filled

    ranks = ranks_of(engine)
    with ranks.session("load_checkpoint"), Executor(num_threads=min(NUM_THREADS, cores(1))) as executor:
        with ranks.step("opening the checkpoint", name=name) as step:
            refuse_left(name)  # buffers of a swapper come to hold other parts of the engine
            state = Zero3State(engine)
            folder = find_folder(name, wanted.tag)
            step.digest = {"files": "none: there is no file 'latest'"}
            if folder is not None:
                checkpoint = open_checkpoint(folder, executor, with_moments=wanted.optimizer)
                own_rank = ranks.rank if len(checkpoint.states) == ranks.world_size else 0
                has_scheduler = engine.lr_scheduler is not None
                plan = make_plan(checkpoint, state, wanted, own_rank, executor, has_scheduler=has_scheduler)
                step.digest = _compared(checkpoint, state, wanted)
                step.payload = identify_files(checkpoint.files)
        if folder is None:
            return None, {}
        # Of equal names, sizes and shapes are two saves of one run, too.
        agree_on_bytes(ranks, folder, checkpoint.files, executor.sources, step.payloads)
        with unusable_until_filled(engine):
            _fill(ranks, plan, state, executor, name)
            with ranks.step("setting scalars, scheduler and counters", name=name):
                _set_rest(engine, state, plan, wanted)
            state.finish()
    return folder, plan.client_state


def _compared(checkpoint: ZeroCheckpoint, state: Zero3State, wanted: Wanted) -> dict[str, str]:
    files = sorted((os.path.basename(file.path), file.nbytes, file.digest) for file in checkpoint.files)
    parameters = [f"{parameter.name} {parameter.shape}" for group in state.sub_groups for parameter in group]
    return {
        **{key: repr(value) for key, value in asdict(wanted).items()},
        "files": listed([f"{name} ({nbytes} bytes)" for name, nbytes, _ in files]),
        "headers of the files": fingerprint(map(str, files)),
        "parameters of the engine": fingerprint(parameters),
    }


# -- planning --------------------------------------------------------------------------------------------------------


def make_plan(
    checkpoint: ZeroCheckpoint, state: Zero3State, wanted: Wanted, rank: int, executor: Executor, *, has_scheduler: bool
) -> ResumePlan:
    """Return what a rank reads, and check the checkpoint against the engine.

    The client state and the scheduler are those of `rank`; the executor reads tensors in them.
    """
    trained = [parameter for group in state.sub_groups for parameter in group]
    saved = _match(checkpoint, [*trained, *state.frozen], state, wanted)
    moments: tuple[str, ...] = ()
    scalars: list[Mapping[str, Any]] = [{} for _ in state.sub_groups]
    if wanted.optimizer:
        param_groups = checkpoint.param_groups
        groups = [[saved[held.name] for held in group if held.name in saved] for group in state.sub_groups]
        # Before the optimizer's first step there are no moments.
        moments = next((tuple(sorted({*group[0].tensors} - {FP32})) for group in groups if group), ())
        state.check_groups(param_groups, frozenset(moments))
        scalars = [_scalars_of(number, group, state, param_groups) for number, group in enumerate(groups)]
    scheduler, client_state = checkpoint.python_states(rank, executor, allow_pickle=wanted.allow_pickle)
    loads_scheduler = wanted.scheduler and has_scheduler
    if loads_scheduler and scheduler is None:
        raise CheckpointError(
            f"{checkpoint.folder}: was saved without an lr scheduler; pass load_lr_scheduler_states=False"
        )
    return ResumePlan(
        checkpoint=checkpoint,
        sub_groups=[
            [_run(saved, parameter, key) for key in (FP32, *moments) for parameter in group]
            for group in state.sub_groups
        ],
        scalars=scalars,
        moments=moments,
        frozen=[_run(saved, parameter, FP32) for parameter in state.frozen],
        scheduler=scheduler if loads_scheduler else None,
        client_state=client_state,
    )


def _match(
    checkpoint: ZeroCheckpoint, parameters: Sequence[HeldParameter], state: Zero3State, wanted: Wanted
) -> dict[str, SavedParameter]:
    """Return the saved parameters that the engine has, by name."""
    expected = {parameter.name: tuple(parameter.shape) for parameter in parameters}
    frozen = {parameter.name for parameter in state.frozen}
    optional = {*state.optional, *(frozen if checkpoint.lacks_frozen else ())}
    saved = {name: parameter for name, parameter in checkpoint.parameters.items() if name in expected}
    if wanted.optimizer:
        differ = [name for name, parameter in saved.items() if (parameter.group is None) != (name in frozen)]
        if differ:
            raise CheckpointError(
                f"{checkpoint.folder}: {listed(sorted(differ))}: trained only in the checkpoint or only in the engine, "
                "so the optimizer's states do not match; pass load_optimizer_states=False"
            )
    expected.update((name, tuple(buffer.shape)) for name, buffer in state.buffers.items())
    found = {**checkpoint.replicated, **{name: parameter.values for name, parameter in saved.items()}}
    shapes = {name: tensor.shape for name, tensor in found.items() if name in expected}
    required = expected.keys() - optional if wanted.strict else set()
    wanted_shapes = {name: shape for name, shape in expected.items() if name in shapes or name in required}
    unknown = set(checkpoint.of_module) - set(expected) if wanted.strict else ()
    differences = differences_of(shapes, wanted_shapes, unknown, "engine")
    if differences:
        raise CheckpointError(f"{checkpoint.folder}: is a checkpoint of another model: {differences}")
    return saved


def _scalars_of(
    number: int, group: Sequence[SavedParameter], state: Zero3State, param_groups: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return the other values that the optimizer saved for the parameters that form a sub-group now."""
    owner = {sub: index for index, owned in enumerate(param_groups) for sub in owned.get("params", ())}
    for parameter in group:
        if owner.get(parameter.group) != state.group_of(number):
            raise ConfigError(
                f"{parameter.name}: is in group {state.group_of(number)} of the optimizer, and was in group "
                f"{owner.get(parameter.group)} when the checkpoint was saved"
            )
        if repr(parameter.scalars) != repr(group[0].scalars):
            raise ConfigError(f"sub-group {number}: its parameters have made different numbers of steps")
    return group[0].scalars if group else {}


def _run(saved: Mapping[str, SavedParameter], parameter: HeldParameter, key: str) -> Run:
    name = parameter.name
    if name not in saved:
        return Run(parameter, key, None)
    dtype = saved[name].values.dtype
    dtypes = (dtype, parameter.dtype, parameter.tensor.dtype)
    if len({dtype.is_floating_point for dtype in dtypes}) > 1:
        raise UnsupportedError(
            f"{name}: was saved as {dtype}, and is {parameter.tensor.dtype} here, in partitions of "
            f"{parameter.dtype}; quantized weights cannot be filled by others"
        )
    return Run(parameter, key, saved[name].tensors[key].part(parameter.mine))


# -- filling ---------------------------------------------------------------------------------------------------------


def _fill(ranks: RankGroup, plan: ResumePlan, state: Zero3State, executor: Executor, name: str) -> None:
    replicated = plan.checkpoint.replicated
    read = [run.values for group in (*plan.sub_groups, plan.frozen) for run in group if run.values is not None]
    num_bytes = sum(elements.numel * values.dtype.itemsize for values, elements in read)
    step = reading(ranks, name, [executor], num_bytes, bar="Resuming", title="reading the checkpoint")
    with step as done:
        state.prepare()
        for number, runs in enumerate(plan.sub_groups):
            nbytes = sum(run.parameter.numel for run in runs if run.key != FP32) * torch.float32.itemsize
            shortage = naming_shortage(f"optimizer states of sub-group {number}", nbytes)
            with shortage, state.memory(number, plan.moments) as (master, moments):
                fill(_into(runs, {FP32: master, **moments}), executor, done.on_part)
        for run in plan.frozen:
            with state.frozen_memory(run.parameter) as memory:
                fill(_into([run], {FP32: memory}), executor, done.on_part)
        for key, buffer in state.buffers.items():
            if key in replicated:
                buffer.detach().copy_(read_whole(executor, replicated[key].whole))
        executor.sources.check_unchanged()


def _into(runs: Sequence[Run], memory: Mapping[str, torch.Tensor]) -> list[Part]:
    """Return the parts of memory that the checkpoint fills; make padding, and moments that it lacks, zero."""
    parts = []
    for run in runs:
        mine, numel = memory[run.key].narrow(0, run.parameter.first, run.parameter.numel), run.parameter.mine.numel
        if run.values is not None:
            mine[numel:].zero_()  # padding, which DeepSpeed steps as well
            name = f"{run.parameter.name} ({run.key})"
            parts.append(Part(name, *run.values, mine[:numel]))
        elif run.key != FP32:
            mine.zero_()
    return parts


def _set_rest(engine: Any, state: Zero3State, plan: ResumePlan, wanted: Wanted) -> None:
    checkpoint = plan.checkpoint
    if wanted.optimizer:
        for number, scalars in enumerate(plan.scalars):
            state.set_scalars(number, scalars)
        state.set_groups(checkpoint.param_groups)
        name, attributes = checkpoint.loss_scaler
        state.set_loss_scale(name, attributes, overflow=bool(checkpoint.optimizer.get("overflow")))
    if plan.scheduler is not None:
        engine.lr_scheduler.load_state_dict(plan.scheduler)
    if wanted.counters:
        state.set_counters(checkpoint.counters, len(checkpoint.states))
