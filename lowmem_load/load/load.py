"""The stages of a load, in the order of the picture in docs/development/architecture.md: see `Load._load`."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from torch import nn

from lowmem_load.config.settings import Settings
from lowmem_load.distributed.environment import cores
from lowmem_load.distributed.nodes import node_name
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.engines.zero3_target import TargetMaker, Zero3, refuse_other_zero_init, zero_init_disabled
from lowmem_load.errors import (
    ConfigError,
    FallbackWarning,
    LowMemLoadError,
    MemoryShortageError,
    ModelBuildError,
    UnsupportedError,
    error_text,
    listed,
    outside_level,
)
from lowmem_load.files.executor import Executor
from lowmem_load.files.local_copy import LocalCopies
from lowmem_load.files.memory import naming_shortage
from lowmem_load.files.mounts import read_cost
from lowmem_load.files.remote_file import requests_in_flight
from lowmem_load.files.stand_ins import is_stand_in, is_url, open_file, origin
from lowmem_load.load.checks import (
    agree_on_bytes,
    check_room,
    disk_uses,
    has_room_for_cache,
    identify_files,
    memory_uses,
)
from lowmem_load.load.describe import Described, describe, random_state_of, random_state_text
from lowmem_load.load.execute import execute, reading
from lowmem_load.load.make_plan import PlannedModel, make_plan
from lowmem_load.load.read_once import ReadOnce
from lowmem_load.load.report import LoadReport, OnLoad
from lowmem_load.models.active import on_host, random_states, show_ds_config
from lowmem_load.models.loader import Call, configuration_of, is_left_alone, is_local
from lowmem_load.models.model_folder import commit_in, find_folder, rename_loaded
from lowmem_load.phases import Progress, computing
from lowmem_load.planning.replicas import ShareReads
from lowmem_load.text import MAX_VALUE, fingerprint, plain_url

logger = logging.getLogger(__name__)

LoadedModel = tuple[nn.Module, dict[str, Any]]
"""A model and the loading info."""

MAX_THREADS = 4
"""Reads in flight per rank. More compete for the same disk and page tables."""

REPORT_ATTRIBUTE = "lowmem_load_report"
"""Attribute of a model: its `LoadReport`."""

FALLBACK_ATTRIBUTE = "lowmem_load_fallback"
"""Attribute of a model that another loader has loaded: which one, and why, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to load. For `stream`, `weights`, `local_copy` and `share_reads`, see `load_model`."""

    stream: bool = False
    weights: str | None = None
    local_copy: str | None = None
    share_reads: ShareReads = "auto"
    is_lenient: bool = False  # the default loader does what this one cannot, with a warning; see [Note: fallback]
    on_load: OnLoad | None = None  # called with the report of each load

    def __post_init__(self) -> None:
        if self.share_reads not in (known := get_args(ShareReads)):
            raise ConfigError(f"share_reads: asked for {self.share_reads!r}, expected one of {', '.join(known)}")
        if self.local_copy is not None and (not self.local_copy or "://" in self.local_copy):
            shown = plain_url(self.local_copy)  # a URL may have a password
            raise ConfigError(f"local_copy: expected a folder on a disk of the node, got {shown!r}")
        if self.local_copy is not None and self.weights is not None:
            raise ConfigError("local_copy: is for the files of a model, not of a training checkpoint; remove it")


@dataclass(frozen=True, slots=True)
class Load:
    """Loads models by one set of settings on one group of ranks.

    [Note: fallback] Describing and planning show whether a model can be loaded here. If it cannot, on all ranks alike,
    nothing has been allocated or read, and the random states are put back. So transformers can start the load afresh.
    """

    settings: Settings
    ranks: RankGroup
    make_target: TargetMaker
    options: Options = Options()

    def __call__(self, call: Call) -> LoadedModel:
        """Run a `from_pretrained`; return the model, filled and with its report, and the loading info. Collective."""
        with self.ranks.session(f"the load of {call.name}"):
            find(call, self.options, self.ranks)
            restore = random_states()
            loaded = self._load(call)
            if isinstance(loaded, str):
                return fall_back(call, "the default ZeRO-3 loader", loaded, restore)
            return rename_loaded(loaded)

    def _load(self, call: Call) -> LoadedModel | str:
        """Run the stages of a load; return the model and the loading info, or why the default loader has to load it.

        Whatever may fail is in a step, which succeeds on all ranks or raises on all.
        """
        report = LoadReport(call.name, self.ranks.rank, self.ranks.world_size)
        of_ranks = self._agree_on_call(call)
        if is_left_alone(call, self.settings):
            return call.run()
        ranks = self.ranks
        nodes = [str(rank) if ranks.is_fake else node for rank, (node, _) in enumerate(of_ranks)]  # no others exist
        can_share = self.settings.offload_device != "nvme" and not ranks.is_fake  # memory that stays, and other ranks
        once = ReadOnce(ranks, nodes, self.options.share_reads if can_share else "off")
        with (
            zero_init_disabled() as around,
            on_host(),
            random_state_of(of_ranks[0][1]),
            make_executor(call, once.num_on_node, self.options.weights, self.options.local_copy) as executor,
            contextlib.closing(once),
        ):
            executor.tasks.check = ranks.check
            try:
                described = self._describe(call, executor, report)
                planned = self._plan(described, around, executor, once, report)
            except Exception as error:  # noqa: BLE001  it is raised again unless the default loader may work
                return fallback_reason(error, call, self.options)
            self._read(described, planned, executor, once, report)
        self._hand_over(described, report)
        return described.model, described.info

    def _agree_on_call(self, call: Call) -> Sequence[tuple[str, str]]:
        """Raise for a call that nobody can run; return the node and the random state of each rank. Collective."""
        rank = self.ranks.rank
        with self.ranks.step("checking the call", name=call.name) as agreed:
            by_default = is_left_alone(call, self.settings)
            if by_default and is_stand_in(call.path):
                raise UnsupportedError(
                    f"{call.name}: transformers itself reads the files of this load, which are in an object store; "
                    "download the checkpoint and name its folder"
                )
            ours = f"a load by lowmem_load{', or else by the default loader' if self.options.is_lenient else ''}"
            agreed.digest = {"as kind of load": "an ordinary load" if by_default else ours}
            agreed.payload = node_name(rank), random_state_text() if rank == 0 else ""
        return agreed.payloads

    def _describe(self, call: Call, executor: Executor, report: LoadReport) -> Described:
        """Describe the model. Collective: the ranks agree on all that is not planned."""
        ranks, name, weights = self.ranks, call.name, self.options.weights
        settings, make_target, is_quiet = self.settings, self.make_target, ranks.rank != 0
        computed = computing()

        def so_far() -> Progress:
            return Progress(computed().amount + executor.stats.read_bytes, "")

        progress = so_far if is_local(call) else None  # files from the Hub may take hours, and others come first
        with ranks.step("describing the model", name=name, progress=progress) as agreed, report.phase("describe"):
            described = describe(
                call, settings, make_target, executor, holds_values=True, weights=weights, is_quiet=is_quiet
            )
            agreed.digest = _compared(described)
            agreed.payload = fingerprint(map(" ".join, described.constructor.values.items()))
        if len(set(agreed.payloads)) > 1:
            with ranks.step("comparing values in memory", name=name) as agreed:
                agreed.payload = described.constructor.values
            names = {name for values in agreed.payloads for name in values}
            if differing := [name for name in names if len({values.get(name) for values in agreed.payloads}) > 1]:
                raise UnsupportedError(
                    f"{name}: {type(described.model).__name__} has values of no file that differ between ranks: "
                    f"{listed(sorted(differing))}. Compute or draw the same on all ranks, save these values with the "
                    "checkpoint, or load without lowmem_load"
                )
        return described

    def _plan(
        self, described: Described, around: Any, executor: Executor, once: ReadOnce, report: LoadReport
    ) -> PlannedModel:
        """Return the proved plan, for which all ranks have room. Collective: they agree on it, and on the files."""
        ranks, name, target, settings = self.ranks, described.name, described.target, described.settings
        # A step of its own. Otherwise a failure here would stop a rank that still describes, before it finds out by
        # itself that the default loader has to do it.
        with ranks.step("planning", name=name, progress=computing()) as agreed, report.phase("plan"):
            if settings.stage == 3:
                device = target.device.type if settings.offload_device == "none" else settings.offload_device
                refuse_other_zero_init(around, dtype=settings.dtype, device=device, world_size=settings.world_size)
            planned = make_plan(described, ranks.rank, read_cost([file.path for file in described.files]))
            on_host = target.device.type == "cpu" or settings.offload_device != "none"
            executor.have_enough_in_flight((file.path for file in described.files), on_host=on_host)
            shared, message_bytes = once.plan(planned.plan, target.device)
            uses = memory_uses(ranks.rank, planned.plan, described, executor.num_threads, message_bytes)
            agreed.digest = {"plan": planned.plan.fingerprint, "as share_reads": self.options.share_reads}
            agreed.payload = identify_files(described.files), uses, shared
        file_ids, uses_of_ranks, shared_of_ranks = zip(*agreed.payloads, strict=True)
        uses_of_ranks = (uses,) if ranks.is_fake else uses_of_ranks
        check_room(name, uses_of_ranks, MemoryShortageError)
        once.agree(shared_of_ranks)
        # A step of its own, too: DeepSpeed may make groups here, which all ranks must do or none.
        with ranks.step("preparing", name=name) as agreed, report.phase("plan"):
            with naming_shortage("preparing (swap buffers of offload_param)", settings.swap_bytes):
                target.prepare(described.model)
            agreed.payload = disk_uses(target.files(planned.plan.targets))
            file_bytes = sum(file.nbytes for file in described.files)
            if on_host and not has_room_for_cache(uses_of_ranks, planned.plan.costs.read_bytes, file_bytes):
                executor.bypass_cache()
        check_room(name, agreed.payloads, ConfigError)
        with report.phase("compare"):
            agree_on_bytes(ranks, name, described.files, executor.sources, file_ids)
        return planned

    def _read(
        self, described: Described, planned: PlannedModel, executor: Executor, once: ReadOnce, report: LoadReport
    ) -> None:
        """Make memory for the model and fill it. Collective: all ranks have finished, or all raise."""
        report.take_plan(planned.plan, described.settings.ds_config)
        unset = ", ".join(target.name for target in planned.plan.targets if target.is_uninitialised)
        needed_bytes, bar = report.needed_bytes, "Loading partitions"
        reading_step = reading(self.ranks, described.name, [executor], needed_bytes, [report], bar=bar)
        with reading_step as state, report.phase("read"):
            if unset:
                report.notes.append(f"not in the files, and left uninitialized by transformers: {unset}; they are zero")
                if report.rank == 0:  # in the step, because a filter may make the warning an error
                    warnings.warn(f"{described.name}: {report.notes[-1]}", stacklevel=outside_level())
            once.progress, state.num_waits = state.progress, lambda: once.num_waits
            execute(planned, described.target, executor, once, state.on_part)
            described.constructor.finish(described.model, described.target.device)
        report.take_counts(executor.stats, once)

    def _hand_over(self, described: Described, report: LoadReport) -> None:
        """Complete the report and hand it over, on the model and to `on_load`."""
        trained = {name for name, parameter in described.model.named_parameters() if parameter.requires_grad}
        if frozen := sorted(trained & described.constructor.frozen):
            report.notes.append(f"{listed(frozen)} train, as after an ordinary load, though the constructor froze them")
        setattr(described.model, REPORT_ATTRIBUTE, report)
        if isinstance(described.target, Zero3):
            from lowmem_load.engines.parameters import is_partitioned  # of DeepSpeed, which this target has imported

            show_ds_config(described.model, described.settings.ds_config, is_partitioned)
        logger.info("%s", report)
        if self.options.on_load is not None:
            self.options.on_load(report)


def find(call: Call, options: Options, ranks: RankGroup) -> None:
    """Have a call of a URL, or of a model on the Hub that is not downloaded, load from a folder. Collective."""
    if is_url(call.path) or (options.stream and call.path and not os.path.exists(call.path)):
        with ranks.step("finding the files", name=call.name):
            call.move(*find_folder(call.path, call.kwargs, stream=options.stream, check=ranks.check))


def make_executor(call: Call, num_ranks: int, weights: str | None = None, local_copy: str | None = None) -> Executor:
    """Return what reads for a call on one of so many ranks of a node."""
    if is_stand_in(call.path) or is_url(weights):
        opener = open_file if local_copy is None else LocalCopies(local_copy).open
        return Executor(num_threads=requests_in_flight(num_ranks), open_source=opener)
    if local_copy is not None:
        raise ConfigError(f"{call.name}: is not read from a store, so remove local_copy")
    return Executor(num_threads=min(MAX_THREADS, cores(num_ranks)), num_if_cold=requests_in_flight(num_ranks))


def fallback_reason(error: Exception, call: Call, options: Options) -> str:
    """Return why the default loader has to do a load, given an error of all ranks; raise the error if it must not.

    It has to if the error is about what this loader supports, not about files, the ds_config or other ranks.
    """
    # Errors of other classes come from transformers or the model, which may not be ready for symbolic tensors.
    may_work = isinstance(error, UnsupportedError | ModelBuildError) or not isinstance(error, LowMemLoadError | OSError)
    if not options.is_lenient or not may_work or is_stand_in(call.path):  # transformers cannot read a remote store
        raise error
    return error_text(error)


def fall_back(call: Call, loader: str, reason: str, restore: Callable[[], object]) -> LoadedModel:
    """Run a call as without lowmem_load, with a warning; `restore` puts random states back. See [Note: fallback]."""
    restore()
    text = f"{call.name}: lowmem_load cannot load this, so {loader} does: {reason}"
    warnings.warn(text, FallbackWarning, stacklevel=outside_level())
    model, info = call.run()
    setattr(model, FALLBACK_ATTRIBUTE, f"{loader} has loaded it: {reason}")
    return model, info


def _compared(described: Described) -> dict[str, str]:
    """Return what must be equal on all ranks that have described a model, by topic; of long values the digest."""
    # A configuration changes what is computed with equal weights: the base of rotary embeddings, say.
    compared = {
        key: text if len(text) <= MAX_VALUE else fingerprint([text])
        for key, text in configuration_of(described.model).items()
    }
    compared |= {key: fingerprint(sorted(map(str, keys))) for key, keys in described.info.items()}
    compared["commit"] = ", ".join(sorted({commit_in(file.path) for file in described.files} - {""})) or "none"
    remote = (file for file in described.files if is_stand_in(file.path))
    return compared | {f"version of {origin(file.path)}": file.version for file in remote}
