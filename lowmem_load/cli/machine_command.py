"""`lowmem-load doctor` and `bench`: whether this machine is ready, and how loads of a checkpoint compare on it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowmem_load.cli.common import NO, Json, print_all, print_json, working
from lowmem_load.cli.tables import table
from lowmem_load.quantities import size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowmem_load.cli.bench_compare import Row

DS_CONFIG = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}


def doctor(
    folder: Annotated[
        str | None, typer.Argument(help="That checkpoints lie in: its file system is looked at.", show_default=False)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Leave out what is as it should be.")] = False,
    as_json: Json = False,
) -> None:
    """Check this machine, and say what to do.

    Exits with 1 if there is a problem.

    Releases beside the tested ones, host memory and its limits, the file system of FOLDER, the launcher's variables,
    devices, pinned memory and DeepSpeed's compiled ops. Run it where the job will run.

    \b
    lowmem-load doctor /models/Llama-3.1-8B
    srun --nodes 2 --ntasks-per-node 1 lowmem-load doctor /models --quiet
    """
    with working():
        from lowmem_load.cli.doctor import OK, PROBLEM, check_all

        findings = list(check_all(folder))
    problems = [finding for finding in findings if finding.level == PROBLEM]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        shown = [finding for finding in findings if not (quiet and finding.level == OK)]
        rows = [(each.level, each.area, each.found, each.advice) for each in shown]
        said = f"{len(problems)} problem{'s' * (len(problems) > 1)}" if problems else "No problems."
        print_all([table("", ("", "about", "found", "what to do"), rows), said])
    if problems:
        raise typer.Exit(NO)


def bench(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A local checkpoint.", show_default=False)],
    ranks: Annotated[int, typer.Option(min=1, help="Processes, on this machine.")] = 2,
    ds_config: Annotated[
        Path | None, typer.Option(help="JSON file; by default ZeRO-3 in bf16.", exists=True, show_default=False)
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; the middle one's seconds count.")] = 1,
    cold: Annotated[bool, typer.Option("--cold", help="Put the files out of the page cache before each run.")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Load onto this machine's accelerators.")] = False,
    as_json: Json = False,
) -> None:
    """Load a checkpoint by stock ZeRO-3 and by lowmem_load; compare seconds and memory.

    Each run is fresh processes. The floor is each rank's share of the files' bytes, read into fresh memory. Exits with
    1 if stock and lowmem_load end with other weights.

    \b
    lowmem-load bench /models/Llama-3.1-8B --ranks 4 --cold --repeats 3
    """
    with working():
        from lowmem_load.cli.bench_compare import compare, equal_weights
        from lowmem_load.config.ds_config import read_ds_config

        rows = compare(
            folder,
            read_ds_config(str(ds_config)) if ds_config is not None else DS_CONFIG,
            ranks=ranks,
            repeats=repeats,
            is_cold=cold,
            on_gpu=gpu,
            told=lambda line: typer.echo(line, err=True),
        )
        is_equal = equal_weights(rows)
    if as_json:
        print_json({"rows": [asdict(row) for row in rows], "equal_weights": is_equal})
    else:
        said = "All ended with the same weights." if is_equal else "The weights differ; see the digests of --json."
        print_all([_table(f"{folder}, {ranks} ranks", rows), said])
    if not is_equal:
        raise typer.Exit(NO)


def _table(title: str, rows: list[Row]) -> RenderableType:
    cells = [
        (row.method, row.skipped, "", "")
        if row.skipped
        else (
            row.method,
            f"{row.seconds:.2f} s",
            size(row.peak_bytes),
            size(row.device_peak_bytes) if row.device_peak_bytes else "",
        )
        for row in rows
    ]
    columns = ("method", "slowest rank", "peak of host memory", "of device memory")
    return table(title, columns, cells, right=columns[1:])
