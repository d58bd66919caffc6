"""All that `lowmem-load plan` says of a job."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.forecast.load import RankNeeds, rank_needs, swap_bytes
from lowmem_load.forecast.stock import StockNeeds, stock_needs
from lowmem_load.forecast.together import NodeReads, node_reads
from lowmem_load.forecast.training import Model, Setup, TrainingNeeds, model_of, training_needs
from lowmem_load.forecast.verdict import Fixed, Limits, Verdict, judge
from lowmem_load.hf.names import model_config
from lowmem_load.hf.quantizers import dequantizing
from lowmem_load.load.plan import plan_ranks
from lowmem_load.phases import host_memory
from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.read.rate import read_rate
from lowmem_load.remote.checkpoint import OpenCheckpoint
from lowmem_load.settings.settings import Settings, read_settings

ALL_RANKS = 8
"""World size up to which every rank is planned. Of larger ones the first, a middle and the last are, which has least to
read where partitions do not come out even."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is asked about.

    Attributes:
        ds_config: as `load_model` takes it.
        world_size: ranks.
        gpus_per_node: ranks on a node.
        ranks: to be planned; none for a choice.
        device: the type of the accelerator.
        num_threads: that read, of each rank.
        limits: what memory there is.
        read_rate: bytes a second that a node reads; None to measure it here.
        dequantize: whether quantized weights are loaded dequantized.
        keywords: of `plan`.
    """

    ds_config: Any
    world_size: int
    gpus_per_node: int
    ranks: Sequence[int] = ()
    device: str = "cuda"
    num_threads: int = 4
    limits: Limits = field(default_factory=lambda: Limits(None, None))
    read_rate: float | None = None
    dequantize: bool = False
    keywords: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a job will need.

    Attributes:
        name, world_size, gpus_per_node, dtype: of it.
        file_bytes, num_files: of the checkpoint.
        ranks: those planned.
        process_bytes: host memory of a process before the load, as of this one: with torch, transformers and DeepSpeed.
        read_rate: bytes a second of a node, and where the figure comes from.
        together: what the ranks of the node that reads most read together; None where each reads alone.
        read_seconds: of that node; None if nothing is known of the rate.
        model: what decides what training needs.
        training: that.
        verdict: whether it fits.
        stock: what stock would take.
        seconds: that this took.
    """

    name: str
    world_size: int
    gpus_per_node: int
    dtype: str
    file_bytes: int
    num_files: int
    ranks: tuple[RankNeeds, ...]
    process_bytes: int
    read_rate: tuple[float, str] | None
    together: NodeReads | None
    read_seconds: float | None
    model: Model
    setup: Setup
    training: TrainingNeeds
    verdict: Verdict
    stock: StockNeeds
    seconds: Mapping[str, float]

    @property
    def largest(self) -> RankNeeds:
        """The planned rank that takes most memory, or else reads most."""
        return max(self.ranks, key=lambda rank: (rank.host_peak_bytes + rank.device_peak_bytes, rank.read_bytes))


def forecast(checkpoint: OpenCheckpoint, job: Job) -> Forecast:
    """Return what a job will need. Reads headers, and for a measured rate some of the weights.

    Raises:
        ConfigError: the ds_config or an argument cannot be used.
        CheckpointError: the checkpoint cannot.
        UnsupportedError: a combination that cannot be streamed.
    """
    start = time.perf_counter()
    keywords = dict(job.keywords)
    if job.dequantize:
        keywords["quantization_config"] = dequantizing(checkpoint.folder, keywords)
    settings = read_settings(job.ds_config, world_size=job.world_size)
    _require_estimable(settings)

    def planned_for(ranks: Sequence[int]) -> list[LoadPlan]:
        return plan_ranks(
            *(checkpoint.folder, job.ds_config),
            ranks=ranks,
            world_size=job.world_size,
            device=_device(job.device),
            open_source=checkpoint.open_source,
            **keywords,
        )

    plans = planned_for(job.ranks or _chosen(job.world_size))
    settings = settings.for_model(model_config(checkpoint.folder, keywords))
    is_host = job.device == "cpu"
    needs = tuple(rank_needs(plan, settings, is_host=is_host, num_threads=job.num_threads) for plan in plans)
    model = model_of(plans[0], settings)
    setup = _setup(job, settings)
    training = training_needs(model, setup)
    fixed = _fixed(needs[0], plans[0], settings, is_host=is_host)
    planned = time.perf_counter()
    rate = _rate(checkpoint, plans[0], job)
    in_node = min(job.gpus_per_node, job.world_size)
    together = _together(plans, settings, in_node, planned_for)
    most = max(rank.read_bytes for rank in needs) * in_node
    if together is not None:
        most -= together.alone_bytes - together.shared_bytes
    return Forecast(
        name=checkpoint.name,
        world_size=job.world_size,
        gpus_per_node=job.gpus_per_node,
        dtype=str(settings.dtype).removeprefix("torch."),
        file_bytes=sum(file.nbytes for file in plans[0].files),
        num_files=len(plans[0].files),
        ranks=needs,
        process_bytes=fixed.process_bytes + fixed.shared_bytes,
        read_rate=rate,
        together=together,
        read_seconds=None if rate is None else most / rate[0],
        model=model,
        setup=setup,
        training=training,
        verdict=judge(model, setup, fixed, job.limits),
        stock=stock_needs(plans[0], held_on_host_bytes=needs[0].host_bytes),
        seconds={**plans[0].seconds, "all": planned - start},
    )


