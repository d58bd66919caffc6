"""`lowmem-load plan`: what a job reads and needs, and whether it fits."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowmem_load.cli import common
from lowmem_load.cli.common import NO, Json, Name, Revision, Subfolder, answer, facts, table, working
from lowmem_load.text import parse_size, size

if TYPE_CHECKING:
    from lowmem_load.api.forecast import Row
    from lowmem_load.hf.remote_names import Checkpoint

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
"""Ends of the names of files that have weights, or say where they are."""

COLUMNS = ("method", "offload", "GPU load", "GPU train", "node's host", "node's nvme", "fits from", "verdict")


DsConfig = Annotated[
    Path | None, typer.Option(help="JSON file, for ZeRO-3. Default: stage 3 in bf16.", exists=True, dir_okay=False)
]
WorldSize = Annotated[int | None, typer.Option(min=1, help="Number of ranks of a ZeRO-3 job.")]
Fsdp = Annotated[int | None, typer.Option(min=1, help="Number of ranks that share a parameter under FSDP2.")]
Tp = Annotated[int, typer.Option(min=1, help="Ranks of tensor parallelism, with --fsdp.")]
Ep = Annotated[int, typer.Option(min=1, help="Ranks of expert parallelism, with --fsdp.")]
DpReplicate = Annotated[int, typer.Option(min=1, help="Number of replicas (HSDP), with --fsdp.")]
Method = Annotated[str | None, typer.Option(help="What is trained: full, lora or qlora. Default: a row for each.")]
LoraRank = Annotated[int, typer.Option(min=1, help="Rank of LoRA adapters on every Linear layer.")]
Offload = Annotated[
    str | None,
    typer.Option(help="What goes to the CPU: none, optimizer or all. Default: as in the ds_config, or a row for each."),
]
GpusPerNode = Annotated[int | None, typer.Option(min=1, help="Ranks on a node. Default: 8, or all if there are fewer.")]
HostMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Host memory per node, e.g. 512GiB. Default: no limit.")
]
DeviceMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory per GPU, e.g. 80GiB. Default: no limit.")
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
    method: Method = None,
    lora_rank: LoraRank = 16,
    offload: Offload = None,
    gpus_per_node: GpusPerNode = None,
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    dequantize: Dequantize = False,
    subfolder: Subfolder = "",
    revision: Revision = None,
    auto_class: common.AutoClass = None,
    trust_remote_code: common.TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Show what a job reads and needs, and whether it fits.

    It covers loading and training on GPUs. It reads headers only, also on the Hub. Sizes need a unit: GB (10**9) or GiB
    (2**30). Exits with 1 if no row of the table fits.

    \b
    lowmem-load plan /models/Llama-3.1-70B --world-size 8 --device-memory 80GiB --host-memory 512GiB
    lowmem-load plan /models/Llama-3.1-70B --fsdp 64 --tp 8 --device-memory 80GiB --method full
    """
    if fsdp is None and max(tp, ep, dp_replicate) > 1:
        raise typer.BadParameter("--tp, --ep and --dp-replicate go with --fsdp")
    if (fsdp is None) == (world_size is None) or (fsdp and ds_config):
        raise typer.BadParameter("name --world-size for ZeRO-3 (and --ds-config), or --fsdp for FSDP2")
    mesh = {"fsdp_size": fsdp, "tp_size": tp, "ep_size": ep, "dp_replicate_size": dp_replicate} if fsdp else None
    num_ranks = world_size or (fsdp or 1) * tp * dp_replicate
    host_bytes = None if host_memory is None else parse_size(host_memory, "--host-memory")
    device_bytes = None if device_memory is None else parse_size(device_memory, "--device-memory")
    common.check_revision(name, revision)
    keywords = dict[str, Any](subfolder=subfolder, auto_class=auto_class, trust_remote_code=trust_remote_code)
    how: dict[str, Any] = {"method": method, "lora_rank": lora_rank, "offload": offload, "mesh": mesh}
    how["ds_config"] = str(ds_config) if ds_config else None
    with working(), _checkpoint(name, revision, dequantize, keywords) as checkpoint:
        from lowmem_load.api.forecast import Job, forecast

        job = Job(num_ranks, gpus_per_node or min(8, num_ranks), host_bytes, device_bytes)
        found = forecast(checkpoint, job, **how, **keywords)
    rows = table("", COLUMNS, _cells(found.rows), right=COLUMNS[2:7])
    answer(as_json, asdict(found), lambda: [facts(found.name, found.about), rows])
    if not any(row.fits for row in found.rows):
        raise typer.Exit(NO)


@contextlib.contextmanager
def _checkpoint(name: str, revision: str | None, dequantize: bool, keywords: dict[str, Any]) -> Iterator[Checkpoint]:
    """Inside, there is a checkpoint that can be planned, with what `dequantize` adds to the keywords.

    If it has a configuration and no weights, a file with a header and a hole stands for them, which takes no space on
    the disk. Its tensors have the names and shapes of the model's parameters, and the dtype of the configuration.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"  # of this process; the plan is for the job's
    import torch

    from lowmem_load.api.forecast import config_of, without_values
    from lowmem_load.families import diffusion
    from lowmem_load.hf.quantizers import dequantizing
    from lowmem_load.hf.remote_names import find_checkpoint
    from lowmem_load.weights_out.file_layout import lay_out

    checkpoint = find_checkpoint(name, subfolder=keywords["subfolder"], revision=revision)
    if dequantize:
        keywords["quantization_config"] = dequantizing(checkpoint.folder, keywords)
    folder = Path(checkpoint.folder, keywords["subfolder"])
    names = os.listdir(folder) if folder.is_dir() else []
    if "config.json" not in names or any(name.endswith(WEIGHTS) for name in names):
        yield checkpoint
        return
    dtype = getattr(config_of(checkpoint, keywords), "dtype", None) or torch.float32
    model = without_values(checkpoint, keywords)
    stored = model.state_dict()
    saved = dict(model.named_parameters())  # a tied one once
    saved |= {name: buffer for name, buffer in model.named_buffers() if name in stored}
    tensors = {
        name: (dtype if tensor.is_floating_point() else tensor.dtype, tuple(tensor.shape))
        for name, tensor in saved.items()
    }
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary, keywords["subfolder"])
        made.mkdir(parents=True, exist_ok=True)
        (made / "config.json").symlink_to((folder / "config.json").resolve())
        start = "diffusion_pytorch_" if diffusion.is_model(model) else ""
        layout = lay_out(f"{start}model.safetensors", tensors, {"format": "pt"})
        with open(made / layout.name, "wb") as file:
            file.write(layout.header)
            file.truncate(layout.nbytes)
        alone = f"{checkpoint.name} (config.json alone: sizes as a save would write them)"
        yield checkpoint._replace(name=alone, folder=temporary)


def _cells(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        needs, smallest = row.needs, row.fits_from
        fits_from = "never" if smallest is None else f"{smallest} rank{'s' * (smallest > 1)}"
        host = max(needs["host_load"], needs["host_training"])
        nvme = size(needs["nvme"]) if needs["nvme"] else ""
        memory = (size(needs["gpu_load"]), size(needs["gpu_training"]), size(host), nvme)
        yield row.method, row.offload, *memory, fits_from if row.verdict else "", row.verdict
