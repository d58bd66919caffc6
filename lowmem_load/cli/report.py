"""`lowmem-load report`: the reports of many ranks, joined."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowmem_load.cli import options
from lowmem_load.cli.output import print_all, print_json, working
from lowmem_load.quantities import duration, size
from lowmem_load.tables import facts, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowmem_load.reports.join import Joined

MAX_ROWS = 8
"""Ranks and files that are shown; --json has all."""


def report(
    files: Annotated[
        list[Path], typer.Argument(help="Reports of ranks, or folders of them.", exists=True, show_default=False)
    ],
    timeline: Annotated[
        Path | None, typer.Option(help="Draw phases over time to this PNG (needs matplotlib).", show_default=False)
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace for ui.perfetto.dev to this file.", show_default=False)
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Join the reports of ranks: who was slow, and which file.

    Ranks write them if LOWMEM_LOAD_REPORT_DIR names a folder, one file for each load.

    \b
    LOWMEM_LOAD_REPORT_DIR=reports torchrun --nproc-per-node 8 train.py
    lowmem-load report reports --timeline load.png --trace load.json
    """
    with working():
        from lowmem_load.plots import check_picture
        from lowmem_load.reports.file import read_reports
        from lowmem_load.reports.join import join

        if timeline is not None:
            check_picture(timeline)
        found = read_reports(files)
        loads = join(found)
        if timeline is not None:
            from lowmem_load.reports.timeline import draw

            draw(found, timeline)
        if trace is not None:
            from lowmem_load.reports.file import write_json
            from lowmem_load.reports.trace import trace_of

            write_json(trace, trace_of(found))
    if as_json:
        print_json([{**asdict(load), "slowest_rank": load.slowest.rank} for load in loads])
    else:
        print_all([part for load in loads for part in _parts(load)])


def _parts(load: Joined) -> list[RenderableType]:
    slowest, read = load.slowest, load.spreads.get("read")
    missing = ", ".join(map(str, load.missing_ranks[:MAX_ROWS])) + (
        " ..." if len(load.missing_ranks) > MAX_ROWS else ""
    )
    head = {
        "ranks": f"{len(load.ranks)} of {load.world_size}",
        "no report of": missing,
        "from begin to end": f"{duration(load.wall_s)}; the ranks began within {duration(load.begin_spread_s)}",
        "slowest rank": f"{slowest.rank} on {slowest.host}: read for {duration(slowest.phases.get('read', 0.0))}"
        + (f", the middle one for {duration(read.median)}" if read else ""),
        "slowest file": _slowest_file(load),
    }
    spreads = [
        (name, *(size(each) if name == "bytes read" else f"{each:.2f} s" for each in (it.least, it.median, it.most)))
        for name, it in load.spreads.items()
    ]
    by_read = sorted(load.ranks, key=lambda rank: -rank.phases.get("read", 0.0))[:MAX_ROWS]
    ranks = [
        (
            str(rank.rank),
            rank.host,
            f"{rank.phases.get('read', 0.0):.2f} s",
            f"{rank.seconds:.2f} s",
            size(rank.read_bytes),
            f"{rank.num_reads:,}",
            size(rank.grown_bytes),
        )
        for rank in by_read
    ]
    files = [
        (
            file.path.rpartition("/")[2],
            size(file.read_bytes),
            f"{file.num_reads:,}",
            f"{file.bytes_per_s / 1e9:.2f} GB/s",
            str(file.slowest_rank),
        )
        for file in load.files[:MAX_ROWS]
    ]
    sizes = [(f"up to {size(nbytes)}", f"{number:,}") for nbytes, number in load.sizes.items()]
    columns = ("rank", "host", "reading", "all", "read", "reads", "peak memory")
    of_files = ("file", "read", "reads", "speed", "slowest rank")
    return [
        facts(f"{load.name}, load {load.load}", head),
        "",
        table("Spread over the ranks", ("", "least", "middle", "most"), spreads, right=("least", "middle", "most")),
        table("Ranks, slowest first", columns, ranks, right=columns[2:]),
        table("Files, slowest first", of_files, files, right=of_files[1:]),
        table("Sizes of reads", ("bytes", "reads"), sizes, right=("reads",)),
    ]


def _slowest_file(load: Joined) -> str:
    if not load.files:
        return ""
    file = load.files[0]
    return f"{file.path}: {file.bytes_per_s / 1e9:.2f} GB/s of one read at a time, slowest on rank {file.slowest_rank}"
