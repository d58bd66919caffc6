"""The results of `benchmarks.compare`: groups loads, checks them against each other, prints the tables.

All benchmarks use `parser_of`, `show_table` and `log`.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.worker import RankResult

MIB = 2**20
PACKAGES = ("torch", "transformers", "deepspeed", "safetensors")
PAGE = Path(__file__).with_name("RESULTS.md")
MODEL_METHODS = ("default", "lowmem")
"""These must end with bit-identical partitions. The floor joins them when it reads the dtype that is loaded."""

SHOWN = {"default": "default ZeRO-3", "lowmem": "**lowmem_load**", "floor": "plain read"}
"""Names of the methods in documents."""

COLUMNS = (
    "ranks",
    "method",
    "seconds",
    "CPU s",
    "peak",
    "peak - partition",
    "of it file-backed",
    "GPU peak",
    "read / needed",
    "in collectives",
)

DEFINITIONS = """\
Every load runs in fresh processes. Sizes are in MiB (2**20 bytes), of the rank that has the most.
seconds    wall time of the slowest rank, from the call to its return, without imports; of repeats, the median.
CPU s      processor seconds of the rank's threads during the load.
peak       high-water mark of resident memory (VmHWM, reset at the start) above the start of the load. The start is
           after imports, the start of the process group, malloc_trim and a barrier.
file-backed  pages of mapped files and shared memory: reclaimable, but they count in a cgroup's limit.
in collectives  tensor bytes that a rank gave to collectives of 2 or more ranks, the larger side of each call.
floor      the bytes of the partitions, without a model: preadv in file order into fresh memory, one thread.
memory     as found: nothing is prepared, as in a first load; a hypervisor may have taken free memory back. touched
           before: each rank touches 1.2 partitions and gives them back, so that no load waits for a hypervisor."""


@dataclass(slots=True)
class Group:
    """All ranks of one load; `seconds_of_repeats` has the slowest rank's seconds of each repetition."""

    method: str
    world_size: int
    ranks: list[RankResult]
    seconds_of_repeats: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return max(rank.seconds for rank in self.ranks)

    @property
    def peak_bytes(self) -> int:
        return max(rank.memory.peak for rank in self.ranks)

    def cells(self) -> list[str]:
        hbm = [rank.hbm_peak_bytes for rank in self.ranks if rank.hbm_peak_bytes is not None]
        needed, read = (sum(getattr(rank, name) or 0 for rank in self.ranks) for name in ("needed_bytes", "read_bytes"))
        return [
            str(self.world_size),
            SHOWN[self.method],
            f"{self.seconds:.2f}",
            f"{max(rank.cpu_seconds for rank in self.ranks):.2f}",
            _mib(self.peak_bytes),
            _mib(max(rank.memory.peak - rank.partition_bytes for rank in self.ranks)),
            _mib(max(rank.memory.peak_file for rank in self.ranks)),
            _mib(max(hbm)) if hbm else "",
            f"{read / needed:.4f}" if self.method == "lowmem" and needed else "",
            _mib(max(rank.network.payload_bytes for rank in self.ranks)),
        ]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.0f}"