def _together(
    plans: Sequence[LoadPlan], settings: Settings, in_node: int, planned_for: Callable[[Sequence[int]], list[LoadPlan]]
) -> NodeReads | None:
    """Return what the ranks of a node read together: of that whose rank reads most, which is planned whole for it."""
    most = max(plans, key=lambda plan: plan.read_bytes)
    if settings.offload_device == "nvme" or not most.shareable_bytes:
        return None
    first = most.rank // in_node * in_node
    of_node = range(first, min(first + in_node, most.world_size))
    known = {plan.rank: plan for plan in plans}
    whole = [known[rank] for rank in of_node] if set(of_node) <= set(known) else planned_for(of_node)
    return node_reads(whole)


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"accelerator: expected cuda, cpu or another device of torch, got {name!r}") from error


def _require_estimable(settings: Settings) -> None:
    """Refuse what the estimate of training, and the verdict, would be wrong for."""
    section = settings.ds_config["zero_optimization"]
    stage, shard = section.get("stage", 0), section.get("mics_shard_size") or -1
    if stage != 3 or shard > 0:
        what = f"zero_optimization.stage {stage}" if stage != 3 else f"zero_optimization.mics_shard_size {shard}"
        raise UnsupportedError(f"{what}: needs are estimated for stage 3 with partitions over all ranks only")


def _chosen(world_size: int) -> list[int]:
    return list(range(world_size)) if world_size <= ALL_RANKS else [0, world_size // 2, world_size - 1]


def _fixed(needs: RankNeeds, plan: LoadPlan, settings: Settings, *, is_host: bool) -> Fixed:
    """Return what a load takes beside its partitions; where the CPU is the accelerator these count as its own."""
    process = host_memory()  # DeepSpeed is imported by now
    offload = settings.offload_device
    swap = swap_bytes(settings) if offload == "nvme" else 0
    is_in_host = offload == "cpu" or (is_host and offload == "none")
    is_on_device = offload == "none" and not is_host
    return Fixed(
        process_bytes=max(0, process.anonymous_bytes - plan.planning_bytes),
        shared_bytes=process.file_bytes,
        host_bytes=needs.host_peak_bytes - (needs.partition_bytes if is_in_host else 0) - swap,
        device_bytes=needs.device_peak_bytes - (needs.partition_bytes if is_on_device else 0),
        is_host=is_host,
        swap_bytes=swap,
    )


def _setup(job: Job, settings: Settings) -> Setup:
    section = settings.ds_config["zero_optimization"]
    optimizer = (section.get("offload_optimizer") or {}).get("device", "none")
    return Setup(
        *(job.world_size, job.gpus_per_node, str(getattr(optimizer, "value", optimizer)), settings.offload_device),
        hpz_ranks=int(section.get("zero_hpz_partition_size") or 1),
    )


def _rate(checkpoint: OpenCheckpoint, plan: LoadPlan, job: Job) -> tuple[float, str] | None:
    if job.read_rate is not None:
        return job.read_rate, "given"
    if checkpoint.remote:
        return None
    measured = read_rate([file.path for file in plan.files], num_threads=job.num_threads)
    return None if measured is None else (measured, "measured here, as far as the page cache has it from there")
