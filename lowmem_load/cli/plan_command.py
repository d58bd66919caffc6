"""`lowmem-load plan`: what a job will need."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowmem_load.cli import common
from lowmem_load.quantities import parse_size, size

if TYPE_CHECKING:
    from lowmem_load.cli.forecast import Forecast


def plan(
    name: common.Name,
    ds_config: Annotated[Path | None, typer.Option(help="JSON file, for ZeRO-3.", exists=True, dir_okay=False)] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Ranks of the job, for ZeRO-3.")] = None,
    fsdp: Annotated[int | None, typer.Option(min=1, help="For FSDP2: ranks that share a parameter.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="With --fsdp: ranks of tensor parallelism.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="With --fsdp: ranks of expert parallelism.")] = 1,
    dp_replicate: Annotated[int, typer.Option(min=1, help="With --fsdp: replicas (HSDP).")] = 1,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks of a node; at most 8 by default.")] = None,
    host_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Of a node, such as 512GiB.")] = None,
    device_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Of a GPU, such as 80GiB.")] = None,
    read_rate: Annotated[str | None, typer.Option(metavar="SIZE", help="Of a node, such as 2GB/s.")] = None,
    accelerator: Annotated[str, typer.Option(help="Of the job; cpu: host memory.", envvar="DS_ACCELERATOR")] = "cuda",
    dequantize: Annotated[bool, typer.Option(help="Dequantize a checkpoint in fp8 or mxfp4.")] = False,
    subfolder: common.Subfolder = "",
    revision: common.Revision = None,
    auto_class: common.AutoClass = None,
    trust_remote_code: common.TrustRemoteCode = False,
    as_json: common.Json = False,
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
    ranks = world_size if fsdp is None else fsdp * tp * dp_replicate
    if ranks is None or (fsdp is None and ds_config is None):
        raise typer.BadParameter("name --ds-config and --world-size for ZeRO-3, or --fsdp for FSDP2")
    limits = _bytes(host_memory, "--host-memory"), _bytes(device_memory, "--device-memory")
    rate = _bytes(read_rate, "--read-rate")
    options = {"subfolder": subfolder, "auto_class": auto_class, "trust_remote_code": trust_remote_code}
    keywords: dict[str, Any] = {key: each for key, each in options.items() if each}
    os.environ["DS_ACCELERATOR"] = "cpu"  # of this process; the plan is for the job's
    with common.working():
        from lowmem_load.cli.forecast import forecast_mesh, forecast_zero3
        from lowmem_load.cli.job_memory import Job
        from lowmem_load.io.hub_checkpoint import open_checkpoint

        job = Job(ranks, gpus_per_node or min(8, ranks), *limits, rate)
        with open_checkpoint(name, subfolder=subfolder, revision=revision) as checkpoint:
            if fsdp is None:
                keywords |= {"accelerator": accelerator, "dequantize": dequantize}
                found = forecast_zero3(checkpoint, str(ds_config), job, **keywords)
            else:
                sizes = {"fsdp_size": fsdp, "tp_size": tp, "ep_size": ep, "dp_replicate_size": dp_replicate}
                found = forecast_mesh(checkpoint, sizes, job, **keywords)
    common.answer(as_json, {**asdict(found), "fits": found.fits}, lambda: _tables(found))
    if not found.fits:
        raise typer.Exit(common.NO)


def _bytes(given: str | None, option: str) -> int | None:
    return None if given is None else parse_size(given, option)


def _tables(found: Forecast) -> list[Any]:
    columns, rows = ("a rank", "needed", "stock, at least", "there is", " "), []
    for need in found.needs:
        stock = size(need.stock_bytes) if need.stock_bytes else ""
        there = "" if need.available_bytes is None else size(need.available_bytes)
        judged = "" if need.available_bytes is None else "fits" if need.fits else "does not fit"
        rows.append((need.what, size(need.needed_bytes), stock, there, judged))
    table = common.table("", columns, rows, right=columns[1:4])
    return [common.facts(found.name, found.about), table, _verdict(found)]


def _verdict(found: Forecast) -> str:
    if all(need.available_bytes is None for need in found.needs):
        return "No verdict: give --device-memory and --host-memory."
    fits = "Fits" if found.fits else "Does not fit"
    if "offload" not in found.about:  # FSDP2
        return f"{fits}."
    smallest = "no world size fits with these settings"
    if found.world_size is not None:
        smallest = f"the smallest world size that fits with these settings is {found.world_size}"
    if found.fits:
        return f"{fits}; {smallest}."
    offload = "no offload to the CPU makes it fit at this world size"
    if found.offloads is not None:
        offload = "at this world size it fits with offload_optimizer {}, offload_param {}".format(*found.offloads)
    return f"{fits}; {smallest}; {offload}."
