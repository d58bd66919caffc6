"""The ways to load that are compared. Each returns this rank's partitions and the seconds of its phases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.floors import partition_range, read_plain

METHODS = ("default", "lowmem", "floor")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Job:
    path: Path
    dtype: str
    ds_config: dict[str, Any]
    rank: int
    world_size: int
    device: torch.device


@dataclass(slots=True)
class Loaded:
    """What a method has loaded: a partitioned model, or (floor) bare partitions by name."""

    model: Any = None
    partitions: dict[str, torch.Tensor] = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)
    needed_bytes: int | None = None
    read_bytes: int | None = None
    num_reads: int | None = None
    keep_alive: Any = None  # transformers holds the HfDeepSpeedConfig weakly


def zero3_config(dtype: str) -> dict[str, Any]:
    """Return the ds_config of every method: ZeRO-3, DeepSpeed's defaults but for the bucket of gradients."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == "bf16"},
        # The default bucket of 5e8 elements is larger than the models; it is allocated by training only.
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 50_000_000},
    }


def wait_for_all_gathers() -> None:
    """Have DeepSpeed gather one parameter at a time where it would wait for the last of several only.

    Before 0.19.8 it does (`partition_parameters.py`, `launch_handles[-1].wait()`), and over gloo the others may still
    be under way: one in four default loads of a tiny model on 2 CPU ranks then has wrong weights.
    """
    from deepspeed.runtime.zero.partition_parameters import Init

    ordinary = Init._allgather_params_coalesced
    if "launch_handles[-1].wait()" not in inspect.getsource(ordinary):
        return

    def one_by_one(init: Any, param_list: list[Any], *args: Any, **kwargs: Any) -> None:
        for param in param_list:
            ordinary(init, [param], *args, **kwargs)

    Init._allgather_params_coalesced = one_by_one


def model_class(folder: str) -> Any:
    from lowmem_load.models import model_class

    return model_class.model_class(None, model_class.model_config(folder, {}), trust_remote_code=False)


def prepare(method: str, checkpoint: str) -> None:
    """Import what `method` uses, so that its memory and time belong to the start."""
    import deepspeed  # noqa: F401
    from transformers.integrations import HfDeepSpeedConfig  # noqa: F401

    model_class(checkpoint)

    wait_for_all_gathers()
    if method == "lowmem":
        # Imported before the clock starts, as DeepSpeed and transformers are.
        pass


def load_default(job: Job) -> Loaded:
    """Load with transformers' own ZeRO-3 path, switched on by HfDeepSpeedConfig."""
    from transformers.integrations import HfDeepSpeedConfig

    config = HfDeepSpeedConfig(job.ds_config)
    model = model_class(str(job.path)).from_pretrained(job.path, dtype=DTYPES[job.dtype])
    return Loaded(model=model, keep_alive=config)


def load_lowmem(job: Job) -> Loaded:
    from lowmem_load import get_load_report, load_model

    model = load_model(str(job.path), job.ds_config, dtype=DTYPES[job.dtype])
    report = get_load_report(model)
    return Loaded(
        model=model,
        phases_s=dict(report.seconds),
        needed_bytes=report.needed_bytes,
        read_bytes=report.read_bytes,
        num_reads=report.num_reads,
    )


def load_floor(job: Job) -> Loaded:
    partitions, num_reads = read_plain(job.path, job.rank, job.world_size)
    nbytes = sum(partition.nbytes for partition in partitions.values())
    placed = {name: partition.to(job.device) for name, partition in partitions.items()}
    return Loaded(partitions=placed, needed_bytes=nbytes, read_bytes=nbytes, num_reads=num_reads)


LOADERS: dict[str, Callable[[Job], Loaded]] = {"default": load_default, "lowmem": load_lowmem, "floor": load_floor}


def unpadded_partitions(loaded: Loaded, rank: int, world_size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, flat CPU tensor) of each partition without its padding, which the default loader leaves undefined.

    A secondary partition follows its partition. Those in swap files are read back, one at a time.
    """
    if loaded.model is None:
        yield from ((name, partition.cpu()) for name, partition in loaded.partitions.items())
        return
    for name, param in loaded.model.named_parameters():
        start, end = partition_range(param.ds_numel, rank, world_size)
        swapped = param.ds_tensor.status.name == "NOT_AVAILABLE"
        if swapped:
            param.nvme_swapper.swap_in([param], async_op=False)
        yield name, param.ds_tensor.detach().flatten()[: end - start].cpu()
        if swapped:
            param.nvme_swapper.remove_partition_and_release_buffers([param])
        if param.ds_secondary_tensor is not None:
            yield f"{name}, secondary", param.ds_secondary_tensor.detach().cpu()


def partition_bytes(loaded: Loaded) -> int:
    """Return the bytes of this rank's partitions, including padding."""
    if loaded.model is None:
        return sum(partition.nbytes for partition in loaded.partitions.values())
    return sum(param.ds_tensor.ds_numel * param.element_size() for param in loaded.model.parameters())
