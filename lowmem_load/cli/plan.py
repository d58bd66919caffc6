"""`lowmem-load plan`: what a job will need, before it is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowmem_load.cli import options
from lowmem_load.cli.output import NO, console, print_all, print_json, working
from lowmem_load.errors import ConfigError
from lowmem_load.quantities import count, duration, parse_size, size
from lowmem_load.tables import facts, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowmem_load.forecast.job import Forecast, Job
    from lowmem_load.forecast.load import RankNeeds

MAX_RANKS = 3
"""That are shown; --json has all."""

NOTHING = "0 B"
"""What a row of figures is left out for."""

BAR, BESIDE_BAR = 36, 28
"""Characters of the longest bar, at most, and of what stands beside it."""

DsConfig = Annotated[Path, typer.Option(help="JSON file.", exists=True, dir_okay=False, show_default=False)]
WorldSize = Annotated[int, typer.Option(min=1, help="Ranks of the job.", show_default=False)]
GpusPerNode = Annotated[int | None, typer.Option(min=1, help="Ranks on a node; by default 8, or all.")]
Rank = Annotated[
    list[int] | None, typer.Option(help="Plan this rank; repeatable. By default all up to 8 ranks, else three.")
]
HostMemory = Annotated[str | None, typer.Option(metavar="SIZE", help="Of a node, such as 512GiB: for the verdict.")]
DeviceMemory = Annotated[str | None, typer.Option(metavar="SIZE", help="Of a GPU, such as 80GiB: for the verdict.")]
ReadRate = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Bytes a second that a node reads, such as 2GB/s; measured if not given."),
]
Accelerator = Annotated[str, typer.Option(help="Of the job; cpu for one on the host.", envvar="DS_ACCELERATOR")]
Threads = Annotated[int, typer.Option(min=1, max=4, help="That read, of a rank: one for each core it has.")]
Compare = Annotated[str | None, typer.Option(metavar="stock", help="Show what stock ZeRO-3 would take, too.")]
Picture = Annotated[bool, typer.Option("--picture", help="Draw memory by phase.")]


def plan(
    name: options.Name,
    ds_config: DsConfig,
    world_size: WorldSize,
    gpus_per_node: GpusPerNode = None,
    rank: Rank = None,
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    read_rate: ReadRate = None,
    accelerator: Accelerator = "cuda",
    threads: Threads = 4,
    compare: Compare = None,
    picture: Picture = False,
    png: options.Png = None,
    dequantize: options.Dequantize = False,
    subfolder: options.Subfolder = "",
    revision: options.Revision = None,
    auto_class: options.AutoClass = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
) -> None:
    """Show what a job reads and needs, and whether it fits.

    Loading and training; reads headers only, also of models on the Hub.

    Sizes take GB (10**9) and GiB (2**30). Exits with 1 if the job does not fit.

    \b
    lowmem-load plan /models/Llama-3.1-70B --ds-config ds_z3.json --world-size 16 \\
        --device-memory 80GiB --host-memory 1TiB --read-rate 5GB/s
    lowmem-load plan deepseek-ai/DeepSeek-V3 --dequantize --ds-config ds_z3.json --world-size 512 --compare stock
    """
    if compare not in (None, "stock"):
        raise ConfigError(f"--compare: expected stock, got {compare!r}")
    ranks = _ranks(rank or (), world_size)
    os.environ["DS_ACCELERATOR"] = "cpu"  # this process needs none; the job's is in the plan
    with working():
        from lowmem_load.forecast.job import Job
        from lowmem_load.forecast.verdict import Limits

        job = Job(
            ds_config=str(ds_config),
            world_size=world_size,
            gpus_per_node=gpus_per_node or min(8, world_size),
            ranks=ranks,
            device=accelerator,
            num_threads=threads,
            limits=Limits(_bytes(host_memory, "--host-memory"), _bytes(device_memory, "--device-memory")),
            read_rate=None if read_rate is None else float(parse_size(read_rate, "--read-rate")),
            dequantize=dequantize,
            keywords={"subfolder": subfolder, "auto_class": auto_class, "trust_remote_code": trust_remote_code},
        )
        found = _forecast(name, subfolder, revision, job, png)
    if as_json:
        print_json({**asdict(found), "fits": found.verdict.fits})
    else:
        print_all(list(_parts(found, with_stock=compare is not None, with_bars=picture)))
    if not found.verdict.fits:
        raise typer.Exit(NO)


def _forecast(name: str, subfolder: str, revision: str | None, job: Job, png: Path | None) -> Forecast:
    from lowmem_load.forecast.job import forecast
    from lowmem_load.forecast.picture import draw
    from lowmem_load.plots import check_picture
    from lowmem_load.remote.checkpoint import open_checkpoint

    if png is not None:
        check_picture(png)
    with open_checkpoint(name, subfolder=subfolder, revision=revision) as checkpoint:
        found = forecast(checkpoint, job)
    if png is not None:
        draw(found, png)
    return found


def _ranks(given: Iterable[int], world_size: int) -> list[int]:
    ranks = sorted(set(given))
    if any(not 0 <= each < world_size for each in ranks):
        raise ConfigError(f"--rank: expected 0 <= rank < --world-size = {world_size}, got {ranks}")
    return ranks


def _bytes(given: str | None, option: str) -> int | None:
    return None if given is None else parse_size(given, option)


def _parts(found: Forecast, *, with_stock: bool, with_bars: bool) -> list[RenderableType]:
    largest = found.largest
    parts: list[RenderableType] = [facts(found.name, _head(found)), "", _ranks_table(found)]
    ways = [(way.reason, f"{way.num_parameters:,}", size(way.extra_bytes), way.example) for way in largest.slow_ways]
    if ways:
        columns = ("goes a slower way because", "parameters", "extra", "example")
        parts.append(table(f"Slower ways, rank {largest.rank}", columns, ways, right=columns[1:3]))
    parts += [_needs_table(found), facts("Training", _training(found)), ""]
    if with_stock:
        parts += [facts("Stock ZeRO-3 would take for the load, at least", _stock(found)), ""]
    if with_bars:
        parts.append(_bars(found))
    parts.append(_verdict(found))
    return parts


def _head(found: Forecast) -> dict[str, str]:
    seconds = found.seconds
    rate = "not known: give --read-rate"
    if found.read_rate is not None and found.read_seconds is not None:
        rate = f"{duration(found.read_seconds)} at {found.read_rate[0] / 1e9:.2f} GB/s of a node ({found.read_rate[1]})"
    setup = found.setup
    nodes = (
        f"{min(setup.gpus_per_node, setup.world_size)} on each of {setup.num_nodes} node{'s' * (setup.num_nodes > 1)}"
    )
    return {
        "checkpoint": f"{size(found.file_bytes)} in {found.num_files} files",
        "model": f"{count(found.model.num_elements)} parameters in {found.dtype}",
        "job": f"{setup.world_size} ranks, {nodes}",
        "offload": f"parameters: {setup.offload_param}, optimizer: {setup.offload_optimizer}",
        "reading takes": rate,
        "read together": _together(found),
        "planned in": f"{duration(seconds['all'])} (describing {duration(seconds['describe'])}, "
        f"planning a rank {duration(seconds['plan'])})",
    }


def _together(found: Forecast) -> str:
    of = found.together
    if of is None:
        return ""
    shared, alone = size(of.shared_block_bytes), size(of.alone_block_bytes)
    in_blocks = " in blocks of the file system" * (of.alone_block_bytes > of.alone_bytes)
    return f"{shared} by {of.num_ranks} ranks of a node, instead of {alone}{in_blocks}"


_FIGURES: tuple[tuple[str, Callable[[RankNeeds], str]], ...] = (
    ("partition", lambda each: size(each.partition_bytes)),
    ("whole on every rank", lambda each: size(each.whole_bytes)),
    ("peak of the host", lambda each: size(each.host_peak_bytes)),
    ("peak of the device", lambda each: size(each.device_peak_bytes)),
    ("written to nvme", lambda each: size(each.disk_bytes)),
    ("needed of the files", lambda each: size(each.needed_bytes)),
    ("read", lambda each: size(each.read_bytes)),
    ("reads", lambda each: f"{each.num_reads:,}"),
    ("smallest read", lambda each: size(min(each.read_sizes, default=0))),
    ("largest read", lambda each: size(max(each.read_sizes, default=0))),
    ("half is in reads of", lambda each: f">= {size(_half(each))}"),
)


def _ranks_table(found: Forecast) -> Any:
    largest = found.largest
    are_alike = len({(each.host_peak_bytes, each.device_peak_bytes, each.read_bytes) for each in found.ranks}) == 1
    shown = list(found.ranks[: 1 if are_alike else MAX_RANKS])
    if largest not in shown:
        shown[-1] = largest
    rows = [(label, *(value(each) for each in shown)) for label, value in _FIGURES]
    rows = [row for row in rows if set(row[1:]) != {NOTHING}]
    which = "all alike" if are_alike else f"rank {largest.rank} is the largest"
    title = f"The load, by rank: {len(found.ranks)} of {found.world_size} planned, {which}; peaks are above the start"
    columns = ("", "each rank") if are_alike else ("", *(f"rank {each.rank}" for each in shown))
    return table(title, columns, rows, right=columns[1:])


def _half(rank: RankNeeds) -> int:
    """Return the bytes of a read of which, and of larger ones, half of all that is read comes."""
    seen = 0
    for nbytes, number in sorted(rank.read_sizes.items(), reverse=True):
        seen += nbytes * number
        if 2 * seen >= rank.read_bytes:
            return nbytes
    return 0


def _bars(found: Forecast) -> str:
    """Return memory by phase as lines of bars, each as long as its share of the largest."""
    from lowmem_load.forecast.picture import memory_by_phase

    values = memory_by_phase(found)
    most = {whose: max(nbytes for _, owner, nbytes in values if owner == whose) for _, whose, _ in values}
    bar = max(1, min(BAR, console().width - BESIDE_BAR))
    lines = [
        f"{phase:<8}  {whose:<4}  {'#' * round(bar * nbytes / max(1, most[whose])):<{bar}}  {size(nbytes)}"
        for phase, whose, nbytes in values
    ]
    return "\n".join(["Memory by phase, of a node and of a GPU", *lines, ""])


def _needs_table(found: Forecast) -> Any:
    rows = [
        (
            need.what,
            size(need.needed_bytes),
            "" if need.available_bytes is None else size(need.available_bytes),
            "not compared" if need.available_bytes is None else "fits" if need.fits else "does not fit",
        )
        for need in found.verdict.needs
    ]
    title = f"Needs; a process holds {size(found.process_bytes)} of host memory before it loads"
    return table(title, ("what", "needed", "there is", ""), rows, right=("needed", "there is"))


def _training(found: Forecast) -> dict[str, str]:
    model, training = found.model, found.training
    named = f"{model.optimizer}, {model.state_bytes} bytes of state a parameter"
    return {
        "optimizer": named if model.optimizer else "none in the ds_config: taken for Adam's, 8 bytes a parameter",
        "DeepSpeed's estimate": f"{size(training.deepspeed_device_bytes)} of each GPU, "
        f"{size(training.deepspeed_host_bytes)} of each node (Adam, mixed precision)",
        "for this ds_config": f"{size(training.device_bytes)} of each GPU, {size(training.host_bytes)} of each node"
        + (f", {size(training.disk_bytes)} of nvme of each node" if training.disk_bytes else ""),
        "kept whole": f"{model.persistent_parameters} small parameters, {count(model.persistent_elements)} elements",
        "not counted": "activations, and what stage3_max_live_parameters lets be gathered",
    }


def _stock(found: Forecast) -> dict[str, str]:
    stock, largest = found.stock, found.largest
    return {
        "read by rank 0": f"{size(stock.read_bytes)}, alone (here each rank reads {size(largest.read_bytes)})",
        "host peak of rank 0": f"{size(stock.host_peak_bytes)}, of which {size(stock.read_bytes)} are mapped files "
        f"(here {size(largest.host_peak_bytes)})",
        "whole on every rank": f"{size(stock.whole_parameter_bytes)}, the largest parameter (here 0 B)",
        "in collectives": f"{size(stock.collective_bytes)} for each rank (here 0 B)",
    }


def _verdict(found: Forecast) -> str:
    verdict = found.verdict
    if all(need.available_bytes is None for need in verdict.needs):
        return "No verdict: give --device-memory and --host-memory."
    smallest = (
        f"the smallest world size that fits with these settings is {verdict.world_size}"
        if verdict.world_size is not None
        else "no world size fits with these settings"
    )
    if verdict.fits:
        return f"Fits; {smallest}."
    offload = "no offload to the CPU makes it fit at this world size"
    if verdict.offloads is not None:
        offload = "at this world size it fits with offload_optimizer {}, offload_param {}".format(*verdict.offloads)
    return f"Does not fit; {smallest}; {offload}."
