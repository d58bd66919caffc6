"""The steps of a load, in the order of the picture in docs/development/architecture.md: see `Load._load`."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowmem_load.config.settings import Settings
from lowmem_load.distributed.environment import cores
from lowmem_load.distributed.nodes import node_name
from lowmem_load.distributed.peers import Progress, computing
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.ds.zero3_target import TargetMaker, Zero3, zero_init_disabled
from lowmem_load.errors import NotStreamedWarning, UnsupportedError, error_text, listed, outside_level
from lowmem_load.families.call import Call
from lowmem_load.hf import model_folder
from lowmem_load.hf.active import on_host, show_ds_config
from lowmem_load.hf.hub_files import commit_in
from lowmem_load.hf.remote_names import find_folder, rename_loaded
from lowmem_load.io.executor import Executor
from lowmem_load.io.memory import naming_shortage
from lowmem_load.io.mounts import read_cost
from lowmem_load.io.remote_file import requests_in_flight
from lowmem_load.io.source import Opener
from lowmem_load.io.stand_ins import is_stand_in, is_url, open_file, origin
from lowmem_load.phases import no_callback
from lowmem_load.pipeline.checks import (
    Use,
    check_around,
    check_described,
    check_left_alone,
    check_memory,
    check_room,
    check_sharing,
    disk_uses,
    is_left_alone,
    is_local,
    may_work_in_stock,
    memory_uses,
    refuse_device_map,
)
from lowmem_load.pipeline.describe import Described, describe, random_state_of
from lowmem_load.pipeline.execute import execute
from lowmem_load.pipeline.make_plan import Planned, make_plan
from lowmem_load.pipeline.read_step import reading
from lowmem_load.pipeline.same_bytes import FilesId, agree_on_bytes, identify_files
from lowmem_load.planning.replicas import ShareReads
from lowmem_load.report import Attempts, LoadReport, OnLoad
from lowmem_load.text import MAX_VALUE, fingerprint

if TYPE_CHECKING:
    from lowmem_load.pipeline.read_once import ReadOnce

logger = logging.getLogger(__name__)

MAX_THREADS = 4
"""Reads in flight per rank. More compete for the same disk and page tables."""

REPORT_ATTRIBUTE = "lowmem_load_report"
"""Attribute of a model: its `LoadReport`."""

LEFT_ATTRIBUTE = "lowmem_load_left_to_stock"
"""Attribute of a model that was left to stock: to which, and why, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to load. For `stream`, `weights` and `share_reads`, see `load_model`."""

    stream: bool = False
    weights: str | None = None
    share_reads: ShareReads = "auto"
    is_lenient: bool = False  # transformers does what cannot be streamed, with a warning; see [Note: left to stock]
    on_load: OnLoad | None = None  # called with the report of each load

    def __post_init__(self) -> None:
        check_sharing(self.share_reads)


@dataclass(frozen=True, slots=True)
class Load:
    """Loads models by one set of settings on one group of ranks.

    Attributes:
        open_source: opens files of the checkpoint.
        stock: who does what cannot be streamed, for the warning.

    [Note: left to stock] Describing and planning show whether a load can be streamed. If it cannot, on all ranks alike,
    nothing has been allocated or read, and the random state is put back. So transformers can start the load afresh.
    """

    settings: Settings
    ranks: RankGroup
    make_target: TargetMaker
    options: Options = Options()
    open_source: Opener = open_file
    stock: str = "stock ZeRO-3"

    def __call__(self, call: Call) -> tuple[nn.Module, dict[str, Any]]:
        """Run a `from_pretrained`; return the model, filled and with its report, and the loading info. Collective."""
        with self.ranks.session(f"the load of {call.name}"):
            self._locate(call)
            random_state = torch.get_rng_state()
            try:
                return rename_loaded(self._load(call) or call.run())
            except _NotStreamedError as error:
                reason = str(error)
            return leave_to_stock(call, self.stock, reason, random_state)

    def _locate(self, call: Call) -> None:
        if is_to_be_found(call, self.options):
            with self.ranks.step("finding the files", name=call.name):
                find(call, self.options, self.ranks.check)

    def _load(self, call: Call) -> tuple[nn.Module, dict[str, Any]] | None:
        """Run the steps of a load. Return the model and the loading info; None if transformers loads it."""
        report, attempts = LoadReport(call.name, self.ranks.rank, self.ranks.world_size), Attempts()
        with contextlib.ExitStack() as stack:
            is_ordinary, nodes, random_state = self._check_call(call)
            if is_ordinary:
                return None
            around = stack.enter_context(zero_init_disabled())
            stack.enter_context(on_host())
            stack.enter_context(random_state_of(random_state))
            executor = stack.enter_context(
                make_executor(call, nodes.count(nodes[self.ranks.rank]), open_source=self.open_source)
            )
            executor.sources.on_wait = self.ranks.check
            once = self._read_once(nodes, stack)
            with self._streamable(is_remote=is_stand_in(call.path)):
                described = self._describe(call, executor, report)
                planned, ids = self._plan(described, around, once, report, executor.num_threads)
            with self._streamable(is_remote=is_stand_in(call.path), made=True):
                self._prepare(described, planned, report)
            self._check_files(described, executor, ids, report)
            self._execute(planned, described, executor, once, report)
            report.requests = attempts.requests
            report.notes += attempts.notes
            report.read_bytes, report.num_reads = executor.stats.read_bytes, executor.stats.num_reads
            if once is not None:
                report.received_bytes = once.received_bytes
                if once.why_alone:
                    report.notes.append(f"no reads were shared with other ranks: {once.why_alone}")
        self._report(described, planned, report)
        return described.model, described.info

    def _report(self, described: Described, planned: Planned, report: LoadReport) -> None:
        if unset := ", ".join(target.name for target in planned.plan.targets if target.is_uninitialised):
            report.notes.append(f"not in the files, and left uninitialised by transformers: {unset}; they are zero")
            if report.rank == 0:
                warnings.warn(f"{described.name}: {report.notes[-1]}", stacklevel=outside_level())
        trained = {name for name, parameter in described.model.named_parameters() if parameter.requires_grad}
        if frozen := sorted(trained & described.constructor.frozen):
            report.notes.append(f"{listed(frozen)} train, as after an ordinary load, though the constructor froze them")
        setattr(described.model, REPORT_ATTRIBUTE, report)
        if isinstance(described.target, Zero3):
            show_ds_config(described.model, described.settings.ds_config)
        logger.info("%s", report)
        if self.options.on_load is not None:
            self.options.on_load(report)

    @contextlib.contextmanager
    def _streamable(self, *, is_remote: bool, made: bool = False) -> Iterator[None]:
        """Turn an error that says that a load cannot be streamed into one that leaves it to stock, if it is lenient.

        Transformers cannot read files in a remote store.
        With `made`, DeepSpeed may have made something, so only a refused setting leaves the load to stock.
        """
        try:
            yield
        except Exception as error:
            may_work = isinstance(error, UnsupportedError) if made else may_work_in_stock(error)
            if not self.options.is_lenient or not may_work or is_remote:
                raise
            raise _NotStreamedError(error_text(error, model_folder.MAX_QUOTED)) from error

    def _check_call(self, call: Call) -> tuple[bool, list[str], bytes]:
        """Return whether transformers does this load by itself, the node of each rank, and rank 0's random state."""
        with self.ranks.step("checking the call", name=call.name) as step:
            refuse_device_map(call, self.settings)
            left_alone = is_left_alone(call, self.settings)
            if left_alone:
                check_left_alone(call)
            else_ = ", or else left to stock" if self.options.is_lenient else ""
            step.digest = {"as kind of load": "an ordinary load" if left_alone else "a streamed load" + else_}
            state = torch.get_rng_state().numpy().tobytes() if self.ranks.rank == 0 else b""
            step.payload = node_name(self.ranks.rank), base64.b64encode(state).decode()
        nodes = [node for node, _ in step.payloads]
        if self.ranks.is_fake:  # the other ranks do not exist
            nodes = list(map(str, range(len(nodes))))
        return left_alone, nodes, base64.b64decode(step.payloads[0][1])

    def _describe(self, call: Call, executor: Executor, report: LoadReport) -> Described:
        computed = computing()

        def progress() -> Progress:
            return Progress(computed().amount + executor.stats.read_bytes, "")

        # Files from the Hub may take hours, and come on other ranks first.
        describing = self.ranks.step(
            "describing the model", name=call.name, progress=progress if is_local(call) else None
        )
        with describing as step, report.phase("describe"):
            described = describe(
                call,
                self.settings,
                self.make_target,
                executor,
                holds_values=True,
                weights=self.options.weights,
                is_quiet=self.ranks.rank != 0,
            )
            commits = sorted({commit_in(file.path) for file in described.files} - {""})
            info = {key: fingerprint(sorted(map(str, keys))) for key, keys in described.info.items()}
            # A configuration changes what is computed with equal weights: the base of rotary embeddings, say.
            remote = (file for file in described.files if is_stand_in(file.path))
            versions = {f"version of {origin(file.path)}": file.version for file in remote}
            step.digest = {
                **_short(call.configuration(described.model)),
                **info,
                "commit": ", ".join(commits) or "none",
            } | versions
        return described

    def _plan(
        self,
        described: Described,
        around: Any,
        once: ReadOnce | None,
        report: LoadReport,
        threads: int,
    ) -> tuple[Planned, list[FilesId]]:
        """Return the plan, and of each rank the files that it planned against."""
        # A step of its own. Otherwise a failure here would stop a rank that still describes, before it finds out by
        # itself that the load must be left to stock.
        planning = self.ranks.step("planning", name=described.name, progress=computing())
        with planning as step, report.phase("plan"):
            check_described(described)
            if described.settings.stage == 3:
                check_around(around, described)
            cost = read_cost([file.path for file in described.files])
            planned = make_plan(described, self.ranks.rank, cost)
            step.digest = {"plan": planned.plan.fingerprint, "as share_reads": self.options.share_reads}
            summary, message_bytes = (
                (None, 0) if once is None else once.plan(planned.plan, described.target.device, cost)
            )
            uses = memory_uses(self.ranks.rank, planned.plan, described, threads, message_bytes)
            step.payload = identify_files(described.files), uses, summary
        uses_by_rank = [[Use(*use) for use in rank_uses] for _, rank_uses, _ in step.payloads]
        check_memory(described.name, [uses] if self.ranks.is_fake else uses_by_rank)
        ids = [(digest, seed) for (digest, seed), *_ in step.payloads]
        if once is not None:
            once.agree([summary for *_, summary in step.payloads])
        return planned, ids

    def _share_reads(self) -> ShareReads:
        """Return which ranks share reads: those of files, into memory that stays."""
        can_share = self.settings.offload_device != "nvme" and self.open_source is open_file
        can_share = can_share and self.ranks.world_size > 1 and not self.ranks.is_fake
        return self.options.share_reads if can_share else "off"

    def _read_once(self, nodes: Sequence[str], stack: contextlib.ExitStack) -> ReadOnce | None:
        """Return what reads once what several ranks hold, while the stack is open; None if each reads alone."""
        if (share := self._share_reads()) == "off":
            return None
        from lowmem_load.pipeline.read_once import ReadOnce  # a lone process needs none of it

        return stack.enter_context(contextlib.closing(ReadOnce(self.ranks, nodes, share)))

    def _prepare(self, described: Described, planned: Planned, report: LoadReport) -> None:
        # A step of its own: DeepSpeed may make groups here, which all ranks must do or none.
        with self.ranks.step("preparing", name=described.name) as step, report.phase("plan"):
            with naming_shortage("preparing (swap buffers of offload_param)", described.settings.swap_bytes):
                described.target.prepare(described.model)
            step.payload = disk_uses(described.target.files(planned.plan.targets))
        check_room(described.name, [[Use(*use) for use in uses] for uses in step.payloads])
        if described.settings.stage == 3:  # not earlier: a load that is left to stock logs it by itself
            described.call.log_zero_init(described.model)
        report.take_plan(planned.plan, described.settings.ds_config)

    def _check_files(
        self, described: Described, executor: Executor, ids: Sequence[FilesId], report: LoadReport
    ) -> None:
        with report.phase("compare"):
            agree_on_bytes(
                self.ranks,
                described.name,
                described.files,
                sources=executor.sources,
                ids=ids,
                num_threads=executor.num_threads,
            )

    def _execute(
        self,
        planned: Planned,
        described: Described,
        executor: Executor,
        once: ReadOnce | None,
        report: LoadReport,
    ) -> None:
        needed_bytes = planned.plan.costs.needed_bytes
        step = reading(self.ranks, described.name, [executor], needed_bytes, [report], bar="Loading partitions")
        with step as state, report.phase("read"):
            if planned.plan.num_quantized:
                from lowmem_load.pipeline.companions import combine_companions  # most loads have none

                combine_companions(planned, executor, self.ranks, state.progress)
            if once is not None:
                once.progress, state.num_exchanges = state.progress, lambda: once.num_exchanges
            execute(planned, described.target, executor, state.on_part, once)
            described.constructor.finish(described.model, described.target.device)


