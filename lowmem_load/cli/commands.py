"""`lowmem-load inspect`, `plan`, `verify`, `consolidate` and `report`: questions that files answer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowmem_load.cli import common
from lowmem_load.cli.common import NO, Json, Name, Revision, Subfolder, answer, facts, table, working
from lowmem_load.errors import ConfigError, listed
from lowmem_load.text import count, parse_size, size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowmem_load.cli.checkpoint_contents import Inspection
    from lowmem_load.cli.forecast import Forecast
    from lowmem_load.report import Joined, Rank

DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

MAX_RANKS = 8
"""Ranks in the table of a report. --json has all."""


def inspect(
    name: Name,
    subfolder: Subfolder = "",
    revision: Revision = None,
    auto_class: common.AutoClass = None,
    trust_remote_code: common.TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds and what loading does to it.

    Reads headers only, also of models on the Hub. --json lists all files and stored tensors.

    \b
    lowmem-load inspect /models/Llama-3.1-8B
    lowmem-load inspect deepseek-ai/DeepSeek-V3 --json
    """
    with working():
        from lowmem_load.cli.checkpoint_contents import inspect_checkpoint
        from lowmem_load.hf.remote_names import located_checkpoint

        common.check_revision(name, revision)
        checkpoint = located_checkpoint(name, subfolder=subfolder, revision=revision)
        found = inspect_checkpoint(checkpoint, auto_class, subfolder=subfolder, trust_remote_code=trust_remote_code)
    rows = [(each.kind, f"{each.num_parameters:,}", size(each.nbytes), each.example) for each in found.conversions]
    columns = ("done on load", "parameters", "size", "example")
    answer(
        as_json,
        {**asdict(found), "by_dtype": found.by_dtype},
        lambda: [
            facts(found.name, _contents(found)),
            *([table("", columns, rows, right=columns[1:3])] if rows else []),
        ],
    )


def _contents(found: Inspection) -> dict[str, str]:
    stored = ", ".join(f"{dtype}: {number:,} of {size(nbytes)}" for dtype, (number, nbytes) in found.by_dtype.items())
    return {
        "commit": found.revision or "",
        "architecture": ", ".join(found.architectures) + (f" ({found.model_type})" if found.model_type else ""),
        "parameters": count(found.num_elements) if found.num_elements else "",
        "dtype of the config": found.dtype,
        "quantization": found.quantization or "none",
        "adapter of": found.base_of_adapter or "",
        "stored": f"{size(sum(found.files.values()))} in {len(found.files)} files; tensors: {stored}",
        "tied": listed([" = ".join(names) for names in found.tied], 3),
        "missing": listed(found.missing_keys, 3),
        "unexpected": listed(found.unexpected_keys, 3),
        "of other shape": listed(found.mismatched_keys, 3),
        "not described": found.not_described or "",
    }


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
    ranks = world_size if fsdp is None else fsdp * tp * dp_replicate
    if ranks is None or (fsdp is None) is (ds_config is None):
        raise typer.BadParameter("name --ds-config and --world-size for ZeRO-3, or --fsdp for FSDP2")
    if fsdp is None and max(tp, ep, dp_replicate) > 1:
        raise typer.BadParameter("--tp, --ep and --dp-replicate go with --fsdp")
    if world_size not in (None, ranks):
        raise typer.BadParameter(f"--world-size {world_size}: the mesh has {ranks} ranks")
    device = accelerator or os.environ.get("DS_ACCELERATOR") or "cuda"
    unused = {
        "--host-memory: what FSDP2 needs of it is not estimated; drop it": fsdp and host_memory,
        "--accelerator: FSDP2 is planned for GPUs; drop it": fsdp and accelerator not in (None, "cuda"),
        "--device-memory: on CPUs all memory is host memory; drop it, or give --accelerator cuda": (
            not fsdp and device.startswith("cpu") and device_memory
        ),
    }
    for problem, is_wrong in unused.items():
        if is_wrong:
            raise typer.BadParameter(problem)
    common.check_revision(name, revision)
    limits = _bytes(host_memory, "--host-memory"), _bytes(device_memory, "--device-memory")
    rate = _bytes(read_rate, "--read-rate")
    keywords: dict[str, Any] = dict(subfolder=subfolder, auto_class=auto_class, trust_remote_code=trust_remote_code)
    os.environ["DS_ACCELERATOR"] = "cpu"  # of this process; the plan is for the job's
    with working():
        from lowmem_load.cli.forecast import forecast_mesh, forecast_zero3
        from lowmem_load.cli.job_memory import Job
        from lowmem_load.hf.quantizers import dequantizing
        from lowmem_load.hf.remote_names import located_checkpoint

        job = Job(ranks, gpus_per_node or min(8, ranks), *limits, rate)
        checkpoint = located_checkpoint(name, subfolder=subfolder, revision=revision)
        if dequantize:
            keywords["quantization_config"] = dequantizing(checkpoint.folder, keywords)
        if fsdp is None:
            found = forecast_zero3(checkpoint, str(ds_config), job, accelerator=device, **keywords)
        else:
            sizes = {"fsdp_size": fsdp, "tp_size": tp, "ep_size": ep, "dp_replicate_size": dp_replicate}
            found = forecast_mesh(checkpoint, sizes, job, **keywords)
    answer(as_json, {**asdict(found), "fits": found.fits}, lambda: _tables(found))
    if not found.fits:
        raise typer.Exit(NO)


def _bytes(given: str | None, option: str) -> int | None:
    return None if given is None else parse_size(given, option)