def median_group(repeats: list[list[RankResult]]) -> Group:
    """Return the repetition of median duration (the lower one of an even number)."""
    groups = sorted((Group(ranks[0].method, len(ranks), ranks) for ranks in repeats), key=lambda group: group.seconds)
    chosen = groups[(len(groups) - 1) // 2]
    chosen.seconds_of_repeats = [max(rank.seconds for rank in ranks) for ranks in repeats]
    return chosen


def find_group(groups: Sequence[Group], method: str, world_size: int) -> Group | None:
    return next((group for group in groups if (group.method, group.world_size) == (method, world_size)), None)


def different_weights(groups: Sequence[Group], floor_dtype_equal: bool) -> tuple[list[str], list[str]]:
    """Return (what was compared, what differs), one line each: partitions must be equal bit for bit."""
    compared, differences = [], []
    for world_size in sorted({group.world_size for group in groups}):
        names = [*MODEL_METHODS, "floor"] if floor_dtype_equal else list(MODEL_METHODS)
        present = [group for name in names if (group := find_group(groups, name, world_size))]
        if len(present) < 2:
            continue
        reference = present[0]
        differences += [line for other in present[1:] for line in _differences(reference, other)]
        methods = ", ".join(group.method for group in present)
        compared.append(f"{world_size} ranks: {len(reference.ranks[0].digests)} parameters a rank, {methods}")
    return compared, differences


def _differences(reference: Group, other: Group) -> list[str]:
    lines = []
    for expected, got in zip(reference.ranks, other.ranks, strict=True):
        names = sorted(expected.digests.keys() | got.digests.keys())
        lines += [
            f"{name}: rank {got.rank} of {reference.world_size}: {other.method} differs from {reference.method}"
            for name in names
            if expected.digests.get(name) != got.digests.get(name)
        ]
    return lines


def network_failures(groups: Sequence[Group]) -> list[str]:
    """Return a line for each lowmem rank that moved a payload large enough to be weights."""
    return [
        f"lowmem, rank {rank.rank} of {group.world_size}: {rank.network.large_payload_bytes} bytes in payloads over "
        f"64 KiB went over the network; expected 0"
        for group in groups
        if group.method == "lowmem"
        for rank in group.ranks
        if rank.network.large_payload_bytes
    ]


def loss_failures(groups: Sequence[Group]) -> list[str]:
    """Return a line for each rank whose default and lowmem losses differ in any bit."""
    return [
        f"rank {got.rank} of {group.world_size}: default losses {expected.losses}, lowmem {got.losses}"
        for group in groups
        if group.method == "lowmem" and (default := find_group(groups, "default", group.world_size))
        for expected, got in zip(default.ranks, group.ranks, strict=True)
        if expected.losses != got.losses
    ]


def load_table(groups: Sequence[Group]) -> str:
    """Return a row for each load, as documents show it."""
    return markdown([COLUMNS, *(group.cells() for group in groups)])


def summary_lines(groups: Sequence[Group]) -> list[str]:
    """Return each repetition's seconds, then how long the others took compared with lowmem_load."""
    lines = [
        f"{group.method}, {group.world_size} ranks: {', '.join(f'{each:.2f}' for each in group.seconds_of_repeats)} s"
        for group in groups
        if len(group.seconds_of_repeats) > 1
    ]
    for ours in groups:
        others = [other for other in groups if other.world_size == ours.world_size and other is not ours]
        if ours.method == "lowmem":
            times = [f"{other.method} took {other.seconds / ours.seconds:.2f} times as long" for other in others]
            took = f"{ours.world_size} ranks: lowmem_load took {ours.seconds:.2f} s, {_mib(ours.peak_bytes)} MiB a rank"
            lines.append("; ".join([took, *times]))
    return lines


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, its cells aligned; the first row is the header."""
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in rows
    )


def parser_of(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with `--docs` and an option for each default; one that is a list takes several values."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        kind, nargs = (type(default[0]), "+") if isinstance(default, list) else (type(default), None)
        parser.add_argument(f"--{name}", type=kind, nargs=nargs, default=default, help=f"Default: {default}")
    parser.add_argument("--docs", action="store_true", help="write the table into benchmarks/RESULTS.md")
    return parser


def machine_lines() -> list[str]:
    """Return what machine and releases a figure is measured on."""
    import torch

    gpu = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else "none"
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    ram_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    date = dt.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z")
    num_cores, cpu = len(os.sched_getaffinity(0)), models[0] if models else platform.machine()
    return [
        f"machine: {cpu}, {num_cores} cores, {ram_gib:.1f} GiB RAM, GPU: {gpu}",
        f"versions: python {platform.python_version()}, {versions}; {platform.system()} {platform.release()}; {date}",
    ]


def show_table(name: str, rows: Sequence[Sequence[str]], *, docs: bool) -> None:
    """Print a table below what machine it was measured on; with `docs`, write it into benchmarks/RESULTS.md, too."""
    machine = machine_lines()
    log("\n".join([*machine, "", markdown(rows)]))
    if docs:
        write_docs(name, "\n".join([*(f"- {line}" for line in machine), "", markdown(rows)]))


def write_docs(name: str, text: str, page: Path = PAGE) -> None:
    """Put what a run came to between the markers of this name on the page of figures.

    Raises:
        ValueError: the page has no such markers.
    """
    marked = re.compile(rf"(<!-- written by {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    written, count = marked.subn(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", page.read_text(encoding="utf-8"))
    if count != 1:
        raise ValueError(f"{page}: {count} places are marked as written by {name}")
    page.write_text(written, encoding="utf-8")


def log(text: str = "") -> None:
    """Print one line at once, so that a long run can be followed."""
    print(text, flush=True)