def is_to_be_found(call: Call, options: Options) -> bool:
    """Return whether a call names a URL, or a model on the Hub that is streamed."""
    return is_url(call.path) or (options.stream and not os.path.exists(call.path))


def find(call: Call, options: Options, check: Callable[[], object] = no_callback) -> None:
    """Have a call load from the folder that stands for what it names."""
    call.move(*find_folder(call.path, call.kwargs, stream=options.stream, check=check))


def make_executor(call: Call, num_ranks: int, *, open_source: Opener = open_file) -> Executor:
    """Return what reads for a call on one of so many ranks of a node."""
    if is_stand_in(call.path):
        return Executor(num_threads=requests_in_flight(num_ranks), open_source=open_source, starts_late=True)
    return Executor(num_threads=min(MAX_THREADS, cores(num_ranks)), open_source=open_source)


def leave_to_stock(call: Call, stock: str, reason: str, random_state: torch.Tensor) -> tuple[nn.Module, dict[str, Any]]:
    """Run a call as without lowmem_load, with a warning. See [Note: left to stock]."""
    torch.set_rng_state(random_state)
    text = f"{call.name}: not streamed, but left to {stock}: {reason}"
    warnings.warn(text, NotStreamedWarning, stacklevel=outside_level())
    model, info = call.run()
    setattr(model, LEFT_ATTRIBUTE, f"{stock}: {reason}")
    return model, info


class _NotStreamedError(Exception):
    """Carries the reason out of a load that is left to stock."""


def _short(values: Mapping[str, str]) -> dict[str, str]:
    """Return values by key; digests of long ones."""
    return {key: text if len(text) <= MAX_VALUE else fingerprint([text]) for key, text in values.items()}
