"""`lowmem-load plan`: what a job reads and needs, and whether it fits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowmem_load.cli import common
from lowmem_load.cli.common import NO, Json, Name, Revision, Subfolder, answer, facts, table, working
from lowmem_load.errors import UnsupportedError
from lowmem_load.planning.training_memory import OFFLOADS, Job, Need, Training
from lowmem_load.text import parse_size, size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowmem_load.api.forecast import Forecast
    from lowmem_load.hf.remote_names import Checkpoint

DsConfig = Annotated[
    Path | None, typer.Option(help="JSON file, for ZeRO-3; stage 3 in bf16 by default.", exists=True, dir_okay=False)
]
WorldSize = Annotated[int | None, typer.Option(min=1, help="Number of ranks of a ZeRO-3 job.")]
Fsdp = Annotated[int | None, typer.Option(min=1, help="Number of ranks that share a parameter under FSDP2.")]
Tp = Annotated[int, typer.Option(min=1, help="Ranks of tensor parallelism, with --fsdp.")]
Ep = Annotated[int, typer.Option(min=1, help="Ranks of expert parallelism, with --fsdp.")]
DpReplicate = Annotated[int, typer.Option(min=1, help="Number of replicas (HSDP), with --fsdp.")]
LoraRank = Annotated[
    int, typer.Option(min=0, help="Rank of LoRA adapters on every Linear layer. Default: full training.")
]
Trainable = Annotated[
    str | None, typer.Option(metavar="SHARE", help="Share of the parameters that is trained, e.g. 5%.")
]
FourBit = Annotated[bool, typer.Option("--four-bit", help="Quantize the base model to 4 bits (QLoRA).")]
Offload = Annotated[
    str | None, typer.Option(help="What to offload to the CPU: none, optimizer or all. Default: as in the ds_config.")
]
Tokens = Annotated[int, typer.Option(min=0, help="Tokens per rank and step; used to estimate activations.")]
GradientCheckpointing = Annotated[
    bool, typer.Option("--gradient-checkpointing", help="Use gradient checkpointing; with --tokens.")
]
Compare = Annotated[
    bool, typer.Option("--compare", help="Compare full training, LoRA, QLoRA and offload in one table.")
]
GpusPerNode = Annotated[int | None, typer.Option(min=1, help="Ranks on a node. Default: 8, or all if there are fewer.")]
HostMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Host memory per node, e.g. 512GiB. Default: no limit.")
]
DeviceMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory per GPU, e.g. 80GiB. Default: no limit.")
]
ReadRate = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Read rate per node, e.g. 2GB/s; used to estimate the time.")
]
AcceleratorName = Annotated[
    str | None, typer.Option("--accelerator", help="Accelerator of a ZeRO-3 job. Default: DS_ACCELERATOR, or cuda.")
]
Dequantize = Annotated[bool, typer.Option(help="Dequantize an fp8 or mxfp4 checkpoint.")]


def plan(
    name: Name,
    ds_config: DsConfig = None,
    world_size: WorldSize = None,
    fsdp: Fsdp = None,
    tp: Tp = 1,
    ep: Ep = 1,
    dp_replicate: DpReplicate = 1,
    lora_rank: LoraRank = 0,
    trainable: Trainable = None,
    four_bit: FourBit = False,
    offload: Offload = None,
    tokens: Tokens = 0,
    gradient_checkpointing: GradientCheckpointing = False,
    compare: Compare = False,
    gpus_per_node: GpusPerNode = None,
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    read_rate: ReadRate = None,
    accelerator: AcceleratorName = None,
    dequantize: Dequantize = False,
    subfolder: Subfolder = "",
    revision: Revision = None,
    auto_class: common.AutoClass = None,
    trust_remote_code: common.TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Show what a job reads and needs, and whether it fits.

    It covers loading and training, and compares with the default loader. It reads headers only, also on the Hub. Sizes
    need a unit: GB (10**9) or GiB (2**30). An option without effect is an error. Exits with 1 if the job does not fit.

    \b
    lowmem-load plan /models/Llama-3.1-70B --world-size 8 --device-memory 80GiB --host-memory 512GiB --compare
    lowmem-load plan /models/Llama-3.1-70B --world-size 8 --lora-rank 16 --four-bit --tokens 4096
    lowmem-load plan /models/Llama-3.1-70B --fsdp 64 --tp 8 --device-memory 80GiB
    """
    mesh = {"fsdp_size": fsdp, "tp_size": tp, "ep_size": ep, "dp_replicate_size": dp_replicate} if fsdp else {}
    num_ranks = fsdp * tp * dp_replicate if fsdp else world_size or 0
    device = accelerator or ("cuda" if fsdp else os.environ.get("DS_ACCELERATOR")) or "cuda"
    job = Job(
        num_ranks,
        gpus_per_node or min(8, num_ranks),
        host_bytes=_bytes(host_memory, "--host-memory"),
        device_bytes=_bytes(device_memory, "--device-memory"),
        read_rate=_bytes(read_rate, "--read-rate"),
        is_host=device.startswith("cpu"),
    )
    job = _offloaded(job, offload)
    training = Training(lora_rank, _share(trainable), four_bit, tokens, gradient_checkpointing)
    engine = Engine(mesh, str(ds_config) if ds_config else None, device)
    _check_ranks(engine, job, world_size, has_axes=max(tp, ep, dp_replicate) > 1)
    _check_training(engine, job, training, trainable, offload, is_compared=compare)
    keywords = dict[str, Any](subfolder=subfolder, auto_class=auto_class, trust_remote_code=trust_remote_code)
    with working(), _checkpoint(name, revision, dequantize, keywords) as (checkpoint, keywords):
        forecasts = _forecasts(checkpoint, engine, job, training, keywords, is_compared=compare)
    _answer(forecasts, as_json, is_compared=compare)


