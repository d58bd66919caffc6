"""What a load did: bytes, reads, seconds, memory, keys. As text, and as JSON files, of which `join` makes one table."""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from lowmem_load.errors import ConfigError, listed
from lowmem_load.io.remote_file import TRAFFIC, Counts
from lowmem_load.io.source import retries
from lowmem_load.phases import Phases
from lowmem_load.planning.load_plan import SHARDED, LoadPlan, SlowPath
from lowmem_load.text import count, size

logger = logging.getLogger(__name__)

REPORT_DIR = "LOWMEM_LOAD_REPORT_DIR"
"""Environment variable: a folder that every rank writes its reports into. It is made if it is not there."""


class DeviceMemory(NamedTuple):
    """Accelerator memory of this process's tensors, bytes: now, and the most since it started or reset its peaks."""

    allocated_bytes: int
    peak_bytes: int


def device_memory() -> DeviceMemory:
    """Return the memory of the current accelerator device; zeros without one."""
    if torch.accelerator.is_available():
        device_module = torch.get_device_module(torch.accelerator.current_accelerator())
        if getattr(device_module, "is_initialized", bool)():  # torch.mps has no such figures
            return DeviceMemory(int(device_module.memory_allocated()), int(device_module.max_memory_allocated()))
    return DeviceMemory(0, 0)


