"""The text that a benchmark run prints: tables, definitions, ratios."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.results import Group, find_group, read_over_needed_of
from benchmarks.worker import RankResult

MMAP_METHODS = ("ordinary", "stock")  # they map the shard files; their reads are page faults

RANK_COLUMNS = (
    "ranks", "method", "rank", "peak", "anon", "file", "partition", "peak-part", "HBM", "seconds", "CPU s",
    "read calls", "mmap >=", "reported", "network", ">64 KiB",
)  # fmt: skip

DEFINITIONS = """\
All sizes in MiB (2**20 bytes). Every row is one process; every (method, ranks) ran in fresh processes.
start      after imports (torch, transformers and the model's module, deepspeed), process-group init, malloc_trim and
           a barrier. Memory is counted above the start.
peak       high-water mark of resident memory (VmHWM, reset at the start): exact peak of anonymous + file-backed.
anon, file largest sample of RssAnon, and of RssFile + RssShmem, every 5 ms; their maxima may fall at different times.
           File-backed pages of a mapped shard file are page cache, shared between ranks: they are reclaimable, but
           they count in RSS and in a cgroup's limit.
partition  bytes of this rank's ZeRO-3 partitions, padding included. peak-part = peak - partition.
HBM        torch.cuda.max_memory_allocated above the start; '-' where there is no GPU.
seconds    this rank's wall time of the load, waiting for other ranks included. ordinary = from_pretrained + initialize.
           lowmem: the phases that its LoadReport has (describe, plan, read, ...) follow in brackets.
           On the CPU from_pretrained leaves the parameters as views of the mapped files: ordinary reads in initialize.
CPU s      processor seconds of this rank's threads during the load: what other work on the machine changes least.
read calls bytes through read calls (rchar of /proc/self/io, without the sampler's own); page faults are not in it.
mmap >=    for methods that map the shard files: the largest file-backed growth, a lower bound of the bytes faulted in.
reported   lowmem: read_bytes of its LoadReport; floors: their own count.
network    tensor bytes this rank gave to collectives of 2 or more ranks (torch.distributed and deepspeed.comm, the
           larger side of each call); >64 KiB: the part in payloads that large, which is where weights would be.
floor      the partition bytes of the checkpoint, read with preadv in file order into fresh memory, one thread,
           no model.
tuned      the same bytes read by as many threads as lowmem_load has, into huge pages that all partitions share; no
           model. Before each load, of any method, memory of 1.2 partitions (4.8 if the page cache is cold) is touched
           and given back, so that none waits for a hypervisor that has taken free memory back."""

SHOWN = {
    "ordinary": "ordinary + `initialize`",
    "stock": "stock ZeRO-3",
    "lowmem": "**lowmem_load**",
    "floor": "plain floor",
    "tuned": "tuned floor",
}
"""Names of the methods in documents."""


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with right-aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def rank_table(groups: list[Group]) -> list[str]:
    """Return the table of every rank of every load."""
    rows: list[Sequence[str]] = [RANK_COLUMNS]
    rows += [_rank_row(rank) for group in groups for rank in group.ranks]
    return aligned(rows)


def _rank_row(rank: RankResult) -> list[str]:
    memory = rank.memory
    mapped = _mib(memory.peak_file) if rank.method in MMAP_METHODS else "-"
    return [
        str(rank.world_size), rank.method, str(rank.rank), _mib(memory.peak), _mib(memory.peak_anon),
        _mib(memory.peak_file), _mib(rank.partition_bytes), _mib(memory.peak - rank.partition_bytes),
        _mib(rank.hbm_peak_bytes), _seconds(rank), f"{rank.cpu_seconds:.2f}", _mib(rank.rchar_bytes),
        mapped, _mib(rank.read_bytes), _mib(rank.network.payload_bytes), _mib(rank.network.large_payload_bytes),
    ]  # fmt: skip


def _seconds(rank: RankResult) -> str:
    if not rank.phases_s:
        return f"{rank.seconds:.2f}"
    phases = "+".join(f"{seconds:.2f}" for seconds in rank.phases_s.values())
    return f"{rank.seconds:.2f} ({phases})"


def _mib(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "-"
    mib = num_bytes / 2**20
    # Small status messages must not look like nothing at all.
    return "0" if num_bytes == 0 else f"{mib:.4f}" if 0 < mib < 0.05 else f"{mib:.1f}"


def markdown_table(groups: Sequence[Group]) -> list[str]:
    """Return a row for each load, as documents show it; sizes are of the rank that has the most."""
    header = ["ranks", "method", "seconds", "CPU s", "peak", "peak - partition", "of it file-backed", "read / needed"]
    rows = [[*header, "in collectives"], ["---"] * (len(header) + 1)]
    for group in groups:
        ranks, read_over_needed = group.ranks, read_over_needed_of(group) if group.method == "lowmem" else None
        network_bytes = max(rank.network.payload_bytes for rank in ranks)
        sizes = [max(rank.memory.peak for rank in ranks), group.over_partition_bytes]
        sizes.append(max(rank.memory.peak_file for rank in ranks))
        row = [str(group.world_size), SHOWN[group.method], f"{group.seconds:.2f}"]
        row += [f"{max(rank.cpu_seconds for rank in ranks):.2f}", *(f"{size / 2**20:.0f}" for size in sizes)]
        row += ["" if read_over_needed is None else f"{read_over_needed:.4f}"]
        rows.append([*row, f"{network_bytes / 2**20:.0f}"])
    return [f"| {' | '.join(row)} |" for row in rows]


def repeat_lines(groups: list[Group]) -> list[str]:
    """Return the spread of each load's time, where loads were repeated."""
    return [
        f"{group.method}, {group.world_size} ranks: {group.seconds:.2f} s shown of "
        + ", ".join(f"{seconds:.2f}" for seconds in group.seconds_of_repeats)
        for group in groups
        if len(group.seconds_of_repeats) > 1
    ]


def ratio_table(rows: list[dict[str, Any]], methods: list[str]) -> list[str]:
    """Return the table of ratios (time: slowest rank of each) and of the memory beside the partition."""
    compared = ("ordinary/lowmem", "stock/lowmem", "lowmem/floor", "lowmem/tuned", "stock/floor", "ordinary/floor")
    header = ["ranks", *(f"time {name}" for name in compared), "lowmem read/needed"]
    lines: list[Sequence[str]] = [header + [f"{method} peak-part MiB" for method in methods]]
    for row in rows:
        times = [_number(row[f"{name.replace('/', '_over_')}_seconds"]) for name in compared]
        over = [_mib(row["peak_minus_partition_bytes"].get(method)) for method in methods]
        lines.append([str(row["world_size"]), *times, _number(row["lowmem_read_over_needed"], ".4f"), *over])
    # Read down rather than across: there are more figures than world sizes. Figures that no load gave are left out.
    columns = [column for column in zip(*lines, strict=True) if any(cell != "-" for cell in column[1:])]
    return aligned(columns)


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def loss_lines(groups: list[Group]) -> list[str]:
    """Return the training losses of each rank and method that trained."""
    return [
        f"{group.method}, {group.world_size} ranks, rank {rank.rank}: "
        + " ".join(f"{loss:.6f}" for loss in rank.losses)
        + f"  ({rank.train_seconds:.1f} s, process peak {rank.train_peak_bytes / 2**20:.0f} MiB)"
        for group in groups
        for rank in group.ranks
        if rank.losses
    ]


def summary_lines(groups: list[Group]) -> list[str]:
    """Return a sentence for each world size that stock and lowmem loaded at: what a reader came for."""
    lines = []
    for lowmem in groups:
        stock = find_group(groups, "stock", lowmem.world_size)
        if lowmem.method != "lowmem" or stock is None:
            continue
        took = {
            group.method: (group.seconds, max(rank.memory.peak for rank in group.ranks)) for group in (stock, lowmem)
        }
        lines.append(
            f"in short, {lowmem.world_size} ranks: stock ZeRO-3 took {took['stock'][0]:.1f} s and at most "
            f"{_mib(took['stock'][1])} MiB of memory a rank, lowmem_load {took['lowmem'][0]:.1f} s and "
            f"{_mib(took['lowmem'][1])} MiB, of which {_mib(lowmem.ranks[0].partition_bytes)} MiB are the partition"
        )
    return lines


def log(text: str = "") -> None:
    """Print one line at once, so that a long run can be followed."""
    print(text, flush=True)