@dataclass(frozen=True, slots=True)
class Engine:
    """FSDP2 by the sizes of its mesh, or ZeRO-3 by a ds_config; on accelerators of this type."""

    mesh: Mapping[str, int]
    ds_config: str | None
    device: str


def _check_ranks(engine: Engine, job: Job, world_size: int | None, *, has_axes: bool) -> None:
    """Refuse options of the job that contradict each other, or would not be used."""
    fsdp = bool(engine.mesh)
    _refuse(
        {
            "name --world-size for ZeRO-3 (and --ds-config), or --fsdp for FSDP2": not job.world_size
            or (fsdp and engine.ds_config),
            "--tp, --ep and --dp-replicate go with --fsdp": has_axes and not fsdp,
            f"--world-size {world_size}: the mesh has {job.world_size} ranks": world_size not in (None, job.world_size),
            "--accelerator: FSDP2 is planned for GPUs; drop it": fsdp and engine.device != "cuda",
            "--device-memory: on CPUs all memory is host memory; drop it, or set --accelerator": job.is_host
            and job.device_bytes is not None,
        }
    )


def _check_training(
    engine: Engine, job: Job, training: Training, trainable: str | None, offload: str | None, *, is_compared: bool
) -> None:
    """Refuse options of the training that contradict each other, or would not be used."""
    fsdp, four_bit = bool(engine.mesh), training.is_four_bit
    is_unknown = job.host_bytes is None or (job.device_bytes is None and not job.is_host)
    _refuse(
        {
            "--four-bit: is sharded by FSDP2 alone; drop --tp and --ep": four_bit and not _is_fsdp_alone(engine),
            "--four-bit: only adapters can be trained on it; name --lora-rank": four_bit and not training.lora_rank,
            "--trainable: with --lora-rank the adapters are trained; drop one": trainable and training.lora_rank,
            "--compare: has rows for these; drop --trainable, --four-bit, --offload": is_compared
            and (trainable or four_bit or offload),
            "--compare: name --host-memory, and --device-memory for GPUs": is_compared and is_unknown,
            "--gradient-checkpointing: changes activations; name --tokens": training.is_checkpointed
            and not training.tokens,
            "--offload: FSDP2 offloads all or none": fsdp and offload == "optimizer",
        }
    )


