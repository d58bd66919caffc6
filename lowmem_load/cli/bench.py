"""`lowmem-load bench`: ways to load the user's own checkpoint, compared on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowmem_load.cli import options
from lowmem_load.cli.output import NO, print_all, print_json, working
from lowmem_load.quantities import size
from lowmem_load.tables import table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowmem_load.bench.compare import Row


DS_CONFIG = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}

Folder = Annotated[str, typer.Argument(metavar="FOLDER", help="A local checkpoint, downloaded.", show_default=False)]
Ranks = Annotated[int, typer.Option(min=1, help="Processes, on this machine.")]
DsConfig = Annotated[
    Path | None, typer.Option(help="JSON file; by default ZeRO-3 in bf16.", exists=True, show_default=False)
]
Method = Annotated[
    list[str] | None, typer.Option(help="stock, lowmem_load or floor; repeatable. By default all three.")
]
Repeats = Annotated[int, typer.Option(min=1, help="Runs of each; the middle one's seconds count.")]
Cold = Annotated[bool, typer.Option("--cold", help="Put the files out of the page cache before each run.")]
Gpu = Annotated[bool, typer.Option("--gpu", help="Load onto this machine's accelerators.")]


def bench(
    folder: Folder,
    ranks: Ranks = 2,
    ds_config: DsConfig = None,
    method: Method = None,
    repeats: Repeats = 1,
    cold: Cold = False,
    gpu: Gpu = False,
    png: options.Png = None,
    auto_class: options.AutoClass = None,
    as_json: options.Json = False,
) -> None:
    """Load a checkpoint in each way and compare seconds and memory.

    Each run is fresh processes. The floor is each rank's share of the files' bytes, read into fresh memory. Exits with
    1 if stock and lowmem_load end with other weights.

    \b
    lowmem-load bench /models/Llama-3.1-8B --ranks 4
    lowmem-load bench /models/Llama-3.1-8B --method lowmem_load --method floor --cold --repeats 3
    """
    with working():
        from lowmem_load.bench.compare import checked_methods, compare, equal_weights
        from lowmem_load.bench.worker import METHODS
        from lowmem_load.plots import check_picture
        from lowmem_load.settings.ds_config import read_ds_config

        if png is not None:
            check_picture(png)
        rows = compare(
            folder,
            read_ds_config(str(ds_config)) if ds_config is not None else DS_CONFIG,
            methods=checked_methods(method or [], list(METHODS)),
            ranks=ranks,
            repeats=repeats,
            is_cold=cold,
            on_gpu=gpu,
            auto_class=auto_class,
            told=lambda line: typer.echo(line, err=True),
        )
        if png is not None:
            from lowmem_load.bench.picture import draw

            draw(rows, png)
        is_equal = equal_weights(rows)
    if as_json:
        print_json({"rows": [asdict(row) for row in rows], "equal_weights": is_equal})
    else:
        said = "All ended with the same weights." if is_equal else "The weights differ; see the digests of --json."
        print_all([_table(folder, rows), said])
    if not is_equal:
        raise typer.Exit(NO)


def _table(folder: str, rows: list[Row]) -> RenderableType:
    cells = [
        (row.method, str(row.ranks), row.skipped, "", "", "")
        if row.skipped
        else (
            row.method,
            str(row.ranks),
            f"{row.seconds:.2f} s",
            size(row.peak_bytes),
            size(row.device_peak_bytes) if row.device_peak_bytes else "",
            "" if row.read_bytes is None else size(row.read_bytes),
        )
        for row in rows
    ]
    columns = ("method", "ranks", "slowest rank", "peak of host memory", "of device memory", "read by a rank")
    return table(folder, columns, cells, right=columns[2:])