@dataclass(slots=True)
class LoadReport(Phases):
    """What one load did on this rank. `print` shows all of it.

    Attributes:
        name: what was loaded.
        rank, world_size: of the partition group.
        ds_config: what the model was partitioned for, with each "auto" that loading reads resolved.
            `deepspeed.initialize` accepts it once optimizer and scheduler hold no "auto". Empty for `load_into`.
        dtype: storage dtype of floating-point parameters, of most where they differ, as torch prints it.
        num_parameters: distinct parameters; tied ones count once.
        num_elements: elements of all of them, unpadded.
        num_quantized: parameters whose packed values are held; their elements are counted as they are stored.
        partition_bytes: bytes of the partitions on this rank, padding included; 0 under stages 0 to 2.
        whole_bytes: bytes that every rank holds whole: all parameters under stages 0 to 2, those that `partition`
            leaves out, and the scales of quantized ones.
        file_bytes: bytes of the files of the checkpoint, headers included; 0 for a model built from its configuration.
        needed_bytes: bytes of the files whose values this rank holds now.
        read_bytes: bytes read from the files, headers excluded.
        num_reads: reads that were made; small adjacent ones share a system call.
        received_bytes: bytes that this rank holds and another one has read for it.
        requests: what was asked of a remote store: requests, those of them that repeated a failed one, bytes, and the
            seconds of all threads before they repeated one. Zeros where all files are on this machine.
        seconds, peak_memory: see `Phases`; the phases are describe, plan, compare and read.
        peak_device_bytes: accelerator memory of this process's tensors at the peak, above the start; 0 on the CPU.
            Exact where the peak is a new one of the process, else the most seen after a parameter was made.
        loading_info: missing_keys, unexpected_keys and mismatched_keys, as transformers' `output_loading_info` has
            them.
        slow_paths: parameters and buffers that took a slower path.
        read_early: of a lazy model: tensors of the files that were read by themselves, and the function that looked.
        num_unread: of a lazy model: parameters that nobody has looked at. `load_report` counts them.
        notes: a sentence for each surprise: parameters that nothing initialised, parameters in another dtype than an
            ordinary load gives, reads that could not be shared, reads that were tried again.
    """

    name: str
    rank: int = 0
    world_size: int = 1
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = ""
    num_parameters: int = 0
    num_elements: int = 0
    num_quantized: int = 0
    partition_bytes: int = 0
    whole_bytes: int = 0
    file_bytes: int = 0
    needed_bytes: int = 0
    read_bytes: int = 0
    num_reads: int = 0
    received_bytes: int = 0
    requests: Counts = field(default_factory=Counts)
    peak_device_bytes: int = 0
    loading_info: dict[str, list[Any]] = field(default_factory=dict)
    slow_paths: list[SlowPath] = field(default_factory=list)
    read_early: dict[str, str] = field(default_factory=dict)
    num_unread: int = 0
    notes: list[str] = field(default_factory=list)
    _device_start: DeviceMemory = field(default_factory=device_memory, repr=False)

    def take_plan(self, plan: LoadPlan, ds_config: Mapping[str, Any]) -> None:
        """Copy what is known from the plan: configuration, sizes, keys, slow paths, notes."""
        is_sharded = any(target.kind == SHARDED for target in plan.targets)
        self.ds_config = {} if is_sharded else ds_config  # that of `load_into` is not the user's
        self.num_parameters = len(plan.targets)
        self.num_elements = sum(target.numel for target in plan.targets)
        self.num_quantized = plan.num_quantized
        floating = sorted(str(target.dtype) for target in plan.targets if target.dtype.is_floating_point)
        self.dtype = max(floating, key=floating.count, default="")
        self.partition_bytes, self.whole_bytes = plan.partition_bytes, plan.replicated_bytes + plan.companion_bytes
        self.file_bytes = sum(file.nbytes for file in plan.files)
        self.needed_bytes = plan.costs.needed_bytes
        self.loading_info = {
            key: list(getattr(plan, key)) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
        }
        self.slow_paths = plan.slow_paths
        if recast := [target.name for target in plan.targets if target.is_recast]:
            trained = f"in {self.dtype}, the dtype that this ds_config trains in; an ordinary load keeps another"
            self.notes.append(f"{trained}: {listed(recast)}")

    def sample_memory(self) -> None:
        """Raise the peaks to the memory in use now, where that is more."""
        device = device_memory()
        is_new_peak = device.peak_bytes > self._device_start.peak_bytes
        reached = device.peak_bytes if is_new_peak else device.allocated_bytes
        self.peak_device_bytes = max(self.peak_device_bytes, reached - self._device_start.allocated_bytes)
        Phases.sample_memory(self)  # with slots, super() would need the class that they were added to

    def __str__(self) -> str:
        return "\n".join([self._title(), *(f"  {topic}: {text}" for topic, text in self._rows().items())])

    def _title(self) -> str:
        return f"{self.name}: rank {self.rank} of {self.world_size}"

    def _rows(self) -> dict[str, str]:
        of_dtype = f", {self.dtype.removeprefix('torch.')}" if self.dtype else ""
        quantized = f"; {self.num_quantized} tensors are quantized" if self.num_quantized else ""
        of_all = f"of {size(self.partition_bytes * self.world_size)} partitioned" if self.ds_config else "of shards"
        holds = {f"{size(self.partition_bytes)} {of_all}": self.partition_bytes}
        holds |= {f"{size(self.whole_bytes)} whole on every rank": self.whole_bytes}
        needed = f", {size(self.needed_bytes)} needed" if self.needed_bytes else ""  # not counted: read one by one
        read = f"{size(self.read_bytes)} of {size(self.file_bytes)} in the files{needed}"
        from_files = f"{read}, {self.num_reads:,} reads" if self.file_bytes else "nothing: built from its configuration"
        lists = {**self.loading_info, "slow paths": [path.name for path in self.slow_paths]}
        on_device = f"peak {size(self.peak_device_bytes)} above the start" if self.peak_device_bytes else ""
        rows = {
            "model": f"{self.num_parameters} tensors, {count(self.num_elements)} parameters{of_dtype}{quantized}",
            "holds": ", ".join(text for text, nbytes in holds.items() if nbytes),
            "read": from_files,
            "read one by one": self._early_text(),
            "not read yet": f"{self.num_unread} tensors" if self.num_unread else "",
            "requests": self._requests_text(),
            "received": f"{size(self.received_bytes)} from ranks that hold the same" if self.received_bytes else "",
            "host memory": f"peak {size(self.peak_memory.total_bytes)} above the start",
            "device memory": on_device,
            "seconds": ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items()),
            **{label.replace("_", " "): listed(list(map(str, values))) for label, values in lists.items()},
            "notes": "; ".join(self.notes),
        }
        return {topic: text for topic, text in rows.items() if text}

    def _early_text(self) -> str:
        """Say which function looked at which tensors of a lazy model, of which it read what it looked at."""
        of_callers: dict[str, list[str]] = {}
        for name, caller in self.read_early.items():
            of_callers.setdefault(caller, []).append(name)
        return "; ".join(f"{listed(names, 3)} by {caller}()" for caller, names in of_callers.items())

    def _requests_text(self) -> str:
        counts = self.requests
        if not counts.num_requests:
            return ""
        waited = f", {counts.num_retries:,} of them again after {counts.waited_s:.1f} s" if counts.num_retries else ""
        return f"{counts.num_requests:,}, {size(counts.received_bytes)}{waited}"


