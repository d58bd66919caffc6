"""`lowmem-load report`: the reports of many ranks, joined."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from lowmem_load.cli.common import Json, print_all, print_json, working
from lowmem_load.cli.tables import table
from lowmem_load.quantities import size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowmem_load.report_files import Joined

MAX_ROWS = 8
"""Ranks that are shown; --json has all."""


def report(
    files: Annotated[
        list[Path], typer.Argument(help="Reports of ranks, or folders of them.", exists=True, show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Join the reports of ranks: who was slow, and in which phase.

    Ranks write them if LOWMEM_LOAD_REPORT_DIR names a folder, one file for each load.

    \b
    LOWMEM_LOAD_REPORT_DIR=reports torchrun --nproc-per-node 8 train.py
    lowmem-load report reports
    """
    with working():
        from lowmem_load.report_files import join, read_reports

        loads = join(read_reports(files))
    if as_json:
        print_json([asdict(load) for load in loads])
    else:
        print_all([_table(load) for load in loads])


def _table(load: Joined) -> RenderableType:
    phases = list(dict.fromkeys(phase for rank in load.ranks for phase in rank.seconds))
    rows = [
        (
            *(str(rank.rank), rank.host),
            *(f"{rank.seconds.get(phase, 0.0):.2f} s" for phase in phases),
            *(size(rank.read_bytes), f"{rank.num_reads:,}", size(rank.peak_bytes)),
        )
        for rank in load.ranks[:MAX_ROWS]
    ]
    medians = (
        *(f"{median(rank.seconds.get(phase, 0.0) for rank in load.ranks):.2f} s" for phase in phases),
        size(median(rank.read_bytes for rank in load.ranks)),
        f"{median(rank.num_reads for rank in load.ranks):,.0f}",
        size(median(rank.peak_bytes for rank in load.ranks)),
    )
    missing = ", ".join(map(str, load.missing_ranks[:MAX_ROWS])) + ", ..." * (len(load.missing_ranks) > MAX_ROWS)
    title = f"{load.name}, load {load.load}: {len(load.ranks)} of {load.world_size} ranks, slowest reader first"
    columns = ("rank", "host", *phases, "bytes read", "reads", "peak memory")
    return table(
        title + (f"; no report of {missing}" if missing else ""),
        columns,
        [*rows, ("median", "", *medians)],
        right=columns[2:],
    )