@contextlib.contextmanager
def _checkpoint(
    name: str, revision: str | None, dequantize: bool, keywords: dict[str, Any]
) -> Iterator[tuple[Checkpoint, dict[str, Any]]]:
    """Inside, there are the checkpoint, and the keywords of `from_pretrained`."""
    common.check_revision(name, revision)
    os.environ["DS_ACCELERATOR"] = "cpu"  # of this process; the plan is for the job's
    from lowmem_load.cli.without_weights import with_headers
    from lowmem_load.hf.quantizers import dequantizing
    from lowmem_load.hf.remote_names import find_checkpoint

    with with_headers(
        find_checkpoint(name, subfolder=keywords["subfolder"], revision=revision), keywords
    ) as checkpoint:
        if dequantize:
            keywords["quantization_config"] = dequantizing(checkpoint.folder, keywords)
        yield checkpoint, keywords


def _forecasts(
    checkpoint: Checkpoint, engine: Engine, job: Job, training: Training, keywords: dict[str, Any], *, is_compared: bool
) -> list[Forecast]:
    """Return the forecast of the job, or those of each way to train and to offload."""
    from lowmem_load.api.forecast import COMPARED_RANK, compare, forecast, plan_mesh, plan_zero3
    from lowmem_load.api.model_sizes import config_of

    ways = [training]
    if is_compared:
        adapters = replace(training, lora_rank=training.lora_rank or COMPARED_RANK)
        ways = [replace(training, lora_rank=0), adapters, replace(adapters, is_four_bit=True)]
    problem = "it needs bitsandbytes (pip install 'lowmem-load[qlora]')" if find_spec("bitsandbytes") is None else ""
    if config_of(checkpoint, keywords) is None:
        problem = "diffusers itself quantizes its models"
    if any(way.is_four_bit for way in ways) and problem:
        message = f"QLoRA is not planned: {problem}"
        if not is_compared:
            raise UnsupportedError(message)
        typer.echo(message, err=True)
        ways = ways[:2]
    forecasts: list[Forecast] = []
    for way in ways if _is_fsdp_alone(engine) else ways[:2]:
        if engine.mesh:
            planned = plan_mesh(checkpoint, engine.mesh, job, way, **keywords)
        else:
            planned = plan_zero3(checkpoint, engine.ds_config, job, way, accelerator=engine.device, **keywords)
        forecasts += compare(planned, way) if is_compared else [forecast(planned, way)]
    return forecasts


def _is_fsdp_alone(engine: Engine) -> bool:
    """Return whether packed weights can be sharded so."""
    return all(engine.mesh.get(axis, 1) == 1 for axis in ("tp_size", "ep_size"))


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


def _offloaded(job: Job, word: str | None) -> Job:
    if word not in (None, *OFFLOADS):
        raise typer.BadParameter(f"--offload: expected none, optimizer or all, got {word!r}")
    optimizer, parameters = OFFLOADS[word or "none"]
    return replace(job, offload_optimizer=optimizer, offload_param=parameters)


def _answer(forecasts: Sequence[Forecast], as_json: bool, *, is_compared: bool) -> None:
    values = [{**asdict(row), "fits": row.fits} for row in forecasts]
    answer(as_json, values if is_compared else values[0], lambda: (_show_rows if is_compared else _show)(forecasts))
    if not any(row.fits for row in forecasts):
        raise typer.Exit(NO)


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
    smallest = "with these settings it fits on no number of ranks"
    if forecast.world_size is not None:
        smallest = f"with these settings it fits from {forecast.world_size} rank{'s' * (forecast.world_size > 1)}"
    if forecast.fits:
        return f"{fits}; {smallest}."
    offload = "no offload to the CPU makes it fit at this world size"
    if forecast.offloads is not None:
        optimizer, parameters = forecast.offloads
        offload = f"at this world size it fits with offload_optimizer {optimizer}, offload_param {parameters}"
    return f"{fits}; {smallest}; {offload}."
