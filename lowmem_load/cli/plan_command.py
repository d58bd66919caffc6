"""`lowmem-load plan`: what a job will need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowmem_load.cli.common import (
    NO,
    AutoClass,
    Json,
    Name,
    Revision,
    Subfolder,
    TrustRemoteCode,
    answer,
    facts,
    table,
    working,
)
from lowmem_load.quantities import count, duration, parse_size, size

if TYPE_CHECKING:
    from lowmem_load.cli.job_forecast import Forecast

DsConfig = Annotated[
    Path | None, typer.Option(help="JSON file, for ZeRO-3.", exists=True, dir_okay=False, show_default=False)
]
WorldSize = Annotated[int | None, typer.Option(min=1, help="Ranks of the job, for ZeRO-3.", show_default=False)]
Fsdp = Annotated[int | None, typer.Option(min=1, help="For FSDP2: ranks that share a parameter.", show_default=False)]
Tp = Annotated[int, typer.Option(min=1, help="With --fsdp: ranks of tensor parallelism.")]
Ep = Annotated[int, typer.Option(min=1, help="With --fsdp: ranks of expert parallelism.")]
DpReplicate = Annotated[int, typer.Option(min=1, help="With --fsdp: replicas (HSDP).")]
GpusPerNode = Annotated[int | None, typer.Option(min=1, help="Ranks of a node; 8 by default, or all if fewer.")]
HostMemory = Annotated[str | None, typer.Option(metavar="SIZE", help="Host memory of a node, such as 512GiB.")]
DeviceMemory = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of a GPU, such as 80GiB.")]
ReadRate = Annotated[str | None, typer.Option(metavar="SIZE", help="Read rate of a node, such as 2GB/s.")]
Dequantize = Annotated[bool, typer.Option(help="Dequantize a checkpoint in fp8 or mxfp4.")]
Accelerator = Annotated[str, typer.Option(help="Accelerator of the job; cpu for host memory.", envvar="DS_ACCELERATOR")]


def plan(
    name: Name,
    ds_config: DsConfig = None,
    world_size: WorldSize = None,
    fsdp: Fsdp = None,
    tp: Tp = 1,
    ep: Ep = 1,
    dp_replicate: DpReplicate = 1,
    gpus_per_node: GpusPerNode = None,
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    read_rate: ReadRate = None,
    accelerator: Accelerator = "cuda",
    dequantize: Dequantize = False,
    subfolder: Subfolder = "",
    revision: Revision = None,
    auto_class: AutoClass = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Show what a job reads and needs, and whether it fits.

    Covers loading and training, and compares with stock ZeRO-3. Reads headers only, also of models on the Hub.

    Sizes are in GB (10**9) or GiB (2**30). Exits with 1 if the job does not fit.

    \b
    lowmem-load plan /models/Llama-3.1-70B --ds-config ds_z3.json --world-size 16 \\
        --device-memory 80GiB --host-memory 1TiB --read-rate 5GB/s
    lowmem-load plan deepseek-ai/DeepSeek-V3 --dequantize --ds-config ds_z3.json --world-size 512
    lowmem-load plan /models/Llama-3.1-70B --fsdp 64 --tp 8 --device-memory 80GiB
    """
    host_bytes, device_bytes = _bytes(host_memory, "--host-memory"), _bytes(device_memory, "--device-memory")
    bytes_per_s = _bytes(read_rate, "--read-rate")
    os.environ["DS_ACCELERATOR"] = "cpu"  # of this process; the plan is for the job's
    if fsdp is not None:
        sizes = {"fsdp_size": fsdp, "tp_size": tp, "ep_size": ep, "dp_replicate_size": dp_replicate}
        keywords = {"subfolder": subfolder, "auto_class": auto_class, "trust_remote_code": trust_remote_code}
        _plan_mesh(name, sizes, revision, device_bytes, as_json, {key: each for key, each in keywords.items() if each})
        return
    if ds_config is None or world_size is None:
        raise typer.BadParameter("name --ds-config and --world-size for ZeRO-3, or --fsdp for FSDP2")
    with working():
        from lowmem_load.cli.job_forecast import Limits, forecast
        from lowmem_load.io.hub_checkpoint import open_checkpoint

        with open_checkpoint(name, subfolder=subfolder, revision=revision) as checkpoint:
            found = forecast(
                checkpoint,
                str(ds_config),
                world_size=world_size,
                gpus_per_node=gpus_per_node or min(8, world_size),
                device=accelerator,
                limits=Limits(host_bytes, device_bytes),
                read_rate=bytes_per_s,
                dequantize=dequantize,
                subfolder=subfolder,
                auto_class=auto_class,
                trust_remote_code=trust_remote_code,
            )
    columns = ("a rank", "needed", "stock, at least", "there is", " ")
    rows = [*_load_rows(found), *_need_rows(found)]
    answer(
        as_json,
        {**asdict(found), "fits": found.verdict.fits},
        lambda: [facts(found.name, _head(found)), table("", columns, rows, right=columns[1:4]), _verdict(found)],
    )
    if not found.verdict.fits:
        raise typer.Exit(NO)


