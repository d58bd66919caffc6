"""One load by a group of ranks, measured."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.collectives import CollectiveCounter, NetworkUse
from benchmarks.floors import have_memory_backed
from benchmarks.launch import run_on_ranks
from benchmarks.memory import MemorySampler, MemoryUse
from benchmarks.methods import LOADERS, Job, Loaded, partition_bytes, prepare, unpadded_partitions, zero3_config


@dataclass(frozen=True, slots=True)
class Spec:
    """What a group of ranks loads, and how; it travels as JSON."""

    method: str
    checkpoint: str
    dtype: str
    train_steps: int
    out: str
    ds_config: dict[str, Any] | None = None  # instead of the common one
    is_touched: bool = True


@dataclass(slots=True)
class RankResult:
    """What one rank measured; it travels as JSON. Bytes and seconds throughout."""

    method: str
    world_size: int
    rank: int
    seconds: float
    cpu_seconds: float
    phases_s: dict[str, float]
    memory: MemoryUse
    partition_bytes: int
    hbm_peak_bytes: int | None
    needed_bytes: int | None
    read_bytes: int | None
    num_reads: int | None
    network: NetworkUse
    digests: dict[str, str] = field(default_factory=dict)
    persistent: list[int] = field(default_factory=list)  # parameters, and elements, that the engine keeps whole
    losses: list[float] = field(default_factory=list)


def init_ranks(spec: Spec, counter: CollectiveCounter) -> Job:
    import deepspeed

    counter.install_deepspeed()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo")
    ds_config = spec.ds_config or zero3_config(spec.dtype)
    return Job(Path(spec.checkpoint), spec.dtype, ds_config, rank, world_size, device)


def measure_load(spec: Spec, job: Job, counter: CollectiveCounter) -> tuple[Loaded, RankResult]:
    """Run one load and measure it. Collective: a barrier before, none after."""
    on_gpu = job.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    if spec.is_touched:
        have_memory_backed(job.path, job.world_size, dist.barrier)
    hbm_start = torch.cuda.memory_allocated() if on_gpu else 0
    dist.barrier()
    sampler = MemorySampler()
    with sampler:
        counter.active = True
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        loaded = LOADERS[spec.method](job)
        if on_gpu:
            torch.cuda.synchronize()
        seconds, cpu_seconds = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        counter.active = False
    result = RankResult(
        method=spec.method,
        world_size=job.world_size,
        rank=job.rank,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        phases_s=loaded.phases_s,
        memory=sampler.use,
        partition_bytes=partition_bytes(loaded),
        hbm_peak_bytes=torch.cuda.max_memory_allocated() - hbm_start if on_gpu else None,
        needed_bytes=loaded.needed_bytes,
        read_bytes=loaded.read_bytes,
        num_reads=loaded.num_reads,
        network=counter.use,
    )
    return loaded, result


def digest_partitions(loaded: Loaded, rank: int, world_size: int) -> dict[str, str]:
    """Return the sha256 of each partition's bytes without padding, by parameter name."""
    return {
        name: hashlib.sha256(partition.contiguous().view(torch.uint8).numpy().data).hexdigest()
        for name, partition in unpadded_partitions(loaded, rank, world_size)
    }


def run_group(spec: Spec, world_size: int, on_gpu: bool) -> list[RankResult]:
    """Return what fresh processes measured of one load, in rank order."""
    results = run_on_ranks(run, asdict(spec), out=Path(spec.out), world_size=world_size, on_gpu=on_gpu)
    uses = [{"memory": MemoryUse(**fields["memory"]), "network": NetworkUse(**fields["network"])} for fields in results]
    return [RankResult(**fields | use) for fields, use in zip(results, uses, strict=True)]


def run(fields: dict[str, Any]) -> RankResult:
    """Measure one load, then (outside the measurement) digest the partitions and train."""
    spec = Spec(**fields)
    counter = CollectiveCounter()
    counter.install()
    prepare(spec.method, spec.checkpoint)
    job = init_ranks(spec, counter)
    loaded, result = measure_load(spec, job, counter)
    result.digests = digest_partitions(loaded, job.rank, job.world_size)
    if spec.train_steps and loaded.model is not None:
        from benchmarks.train import training_losses

        result.losses = training_losses(loaded.model, job.ds_config, spec.train_steps, job.rank)
        sizes = [param.ds_numel for param in loaded.model.parameters() if param.ds_persist]
        result.persistent = [len(sizes), sum(sizes)]
    return result
