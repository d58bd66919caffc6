"""`lowmem-load plan`: what a job reads and needs, and whether it fits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowmem_load.cli import common
from lowmem_load.cli.common import NO, Json, Name, Revision, Subfolder, answer, facts, table, working
from lowmem_load.text import parse_size, size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowmem_load.cli.forecast import Forecast


def plan(
    name: Name,
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
    accelerator: Annotated[
        str | None, typer.Option(help="Of the job, for ZeRO-3; DS_ACCELERATOR's or cuda by default.")
    ] = None,
    dequantize: Annotated[bool, typer.Option(help="Dequantize a checkpoint in fp8 or mxfp4.")] = False,
    subfolder: Subfolder = "",
    revision: Revision = None,
    auto_class: common.AutoClass = None,
    trust_remote_code: common.TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Show what a job reads and needs, and whether it fits.

    Covers loading and training, and compares with stock ZeRO-3. Reads headers only, also of models on the Hub.
    Sizes are in GB (10**9) or GiB (2**30). An option that would not be used is an error. Exits with 1 if the job does
    not fit.

    \b
    lowmem-load plan /models/Llama-3.1-70B --ds-config ds_z3.json --world-size 16 \\
        --device-memory 80GiB --host-memory 1TiB --read-rate 5GB/s
    lowmem-load plan deepseek-ai/DeepSeek-V3 --dequantize --ds-config ds_z3.json --world-size 512
    lowmem-load plan /models/Llama-3.1-70B --fsdp 64 --tp 8 --device-memory 80GiB
    """
    mesh = {"fsdp_size": fsdp or 0, "tp_size": tp, "ep_size": ep, "dp_replicate_size": dp_replicate}
    device = accelerator or ("cuda" if fsdp else os.environ.get("DS_ACCELERATOR")) or "cuda"
    num_ranks = _num_ranks(ds_config, world_size, **mesh)
    _refuse_unused(bool(fsdp), device, host_memory=host_memory, device_memory=device_memory)
    common.check_revision(name, revision)
    host_bytes, device_bytes = _parse_size(host_memory, "--host-memory"), _parse_size(device_memory, "--device-memory")
    rate = _parse_size(read_rate, "--read-rate")
    keywords: dict[str, Any] = dict(subfolder=subfolder, auto_class=auto_class, trust_remote_code=trust_remote_code)
    os.environ["DS_ACCELERATOR"] = "cpu"  # of this process; the plan is for the job's
    with working():
        from lowmem_load.cli.forecast import Job, forecast_mesh, forecast_zero3
        from lowmem_load.hf.quantizers import dequantizing
        from lowmem_load.hf.remote_names import find_checkpoint

        job = Job(num_ranks, gpus_per_node or min(8, num_ranks), host_bytes, device_bytes, rate)
        checkpoint = find_checkpoint(name, subfolder=subfolder, revision=revision)
        if dequantize:
            keywords["quantization_config"] = dequantizing(checkpoint.folder, keywords)
        if fsdp:
            forecast = forecast_mesh(checkpoint, mesh, job, **keywords)
        else:
            forecast = forecast_zero3(checkpoint, str(ds_config), job, accelerator=device, **keywords)
    answer(as_json, {**asdict(forecast), "fits": forecast.fits}, lambda: _show(forecast))
    if not forecast.fits:
        raise typer.Exit(NO)


def _num_ranks(
    ds_config: Path | None,
    world_size: int | None,
    *,
    fsdp_size: int,
    tp_size: int,
    ep_size: int,
    dp_replicate_size: int,
) -> int:
    """Return the ranks of a job; raise BadParameter unless it is one of ZeRO-3, or one of FSDP2."""
    if bool(fsdp_size) == bool(ds_config) or not (fsdp_size or world_size):
        raise typer.BadParameter("name --ds-config and --world-size for ZeRO-3, or --fsdp for FSDP2")
    if not fsdp_size:
        if max(tp_size, ep_size, dp_replicate_size) > 1:
            raise typer.BadParameter("--tp, --ep and --dp-replicate go with --fsdp")
        return world_size or 0
    num_ranks = fsdp_size * tp_size * dp_replicate_size
    if world_size not in (None, num_ranks):
        raise typer.BadParameter(f"--world-size {world_size}: the mesh has {num_ranks} ranks")
    return num_ranks


def _refuse_unused(is_fsdp: bool, device: str, *, host_memory: str | None, device_memory: str | None) -> None:
    """Raise BadParameter for an option that would not be used: its user expects an answer that goes by it."""
    if is_fsdp and host_memory:
        raise typer.BadParameter("--host-memory: what FSDP2 needs of it is not estimated; drop it")
    if is_fsdp and device != "cuda":
        raise typer.BadParameter("--accelerator: FSDP2 is planned for GPUs; drop it")
    if not is_fsdp and device.startswith("cpu") and device_memory:
        raise typer.BadParameter("--device-memory: on CPUs all memory is host memory; drop it, or set --accelerator")


def _parse_size(text: str | None, option: str) -> int | None:
    return None if text is None else parse_size(text, option)


def _show(forecast: Forecast) -> Sequence[RenderableType]:
    columns = ("a rank", "needed", "stock, at least", "there is", " ")
    rows = []
    for need in forecast.needs:
        stock = size(need.stock_bytes) if need.stock_bytes else ""
        available, fits = "", ""
        if need.available_bytes is not None:
            available, fits = size(need.available_bytes), "fits" if need.fits else "does not fit"
        rows.append((need.what, size(need.needed_bytes), stock, available, fits))
    return [facts(forecast.name, forecast.about), table("", columns, rows, right=columns[1:4]), _verdict(forecast)]


def _verdict(forecast: Forecast) -> str:
    memory = {"--device-memory": "device memory of", "--host-memory": "host memory of"}
    needs = {option: [need for need in forecast.needs if need.what.startswith(what)] for option, what in memory.items()}
    unknown = [option for option in memory if any(need.available_bytes is None for need in needs[option])]
    if len(unknown) == sum(map(bool, needs.values())):
        return f"No verdict: give {' and '.join(unknown)}."
    fits = "Fits" if forecast.fits else "Does not fit"
    if unknown and forecast.fits:
        fits = f"Fits what is known ({unknown[0]} is not given)"
    if "offload" not in forecast.about:  # FSDP2
        return f"{fits}."
    smallest = "no world size fits with these settings"
    if forecast.world_size is not None:
        smallest = f"the smallest world size that fits with these settings is {forecast.world_size}"
    if forecast.fits:
        return f"{fits}; {smallest}."
    offload = "no offload to the CPU makes it fit at this world size"
    if forecast.offloads is not None:
        optimizer, parameters = forecast.offloads
        offload = f"at this world size it fits with offload_optimizer {optimizer}, offload_param {parameters}"
    return f"{fits}; {smallest}; {offload}."