def _tables(found: Forecast) -> list[Any]:
    columns, rows = ("a rank", "needed", "stock, at least", "there is", " "), []
    for need in found.needs:
        stock = size(need.stock_bytes) if need.stock_bytes else ""
        there = "" if need.available_bytes is None else size(need.available_bytes)
        judged = "" if need.available_bytes is None else "fits" if need.fits else "does not fit"
        rows.append((need.what, size(need.needed_bytes), stock, there, judged))
    return [facts(found.name, found.about), table("", columns, rows, right=columns[1:4]), _verdict(found)]


def _verdict(found: Forecast) -> str:
    memory = {"--device-memory": "device memory of", "--host-memory": "host memory of"}
    limits = {
        option: [need.available_bytes for need in found.needs if need.what.startswith(what)]
        for option, what in memory.items()
    }
    unknown = [option for option, known in limits.items() if None in known]
    if len(unknown) == sum(map(bool, limits.values())):
        return f"No verdict: give {' and '.join(unknown)}."
    fits = "Fits" if found.fits else "Does not fit"
    if unknown and found.fits:
        fits = f"Fits what is known ({unknown[0]} is not given)"
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


def verify(
    name: Name,
    subfolder: Subfolder = "",
    revision: Revision = None,
    stream: Annotated[bool, typer.Option(help="Hash the files on the Hub, if they are not in its cache.")] = False,
    as_json: Json = False,
) -> None:
    """Compare the files of a checkpoint with their checksums.

    Files at a URL (s3://, https://, ...) are fetched to be hashed; nothing is kept.

    Checksums come from the Hub's download records and from SHA256SUMS or *.sha256 beside the files. Exits with 1 if a
    weight file has no known checksum, and with 3 if one differs.

    \b
    lowmem-load verify /models/Llama-3.1-8B
    lowmem-load verify meta-llama/Llama-3.1-8B      (the copy in the Hub's cache)
    lowmem-load verify s3://bucket/models/Llama-3.1-8B
    """
    with working():
        from lowmem_load.io.stand_ins import origin_of
        from lowmem_load.pipeline.verify_checkpoint import verify_checkpoint

        common.check_revision(name, revision)
        checks = verify_checkpoint(name, subfolder=subfolder, revision=revision, stream=stream)
    rows = []
    for check in checks:
        name_of_file, result = check.path.rpartition("/")[2], "as expected" if check.is_proven else "not known"
        rows.append((name_of_file, size(check.nbytes), check.algorithm, check.found[:16], result, check.origin or ""))
    columns = ("file", "size", "algorithm", "digest", "result", "known from")
    answer(
        as_json,
        [{**asdict(check), "is_proven": check.is_proven} for check in checks],
        lambda: [table(origin_of(name), columns, rows, right=("size",))],
    )
    if not all(check.is_proven for check in checks):
        raise typer.Exit(NO)


def consolidate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder that save_checkpoint wrote to.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="Folder to create.", show_default=False)],
    tag: Annotated[str | None, typer.Option(help="Tag of the checkpoint; from its file `latest` by default.")] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the weights: fp32, bf16, fp16 or fp64.")] = "fp32",
    max_shard_size: Annotated[str, typer.Option(help="Largest size of a file.")] = "5GB",
    config: Annotated[
        str | None, typer.Option(help="Folder or Hub id of the model; the checkpoint's own config.json by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a Hugging Face folder of a ZeRO checkpoint.

    Reads what DeepSpeed's save_checkpoint wrote. Needs no GPU and no ranks.

    \b
    lowmem-load consolidate out/checkpoint-500 out/model --dtype bf16 --config meta-llama/Llama-3.1-8B
    """
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    with working():
        import torch

        from lowmem_load.resume.consolidate import consolidate as make

        report = make(
            *(checkpoint, output),
            tag=tag,
            dtype=getattr(torch, DTYPES[dtype]),
            max_shard_size=max_shard_size,
            config=config,
        )
    answer(as_json, asdict(report), lambda: [str(report)])


def report(
    files: Annotated[
        list[Path], typer.Argument(help="Reports of ranks, or folders of reports.", exists=True, show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Join the reports of ranks into one table.

    It shows which rank was slow, and in which phase. Every rank writes one file for each load if LOWMEM_LOAD_REPORT_DIR
    names a folder.

    \b
    LOWMEM_LOAD_REPORT_DIR=reports torchrun --nproc-per-node 8 train.py
    lowmem-load report reports
    """
    with working():
        from lowmem_load.report import join, read_reports

        loads = join(read_reports(files))
    answer(as_json, [asdict(load) for load in loads], lambda: list(map(_load_table, loads)))


def _load_table(load: Joined) -> RenderableType:
    phases = list(dict.fromkeys(phase for rank in load.ranks for phase in rank.seconds))

    def numbers(rank: Rank) -> list[float]:
        seconds = [rank.seconds.get(phase, 0.0) for phase in phases]
        return [*seconds, rank.read_bytes, rank.num_reads, rank.peak_bytes]

    def cells(figures: Sequence[float]) -> list[str]:
        *seconds, read_bytes, num_reads, peak_bytes = figures
        return [*(f"{each:.2f} s" for each in seconds), size(read_bytes), f"{num_reads:,.0f}", size(peak_bytes)]

    rows = [(str(rank.rank), rank.host, *cells(numbers(rank))) for rank in load.ranks[:MAX_RANKS]]
    middle = [median(column) for column in zip(*map(numbers, load.ranks), strict=True)]
    missing = ", ".join(map(str, load.missing_ranks[:MAX_RANKS])) + ", ..." * (len(load.missing_ranks) > MAX_RANKS)
    title = f"{load.name}, load {load.load}: {len(load.ranks)} of {load.world_size} ranks, slowest reader first"
    columns = ("rank", "host", *phases, "bytes read", "reads", "peak memory")
    return table(
        title + (f"; no report of {missing}" if missing else ""),
        columns,
        [*rows, ("median", "", *cells(middle))],
        right=columns[2:],
    )
