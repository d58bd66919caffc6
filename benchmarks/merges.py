"""What it costs to make a folder of a model of a training checkpoint: `python -m benchmarks.merges PART`.

*speed*: four ranks save a bf16 Llama as torch DCP and as verl do; `consolidate`, accelerate's `merge_fsdp_weights` and
verl's merger make a folder of it, each in a fresh process, with the checkpoint in the page cache, and so does a plain
copy of the files (the floor). Only `consolidate` waits for the disk by itself; compare the seconds until all is there.

*planning*: the shapes of DeepSeek-V3 under FSDP2 on 64 ranks, and 1,000 tensors on 512, as sparse files with the true
heads of torch's zips. Nothing is written.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pickle
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import shape_for
from benchmarks.launch import run_on_ranks
from benchmarks.memory import MemorySampler
from benchmarks.pipelines import import_example
from benchmarks.published import MODELS
from benchmarks.results import log, show_table
from lowmem_load import consolidate

MIB = 1 << 20

MERGERS = {"verl": ("floor", "verl's merger", "consolidate"), "dcp": ("floor", "consolidate", "merge_fsdp_weights")}


def save_large(num_params: int, folder: str) -> None:
    """Save as accelerate (`dcp`) and verl (`verl`) do, without the whole model in memory."""
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape, verl = shape_for(num_params), Path(folder, "verl")
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        tie_word_embeddings=False,
    )
    torch.distributed.init_process_group("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.to_local().detach().normal_()
    state = model.state_dict()
    verl.mkdir(exist_ok=True)
    torch.save(state, verl / f"model_world_size_{world_size}_rank_{rank}.pt")
    dcp.save({"model": state}, checkpoint_id=f"{folder}/dcp")
    if rank == 0:
        for place in (verl / "huggingface", Path(folder, "dcp")):
            model.config.architectures = ["LlamaForCausalLM"]
            model.config.save_pretrained(place)
        import_example("make_model").byte_tokenizer().save_pretrained(
            verl / "huggingface"
        )  # verl's merger asks for one
        (verl / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world_size}))


def files_in(folder: str) -> list[Path]:
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def merge(way: str, checkpoint: str, out: str) -> dict[str, float]:
    """Merge in this process; return seconds, those until all is on the disk, and the anonymous peak above the start."""
    import transformers
    from transformers.models.llama import modeling_llama  # noqa: F401  imported before the start

    if way == "verl's merger":
        from verl.model_merger.base_model_merger import ModelMergerConfig
        from verl.model_merger.fsdp_model_merger import FSDPModelMerger
    elif way == "merge_fsdp_weights":
        import torch.distributed.checkpoint.format_utils  # noqa: F401
        from accelerate.utils import merge_fsdp_weights
    Path(out).mkdir()
    transformers.logging.set_verbosity_error()
    with MemorySampler() as memory:
        start = time.perf_counter()
        if way == "floor":
            for path in files_in(checkpoint):
                copy_file(path, Path(out, path.name))
        elif way == "consolidate":
            consolidate(checkpoint, f"{out}/model")
        elif way == "merge_fsdp_weights":
            merge_fsdp_weights(checkpoint, out)
        else:
            config = {"operation": "merge", "backend": "fsdp", "local_dir": checkpoint, "target_dir": out}
            FSDPModelMerger(
                ModelMergerConfig(**config, hf_model_config_path=f"{checkpoint}/huggingface")
            ).merge_and_save()
        seconds = time.perf_counter() - start
    for path in files_in(out):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    synced = time.perf_counter() - start
    return {"seconds": seconds, "synced": synced, "anonymous": memory.use.peak_anon / MIB}


def copy_file(path: Path, target: Path) -> None:
    memory = memoryview(bytearray(8 * MIB))
    with path.open("rb", buffering=0) as source, target.open("wb", buffering=0) as copy:
        while count := source.readinto(memory):
            copy.write(memory[:count])


def run_speed(options: argparse.Namespace) -> None:
    rows: list[tuple[str, ...]] = [("checkpoint", "way", "seconds", "until on the disk", "anonymous, MiB above start")]
    with tempfile.TemporaryDirectory(dir=options.cache) as folder:
        run_on_ranks(save_large, options.params, folder, out=Path(folder, "logs"), world_size=4)
        os.sync()
        for kind, ways in MERGERS.items():
            for way in [way for _ in range(options.repeats) for way in ways]:
                if way == "verl's merger" and importlib.util.find_spec("verl") is None:
                    continue
                checkpoint, out = f"{folder}/{kind}", f"{folder}/out"
                for path in files_in(checkpoint):  # into the page cache
                    copy_file(path, Path(os.devnull))
                (found,) = run_on_ranks(merge, way, checkpoint, out, out=Path(folder, "logs"), world_size=1)
                figures = (f"{found['seconds']:.2f}", f"{found['synced']:.2f}", f"{found['anonymous']:,.0f}")
                rows.append((kind, way, *figures))
                log("  ".join(rows[-1]))
                shutil.rmtree(out)
                os.sync()
    show_table("benchmarks.merges speed", rows, docs=options.docs)


# -- planning ----------------------------------------------------------------------------------------------------------


def shapes_of_deepseek() -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return the config of DeepSeek-V3, and the shapes of the model that transformers builds of it."""
    import torch
    import transformers

    config = dict(MODELS["deepseek-v3-bf16"].config)
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    return config, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def write_sparse(folder: Path, shapes: dict[str, tuple[int, ...]], num_ranks: int) -> None:
    """Write `.metadata` by torch's classes, and a file for each rank: zips of its chunks, with holes for the data."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    zips: dict[tuple[int, ...], tuple[bytes, bytes, int]] = {}

    def zip_of(shape: tuple[int, ...]) -> tuple[bytes, bytes, int]:
        """Return the first and last bytes of a zip of such a tensor, and its size."""
        if shape not in zips:
            path = folder / "zip"
            with FakeTensorMode():
                fake = torch.empty(shape, dtype=torch.bfloat16)
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(fake, path)
            with path.open("rb") as file:
                nbytes, head = path.stat().st_size, file.read(1024)
                file.seek(max(0, nbytes - 4096))
                zips[shape] = head, file.read(), nbytes
            path.unlink()
        return zips[shape]

    folder.mkdir()
    ends = [0] * num_ranks
    tensors, places = {}, {}
    files = [(folder / f"__{rank}_0.distcp").open("wb") for rank in range(num_ranks)]
    for name, shape in shapes.items():
        rows = -(-shape[0] // num_ranks)
        chunks = []
        for rank, start in enumerate(range(0, shape[0], rows)):
            sizes = (min(rows, shape[0] - start), *shape[1:])
            first = (start, *[0] * (len(shape) - 1))
            head, tail, nbytes = zip_of(sizes)
            for at, data in ((ends[rank], head), (ends[rank] + nbytes - len(tail), tail)):
                files[rank].seek(at)
                files[rank].write(data)
            place = filesystem._StorageInfo(f"__{rank}_0.distcp", ends[rank], nbytes)
            places[MetadataIndex(f"model.{name}", torch.Size(first))] = place
            chunks.append(ChunkStorageMetadata(torch.Size(first), torch.Size(sizes)))
            ends[rank] += nbytes
        properties = TensorProperties(dtype=torch.bfloat16)
        tensors[f"model.{name}"] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
    for file in files:
        file.close()
    keys = {f"model.{name}": ("model", name) for name in shapes}
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, keys, places), protocol=4))


def plan(folder: str, config: str) -> dict[str, float]:
    """Open a checkpoint and plan the new files in this process; count requests on the way."""
    import torch  # noqa: F401
    import transformers.models.deepseek_v3.modeling_deepseek_v3  # noqa: F401

    from lowmem_load.io.executor import Executor
    from lowmem_load.io.source import LocalFile
    from lowmem_load.saving.writer import plan_writes
    from lowmem_load.training_checkpoints.open_model import open_model

    module = sys.modules[consolidate.__module__]
    requests, ordinary = 0, LocalFile.read_into

    def count(file: LocalFile, offset: int, memory: memoryview) -> None:
        nonlocal requests
        requests += 1
        ordinary(file, offset, memory)

    LocalFile.read_into = count  # type: ignore[method-assign]
    with MemorySampler() as memory, Executor() as executor, tempfile.TemporaryDirectory() as scratch:
        start = time.perf_counter()
        opened = open_model(folder, executor)
        opened_s, num_requests = time.perf_counter() - start, requests
        files = module._describe(opened, Path(scratch), executor, config or False, None, "5GB")
        writes = plan_writes(files)
        planned_s = time.perf_counter() - start - opened_s
    figures = {"opened": opened_s, "planned": planned_s, "requests": num_requests, "files": len(files)}
    return {**figures, "writes": len(writes), "anonymous": memory.use.peak_anon / MIB}


def run_planning(options: argparse.Namespace) -> None:
    columns = ("checkpoint", "tensors", "ranks", "requests", "open, s", "plan, s", "files", "writes", "peak, MiB")
    rows: list[tuple[str, ...]] = [columns]
    config, shapes = shapes_of_deepseek()
    plain = {f"model.layers.{number}.weight": (4096, 64) for number in range(1000)}
    with tempfile.TemporaryDirectory(dir=options.cache) as folder:
        Path(folder, "config").mkdir()
        Path(folder, "config/config.json").write_text(json.dumps(config))
        for name, tensors, num_ranks in (("deepseek-v3", shapes, 64), ("1,000 tensors", plain, 512)):
            checkpoint = Path(folder, name)
            write_sparse(checkpoint, tensors, num_ranks)
            path = f"{folder}/config" if tensors is shapes else ""
            (found,) = run_on_ranks(plan, str(checkpoint), path, out=Path(folder, "logs"), world_size=1)
            figures = (f"{found['requests']:,}", f"{found['opened']:.1f}", f"{found['planned']:.1f}")
            counts = (str(found["files"]), f"{found['writes']:,}", f"{found['anonymous']:,.0f}")
            rows.append((name, f"{len(tensors):,}", str(num_ranks), *figures, *counts))
            log("  ".join(rows[-1]))
            shutil.rmtree(checkpoint)
    show_table("benchmarks.merges planning", rows, docs=options.docs)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.merges", description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("speed", "planning"))
    parser.add_argument("--params", type=int, default=1_500_000_000, help="of the model of speed, in bf16")
    parser.add_argument("--repeats", type=int, default=1, help="of each way of speed")
    parser.add_argument("--cache", type=Path, help="folder for the checkpoints")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/measured.md")
    options = parser.parse_args()
    {"speed": run_speed, "planning": run_planning}[options.part](options)


if __name__ == "__main__":
    main()