def _plan_mesh(
    name: str,
    sizes: dict[str, int],
    revision: str | None,
    device_bytes: int | None,
    as_json: bool,
    keywords: dict[str, Any],
) -> None:
    """Answer for FSDP2, tensor and expert parallelism."""
    with working():
        from lowmem_load.cli.mesh_forecast import forecast_mesh
        from lowmem_load.io.hub_checkpoint import open_checkpoint

        with open_checkpoint(name, subfolder=keywords.get("subfolder", ""), revision=revision) as checkpoint:
            found = forecast_mesh(checkpoint, sizes, device_bytes=device_bytes, **keywords)
    verdict = "It fits." if found.fits else "It does not fit."
    shape = ", ".join(f"{key} {each}" for key, each in found.sizes.items() if each > 1)
    rows = {
        "job": f"{found.world_size} ranks: {shape}",
        "checkpoint": size(found.file_bytes),
        "a rank holds": f"{size(found.shard_bytes)}, in fp32",
        "it reads": f"{size(found.read_bytes)} in {found.num_reads:,} reads, {size(found.needed_bytes)} of them needed",
        "load": f"{size(found.load_bytes)} at the peak",
        "training": f"{size(found.training_bytes)}: fp32 parameters, gradients, Adam; the largest parameter in bf16",
        "not counted": "activations, and layers that are gathered ahead",
        "verdict": "" if found.device_bytes is None else f"{verdict} A rank has {size(found.device_bytes)}.",
    }
    answer(as_json, {**asdict(found), "fits": found.fits}, lambda: [facts(found.name, rows)])
    if not found.fits:
        raise typer.Exit(NO)


def _bytes(given: str | None, option: str) -> int | None:
    return None if given is None else parse_size(given, option)


def _head(found: Forecast) -> dict[str, str]:
    setup, model, of = found.setup, found.model, found.together
    seconds = "; --read-rate gives the time" if found.read_seconds is None else f" in {duration(found.read_seconds)}"
    nodes = f"{setup.num_nodes} node{'s' * (setup.num_nodes > 1)}"
    optimizer = f"{model.optimizer}, {model.state_bytes} bytes of state a parameter"
    return {
        "checkpoint": f"{size(found.file_bytes)} in {found.num_files} files",
        "model": f"{count(model.num_elements)} parameters in {found.dtype}; "
        f"{count(model.persistent_elements)} of small tensors stay whole in training",
        "job": f"{setup.world_size} ranks, {setup.node_size} on each of {nodes}",
        "offload": f"parameters: {setup.offload_param}, optimizer: {setup.offload_optimizer}",
        "optimizer": optimizer if model.optimizer else "none in the ds_config: taken for Adam's, 8 bytes a parameter",
        "a node reads": size(found.node_bytes) + seconds,
        "read together": f"{size(of.shared_bytes)} by {of.num_ranks} ranks, instead of {size(of.alone_bytes)}"
        if of
        else "",
        "slower ways": "; ".join(
            f"{number:,} parameters {reason}, {size(extra_bytes)} extra"
            for reason, (number, extra_bytes) in found.rank.slow_ways.items()
        ),
        "not counted": "activations, and what stage3_max_live_parameters lets be gathered",
    }


def _load_rows(found: Forecast) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield what a rank reads and holds, beside what stock needs."""
    rank, stock = found.rank, found.stock
    figures = (
        ("partition", rank.partition_bytes, 0),
        ("whole on every rank", rank.whole_bytes, stock.whole_parameter_bytes),
        (f"read in {rank.num_reads:,} reads", rank.read_bytes, stock.read_bytes),
        ("through collectives", 0, stock.collective_bytes),
        ("peak of host memory", rank.host_peak_bytes, stock.host_peak_bytes),
        ("peak of device memory", rank.device_peak_bytes, 0),
    )
    for what, needed, of_stock in figures:
        if needed or of_stock:
            yield what, size(needed), size(of_stock) if of_stock else "", "", ""


def _need_rows(found: Forecast) -> Iterator[tuple[str, str, str, str, str]]:
    for need in found.verdict.needs:
        there = "" if need.available_bytes is None else size(need.available_bytes)
        judged = "not compared" if need.available_bytes is None else "fits" if need.fits else "does not fit"
        yield need.what, size(need.needed_bytes), "", there, judged
    if found.training.disk_bytes:
        yield "nvme of a node in training", size(found.training.disk_bytes), "", "", "not compared"


def _verdict(found: Forecast) -> str:
    verdict = found.verdict
    if all(need.available_bytes is None for need in verdict.needs):
        return "No verdict: give --device-memory and --host-memory."
    smallest = "no world size fits with these settings"
    if verdict.world_size is not None:
        smallest = f"the smallest world size that fits with these settings is {verdict.world_size}"
    if verdict.fits:
        return f"Fits; {smallest}."
    offload = "no offload to the CPU makes it fit at this world size"
    if verdict.offloads is not None:
        offload = "at this world size it fits with offload_optimizer {}, offload_param {}".format(*verdict.offloads)
    return f"Does not fit; {smallest}; {offload}."
