"""load_checkpoint: open, plan, agree, read, agree. Where the elements lie: `zero_checkpoint.py`."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from lowmem_load.distributed.environment import cores
from lowmem_load.distributed.group import RankGroup
from lowmem_load.distributed.heartbeat import Progress
from lowmem_load.errors import ConfigError, listed
from lowmem_load.fingerprint import fingerprint
from lowmem_load.io.executor import Executor
from lowmem_load.phases import progress_bar
from lowmem_load.quantities import share
from lowmem_load.resume.open_checkpoint import open_checkpoint
from lowmem_load.resume.resume_plan import Part, Plan, Wanted, make_plan
from lowmem_load.resume.zero_checkpoint import FP32, Checkpoint, find_folder
from lowmem_load.saving.save import ranks_of

if TYPE_CHECKING:
    from lowmem_load.ds.engine_states import Zero3State

NUM_THREADS = 4
"""Reads in flight at most, on each rank."""


def load_checkpoint(
    engine: Any,
    load_dir: str | os.PathLike[str],
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    *,
    trusted: bool = False,
    progress: bool | None = None,
) -> tuple[str | None, dict[str, Any]]:
    """Load what DeepSpeed's `save_checkpoint` has written, on any number of ranks, with any offload.

    Has the arguments and the result of `engine.load_checkpoint`. Each rank reads its own partitions from the files of
    all ranks that saved. Takes what was saved under ZeRO stages 1, 2 and 3, also with the optimizer on nvme, and
    universal checkpoints (`ds_to_universal`). Everything is checked before anything is changed. If a read fails
    afterwards, the engine cannot be run until a checkpoint is loaded again.

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
        trusted: let Python unpickle the model states if the client state holds objects that only their own code can
            make. That runs code from the file.
        progress: True shows a progress bar on rank 0, False none, None one on long loads when stderr is a terminal.

    Returns:
        Folder of the tag, and the client_state that `save_checkpoint` was given, with DeepSpeed's version and
        configuration. Each rank gets its own client state if as many ranks resume as saved under stage 3, else that of
        rank 0. (None, {}) if there is no file `latest`.

    Collective: all ranks. Only weights that DeepSpeed keeps in full between steps cross the network.
    Memory: the optimizer's moments, if it has not stepped yet; 16 MiB for each reading thread where values are cast.

    Raises:
        CheckpointError: the checkpoint is incomplete, malformed, truncated, of another model, or holds objects.
        ConfigError: it is of another optimizer, or ranks read different folders.
        UnsupportedError: the engine is not one of plain ZeRO-3, or the checkpoint has another kind of parallelism.
        RankError: another rank failed; the same error is raised on every rank.
    """
    from lowmem_load.partial.partial_engine import PartialEngine

    flags = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
    if isinstance(engine, PartialEngine):
        load_zero3 = functools.partial(_load_zero3, engine.zero3, trusted, progress)
        return engine.load_checkpoint(load_dir, tag, *flags, load_zero3=load_zero3)
    return _load_zero3(engine, trusted, progress, load_dir, tag, *flags)


def _load_zero3(
    engine: Any,
    trusted: bool,
    progress: bool | None,
    load_dir: str | os.PathLike[str],
    tag: str | None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
) -> tuple[str | None, dict[str, Any]]:
    from lowmem_load.ds.engine_states import Zero3State, mark_unusable, mark_usable, wants_universal

    wanted = Wanted(
        tag,
        strict=load_module_strict,
        optimizer=load_optimizer_states and not load_module_only,
        scheduler=load_lr_scheduler_states and not load_module_only,
        counters=not load_module_only,
        trusted=trusted,
    )
    name, ranks = os.fspath(load_dir), ranks_of(getattr(engine, "module", engine))
    with ranks.session("load_checkpoint"), Executor(num_threads=min(NUM_THREADS, cores(1))) as executor:
        with ranks.step("opening the checkpoint", name=name) as step:
            state = Zero3State(engine)
            latest = ("latest_universal",) if wants_universal(engine) else ("latest", "latest_universal")
            folder = find_folder(name, tag, latest)
            step.digest = {"files": "none: there is no file 'latest'"}
            if folder is not None:
                checkpoint = open_checkpoint(folder, executor)
                own_rank = ranks.rank if len(checkpoint.states) == ranks.world_size else 0
                plan = make_plan(checkpoint, state, wanted, own_rank, has_scheduler=engine.lr_scheduler is not None)
                step.digest = _compared(checkpoint, state, wanted)
                # Not in ns, which not all network file systems tell.
                times = fingerprint(str(os.stat(file.path).st_mtime_ns // 1000) for file in checkpoint.files)
                step.payload = os.path.realpath(folder), times
        if folder is None:
            return None, {}
        _check_one_folder(step.payloads)
        mark_unusable(engine)
        _fill(ranks, plan, state, executor, name, progress)
        with ranks.step("setting scalars, scheduler and counters", name=name):
            _set_rest(engine, checkpoint, state, plan, wanted)
        state.finish()
        mark_usable(engine)
    return folder, plan.client_state


def _compared(checkpoint: Checkpoint, state: Zero3State, wanted: Wanted) -> dict[str, str]:
    files = sorted((os.path.basename(file.path), file.nbytes, file.digest) for file in checkpoint.files)
    parameters = [f"{one.name} {one.shape}" for group in state.sub_groups for one in group]
    return {
        **{key: repr(value) for key, value in asdict(wanted).items()},
        "files": listed([f"{name} ({nbytes} bytes)" for name, nbytes, _ in files]),
        "headers of the files": fingerprint(map(str, files)),
        "parameters of the engine": fingerprint(parameters),
    }


def _check_one_folder(found: Sequence[tuple[str, str]]) -> None:
    """Raise ConfigError if ranks read different folders, given the path and a digest of the files' times of each.

    Nodes may have one disk under different paths: then its files were changed at the same times.
    """
    (path, times), *others = found
    for rank, (other, other_times) in enumerate(others, 1):
        if other != path and other_times != times:
            raise ConfigError(
                f"ranks read different folders: rank 0 {path}, rank {rank} {other}, whose files were changed at other "
                "times; name the same folder on all ranks, on a file system that they share"
            )


# -- filling ---------------------------------------------------------------------------------------------------------


def _fill(
    ranks: RankGroup, plan: Plan, state: Zero3State, executor: Executor, name: str, progress: bool | None
) -> None:
    done = 0

    def read() -> Progress:
        return Progress(done, f"{share(done, plan.total_bytes)} read")

    with progress_bar(plan.total_bytes, "Resuming", progress, ranks.rank) as update:

        def on_bytes(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            update(num_bytes)

        executor.on_bytes = on_bytes
        with ranks.step("reading the checkpoint", name=name, progress=read):
            state.prepare()
            for number, parts in enumerate(plan.sub_groups):
                with state.memory(number, plan.moments) as (master, moments):
                    _fill_parts(parts, {FP32: master, **moments}, plan, executor)
                ranks.check()
            for part in plan.frozen:
                with state.frozen_memory(part.held) as memory:
                    _fill_parts([part], {FP32: memory}, plan, executor)
            for buffer, fill in plan.buffers.items():
                flat = torch.empty(fill.numel, dtype=fill.dtype, device="cpu")
                executor.fill(fill, flat, plan.planner.values, plan.planner.constants)
                executor.finish()
                state.buffers[buffer].detach().copy_(flat.view(state.buffers[buffer].shape))
            executor.check_unchanged()


def _fill_parts(parts: Sequence[Part], memory: Mapping[str, torch.Tensor], plan: Plan, executor: Executor) -> None:
    for part in parts:
        mine, numel = memory[part.key].narrow(0, part.held.first, part.held.numel), part.held.mine.numel
        if part.fill is not None:
            mine[numel:].zero_()  # padding, which DeepSpeed steps as well
            executor.fill(part.fill, mine[:numel], plan.planner.values, plan.planner.constants)
        elif part.key != FP32:
            mine.zero_()
    executor.finish()


def _set_rest(engine: Any, checkpoint: Checkpoint, state: Zero3State, plan: Plan, wanted: Wanted) -> None:
    if wanted.optimizer:
        for number, scalars in enumerate(plan.scalars):
            state.set_scalars(number, scalars)
        state.set_groups(plan.param_groups)
        name, attributes = checkpoint.loss_scaler
        state.set_loss_scale(name, attributes, overflow=bool(checkpoint.optimizer.get("overflow")))
    if plan.scheduler is not None:
        engine.lr_scheduler.load_state_dict(plan.scheduler)
    if wanted.counters:
        state.set_counters(checkpoint.counters, checkpoint.world_size)
