"""`lowmem-load plan`: what a job reads and needs, and whether it fits."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowmem_load.cli import common
from lowmem_load.cli.common import NO, Json, Name, Revision, Subfolder, answer, facts, table, working
from lowmem_load.text import parse_size, size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowmem_load.cli.forecast import Forecast
    from lowmem_load.cli.training_memory import Need


def plan(
    name: Name,
    ds_config: Annotated[
        Path | None,
        typer.Option(help="JSON file, for ZeRO-3; stage 3 in bf16 by default.", exists=True, dir_okay=False),
    ] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Ranks of the job, for ZeRO-3.")] = None,
    fsdp: Annotated[int | None, typer.Option(min=1, help="For FSDP2: ranks that share a parameter.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="With --fsdp: ranks of tensor parallelism.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="With --fsdp: ranks of expert parallelism.")] = 1,
    dp_replicate: Annotated[int, typer.Option(min=1, help="With --fsdp: replicas (HSDP).")] = 1,
    lora_rank: Annotated[int, typer.Option(min=0, help="Train adapters of this rank on every Linear, as PEFT.")] = 0,
    trainable: Annotated[str | None, typer.Option(metavar="SHARE", help="Share that is trained: 5%.")] = None,
    four_bit: Annotated[bool, typer.Option("--four-bit", help="Quantize the base to 4 bits (QLoRA).")] = False,
    offload: Annotated[
        str | None, typer.Option(help="To the CPU: none, optimizer or all; the ds_config's by default.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Of a rank in a step, to estimate activations.")] = 0,
    gradient_checkpointing: Annotated[bool, typer.Option("--gradient-checkpointing", help="With --tokens.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Full training, LoRA, QLoRA and offload in a table.")
    ] = False,
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

    Covers loading and training, and compares with stock. Reads headers only, also of models on the Hub. Sizes are in
    GB (10**9) or GiB (2**30). An option that would not be used is an error. Exits with 1 if the job does not fit.

    \b
    lowmem-load plan /models/Llama-3.1-70B --world-size 8 --device-memory 80GiB --host-memory 512GiB --compare
    lowmem-load plan /models/Llama-3.1-70B --ds-config ds_z3.json --world-size 16 \\
        --device-memory 80GiB --host-memory 1TiB --read-rate 5GB/s
    lowmem-load plan /models/Llama-3.1-70B --world-size 8 --lora-rank 16 --four-bit --tokens 4096
    lowmem-load plan /models/Llama-3.1-70B --fsdp 64 --tp 8 --device-memory 80GiB
    """
    mesh = {"fsdp_size": fsdp or 0, "tp_size": tp, "ep_size": ep, "dp_replicate_size": dp_replicate}
    device = accelerator or ("cuda" if fsdp else os.environ.get("DS_ACCELERATOR")) or "cuda"
    num_ranks = fsdp * tp * dp_replicate if fsdp else world_size or 0
    common.check_revision(name, revision)
    on_cpus = device.startswith("cpu")
    is_unknown = host_memory is None or (device_memory is None and not on_cpus)
    # The user of an option that is not used would expect an answer that goes by it.
    _refuse(
        {
            "name --world-size for ZeRO-3 (and --ds-config), or --fsdp for FSDP2": not num_ranks
            or (fsdp and ds_config),
            "--tp, --ep and --dp-replicate go with --fsdp": not fsdp and max(tp, ep, dp_replicate) > 1,
            f"--world-size {world_size}: the mesh has {num_ranks} ranks": world_size not in (None, num_ranks),
            "--accelerator: FSDP2 is planned for GPUs; drop it": fsdp and device != "cuda",
            "--device-memory: on CPUs all memory is host memory; drop it, or set --accelerator": device_memory
            and on_cpus,
            "--four-bit: FSDP2 leaves quantized weights to transformers; drop it": fsdp and four_bit,
            "--four-bit: only adapters can be trained on it; name --lora-rank": four_bit and not lora_rank,
            "--trainable: with --lora-rank the adapters are trained; drop one": trainable and lora_rank,
            "--compare: has rows for these; drop --trainable, --four-bit, --offload": compare
            and (trainable or four_bit or offload),
            "--compare: name --host-memory, and --device-memory for GPUs": compare and is_unknown,
            "--gradient-checkpointing: changes activations; name --tokens": gradient_checkpointing and not tokens,
            "--offload: expected none, optimizer or all": offload not in (None, "none", "optimizer", "all"),
            "--offload: FSDP2 offloads all or none": fsdp and offload == "optimizer",
        }
    )
    os.environ["DS_ACCELERATOR"] = "cpu"  # of this process; the plan is for the job's
    with working():
        from lowmem_load.cli.forecast import COMPARED_RANK, forecast, plan_mesh, plan_zero3
        from lowmem_load.cli.forecast import compare as compared
        from lowmem_load.cli.training_memory import OFFLOADS, Job, Training
        from lowmem_load.hf.quantizers import dequantizing
        from lowmem_load.hf.remote_names import find_checkpoint

        keywords: dict[str, Any] = dict(subfolder=subfolder, auto_class=auto_class, trust_remote_code=trust_remote_code)
        job = Job(
            num_ranks,
            gpus_per_node or min(8, num_ranks),
            host_bytes=_bytes(host_memory, "--host-memory"),
            device_bytes=_bytes(device_memory, "--device-memory"),
            read_rate=_bytes(read_rate, "--read-rate"),
        )
        checkpoint = find_checkpoint(name, subfolder=subfolder, revision=revision)
        if dequantize:
            keywords["quantization_config"] = dequantizing(checkpoint.folder, keywords)
        if offload is not None:
            job = replace(job, offload_optimizer=OFFLOADS[offload][0], offload_param=OFFLOADS[offload][1])
        training = Training(lora_rank, _share(trainable), four_bit, tokens, gradient_checkpointing)
        ways = [training]
        if compare:
            adapters = replace(training, lora_rank=lora_rank or COMPARED_RANK)
            ways = [replace(training, lora_rank=0), adapters, replace(adapters, is_four_bit=True)]
        forecasts: list[Forecast] = []
        for way in ways[:2] if fsdp else ways:
            if fsdp:
                planned = plan_mesh(checkpoint, mesh, job, way, **keywords)
            else:
                planned = plan_zero3(checkpoint, ds_config and str(ds_config), job, way, accelerator=device, **keywords)
            forecasts += compared(planned, way) if compare else [forecast(planned, way)]
    values = [{**asdict(row), "fits": row.fits} for row in forecasts]
    answer(as_json, values if compare else values[0], lambda: (_show_rows if compare else _show)(forecasts))
    if not any(row.fits for row in forecasts):
        raise typer.Exit(NO)


