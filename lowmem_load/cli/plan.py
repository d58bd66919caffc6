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

    from lowmem_load.cli.forecast import Forecast, Row, Training
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
    num_ranks = _num_ranks(ds_config, world_size, **mesh)
    common.check_revision(name, revision)
    memory = {"--host-memory": host_memory, "--device-memory": device_memory}
    host_bytes, device_bytes, rate = (
        None if text is None else parse_size(text, option)
        for option, text in {**memory, "--read-rate": read_rate}.items()
    )
    on_cpus = device.startswith("cpu")
    is_unknown = host_bytes is None or (device_bytes is None and not on_cpus)
    _refuse(
        {
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
        from lowmem_load.cli import forecast as needs
        from lowmem_load.cli.training_memory import OFFLOADS, Job
        from lowmem_load.hf.quantizers import dequantizing
        from lowmem_load.hf.remote_names import find_checkpoint

        keywords: dict[str, Any] = dict(subfolder=subfolder, auto_class=auto_class, trust_remote_code=trust_remote_code)
        job = Job(num_ranks, gpus_per_node or min(8, num_ranks), host_bytes, device_bytes, rate)
        checkpoint = find_checkpoint(name, subfolder=subfolder, revision=revision)
        if dequantize:
            keywords["quantization_config"] = dequantizing(checkpoint.folder, keywords)
        training = needs.Training(lora_rank, _share(trainable), four_bit, tokens, gradient_checkpointing)
        if offload is not None:
            job = replace(job, offload_optimizer=OFFLOADS[offload][0], offload_param=OFFLOADS[offload][1])

        def planned(way: Training) -> needs.Planned:
            if fsdp:
                return needs.plan_mesh(checkpoint, mesh, job, way, **keywords)
            path = None if ds_config is None else str(ds_config)
            return needs.plan_zero3(checkpoint, path, job, way, accelerator=device, **keywords)

        if compare:
            rank = lora_rank or needs.COMPARED_RANK
            ways = [replace(training, lora_rank=0), replace(training, lora_rank=rank)]
            ways += [] if fsdp else [replace(training, lora_rank=rank, is_four_bit=True)]
            plans = [(planned(way), way) for way in ways]
            rows = [row for plan, way in plans for row in needs.compare(plan, way)]
            about = needs.forecast(*plans[0]).about
        else:
            found = needs.forecast(planned(training), training)
    if compare:
        answer(as_json, [{**asdict(row), "fits": row.fits} for row in rows], lambda: _show_rows(name, about, rows))
        fit = any(row.fits for row in rows)
    else:
        answer(as_json, {**asdict(found), "fits": found.fits}, lambda: _show(found))
        fit = found.fits
    if not fit:
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
    if (fsdp_size and ds_config) or not (fsdp_size or world_size):
        raise typer.BadParameter("name --world-size for ZeRO-3 (and --ds-config), or --fsdp for FSDP2")
    if not fsdp_size:
        if max(tp_size, ep_size, dp_replicate_size) > 1:
            raise typer.BadParameter("--tp, --ep and --dp-replicate go with --fsdp")
        return world_size or 0
    num_ranks = fsdp_size * tp_size * dp_replicate_size
    if world_size not in (None, num_ranks):
        raise typer.BadParameter(f"--world-size {world_size}: the mesh has {num_ranks} ranks")
    return num_ranks


def _refuse(problems: Mapping[str, object]) -> None:
    """Raise BadParameter for an option that would not be used: its user expects an answer that goes by it."""
    for problem, is_there in problems.items():
        if is_there:
            raise typer.BadParameter(problem)


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


def _show(forecast: Forecast) -> Sequence[RenderableType]:
    columns = ("a rank", "needed", "stock, at least", "available", "verdict")
    rows = []
    for need in forecast.needs:
        stock = size(need.stock_bytes) if need.stock_bytes else ""
        available, fits = "", ""
        if need.available_bytes is not None:
            available, fits = size(need.available_bytes), "fits" if need.fits else "does not fit"
        rows.append((need.what, size(need.needed_bytes), stock, available, fits))
    return [facts(forecast.name, forecast.about), table("", columns, rows, right=columns[1:4]), _verdict(forecast)]


def _show_rows(name: str, about: Mapping[str, str], rows: Sequence[Row]) -> Sequence[RenderableType]:
    kept = {topic: text for topic, text in about.items() if topic not in ("planned for", "optimizer", "offload")}
    kept = {"planned for": about["planned for"].partition("full training ")[2], **kept}
    columns = ("method", "offload", "GPU load", "GPU train", "node's host", "fits from", "verdict")
    lines = []
    for row in rows:
        smallest = "never" if row.world_size is None else f"{row.world_size} rank{'s' * (row.world_size > 1)}"
        lines.append((row.training, row.offload, *_peaks(row.needs), smallest, _margin(row.needs)))
    return [facts(name, kept), table("", columns, lines, right=columns[2:6])]


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
    memory = {"--device-memory": "device memory of", "--host-memory": "host memory of"}
    needs = {option: [need for need in forecast.needs if need.what.startswith(what)] for option, what in memory.items()}
    unknown = [option for option in memory if any(need.available_bytes is None for need in needs[option])]
    if len(unknown) == sum(map(bool, needs.values())):
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