class Attempts:
    """What this process repeats from now on, because a file system or a remote store failed for a moment."""

    def __init__(self) -> None:
        self._retries, self._requests = retries(), TRAFFIC.counts

    @property
    def requests(self) -> Counts:
        """All requests to remote stores."""
        return TRAFFIC.counts.since(self._requests)

    @property
    def notes(self) -> list[str]:
        """What was repeated, for `LoadReport.notes`."""
        notes, of_files, requests = [], retries() - self._retries, self.requests
        if of_files:
            faults = [f"{fault} ({number}x)" for fault, number in of_files.items()]
            notes.append(f"tried again after {listed(faults)}")
        if requests.num_retries:
            notes.append(f"made again: {requests.num_retries:,} of {requests.num_requests:,} requests")
        return notes


OnLoad: TypeAlias = Callable[[LoadReport], object]
"""Called with the report when a load has ended."""


# -- files: each rank writes its own where the environment says --------------------------------------------------------

FORMAT = 2
"""Version of the files; raised when their meaning changes."""

_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("load", "rank", "world_size", "read_bytes", "num_reads"), int),
    **dict.fromkeys(("name", "host"), str),
    **dict.fromkeys(("seconds", "peak_memory"), dict),
}
"""What `join` reads of a report."""

_numbers = itertools.count(1)


def write_report(report: LoadReport) -> Path | None:
    """Write a report where the environment says; return the file. One that cannot be written is only logged."""
    folder, number = os.environ.get(REPORT_DIR), next(_numbers)
    if not folder:
        return None
    model = re.sub(r"[^\w.-]+", "-", os.path.basename(report.name.rstrip("/"))).strip("-.") or "model"
    path = Path(folder) / f"load{number:03}-{model}-rank{report.rank:05}.json"
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        os.makedirs(folder, exist_ok=True)
        part.write_text(json.dumps(as_dict(report, number), default=str) + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        logger.warning("%s: the report of the load of %s cannot be written: %s", path, report.name, error)
        return None
    return path


def as_dict(report: LoadReport, number: int) -> dict[str, Any]:
    """Return a report as a dict, with the number of the load in its process and the host."""
    fields = {name: value for name, value in asdict(report).items() if not name.startswith("_")}
    return {"format": FORMAT, "load": number, "host": platform.node(), **fields}


def read_reports(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the reports in files and folders; raise ConfigError where there are none, or one cannot be read."""
    files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    if not files:
        raise ConfigError(f"no reports: set {REPORT_DIR} for a job, and name that folder")
    return [_read(path) for path in files]


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a report: {error}") from error
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise ConfigError(f"{path}: is no report of a load, or one of another release (format {FORMAT} is expected)")
    for key, kind in _KINDS.items():
        if not isinstance(report.get(key), kind):
            raise ConfigError(f"{path}: is no whole report: {key} is {report.get(key)!r:.80}")
    return report


@dataclass(frozen=True, slots=True)
class Rank:
    """The figures of one rank, as in `LoadReport`; `peak_bytes` of host memory, above the start."""

    rank: int
    host: str
    seconds: Mapping[str, float]
    read_bytes: int
    num_reads: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Joined:
    """Load number `load` of the processes: ranks whose reports are there, slowest reader first (others wait for it)."""

    name: str
    load: int
    world_size: int
    ranks: list[Rank]
    missing_ranks: list[int]


def join(reports: Iterable[Mapping[str, Any]]) -> list[Joined]:
    """Return the loads that reports are of, in order; raise ConfigError for two of the same rank and load."""
    loads: dict[tuple[int, str, int], dict[int, Rank]] = {}
    for report in reports:
        which = report["load"], report["name"], report["world_size"]
        ranks, rank = loads.setdefault(which, {}), report["rank"]
        if rank in ranks:
            raise ConfigError(
                f"two reports of rank {rank} of load {which[0]} of {which[1]}, {which[2]} ranks: name the reports of "
                "one job only"
            )
        peak_bytes = sum(report["peak_memory"].values())
        ranks[rank] = Rank(
            rank, report["host"], report["seconds"], report["read_bytes"], report["num_reads"], peak_bytes
        )
    return [
        Joined(
            name,
            load,
            world_size,
            ranks=sorted(ranks.values(), key=lambda rank: (-rank.seconds.get("read", 0.0), rank.rank)),
            missing_ranks=sorted(set(range(world_size)) - set(ranks)),
        )
        for (load, name, world_size), ranks in sorted(loads.items())
    ]