def _refuse(problems: Mapping[str, object]) -> None:
    """Raise BadParameter for the first problem that is there."""
    for problem, is_there in problems.items():
        if is_there:
            raise typer.BadParameter(problem)


def _bytes(text: str | None, option: str) -> int | None:
    return None if text is None else parse_size(text, option)


def _share(text: str | None) -> float:
    """Return a share such as "5%" or "0.05" as a number."""
    if text is None:
        return 1.0
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise typer.BadParameter(f"--trainable: expected a share such as 5% or 0.05, got {text!r}")
    return share


def _show(forecasts: Sequence[Forecast]) -> Sequence[RenderableType]:
    (forecast,) = forecasts
    columns = ("a rank", "needed", "stock, at least", "available", "verdict")
    rows = []
    for need in forecast.needs:
        stock = size(need.stock_bytes) if need.stock_bytes else ""
        available, fits = "", ""
        if need.available_bytes is not None:
            available, fits = size(need.available_bytes), "fits" if need.fits else "does not fit"
        rows.append((need.what, size(need.needed_bytes), stock, available, fits))
    return [facts(forecast.name, forecast.about), table("", columns, rows, right=columns[1:4]), _verdict(forecast)]


def _show_rows(forecasts: Sequence[Forecast]) -> Sequence[RenderableType]:
    about = {topic: text for topic, text in forecasts[0].about.items() if topic not in ("optimizer", "offload")}
    about["planned for"] = about["planned for"].removeprefix("full training ")
    columns = ("method", "offload", "GPU load", "GPU train", "node's host", "fits from", "verdict")
    lines = []
    for row in forecasts:
        smallest = "never" if row.world_size is None else f"{row.world_size} rank{'s' * (row.world_size > 1)}"
        lines.append((row.training, row.offload, *_peaks(row.needs), smallest, _margin(row.needs)))
    return [facts(forecasts[0].name, about), table("", columns, lines, right=columns[2:6])]


def _peaks(needs: Sequence[Need]) -> tuple[str, str, str]:
    """Return what a GPU needs while loading and in training, and the most that a node's host needs."""
    nbytes = {need.what: need.needed_bytes for need in needs}
    loading, training = (nbytes.get(f"device memory of a GPU {when}") for when in ("while loading", "in training"))
    host = max(nbytes[what] for what in nbytes if what.startswith("host memory"))
    return "" if loading is None else size(loading), "" if training is None else size(training), size(host)


def _margin(needs: Sequence[Need]) -> str:
    """Return by how much a job fits, or does not, where that is tightest."""
    spare = [(need.available_bytes - need.needed_bytes, need) for need in needs if need.available_bytes is not None]
    margin, need = min(spare, key=lambda pair: pair[0])
    where = "GPU" if need.what.startswith("device") else "host"
    return f"fits, {where} {size(margin)} free" if margin >= 0 else f"{where} lacks {size(-margin)}"


def _verdict(forecast: Forecast) -> str:
    limits = {"device": "--device-memory", "host": "--host-memory"}
    memory = {need.what.partition(" memory of a ")[0]: need for need in forecast.needs if " memory of a " in need.what}
    unknown = [option for kind, option in limits.items() if kind in memory and memory[kind].available_bytes is None]
    if len(unknown) == len(memory):
        return f"No verdict: name {' and '.join(unknown)}."
    fits = "Fits" if forecast.fits else "Does not fit"
    if unknown and forecast.fits:
        fits = f"Fits what is known ({unknown[0]} is not named)"
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
