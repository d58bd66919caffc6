"""All that `lowmem-load plan` says of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import lowmem_load.ds.partition  # noqa: F401  imports DeepSpeed, of which the memory of a process is measured here
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.forecast.load import NodeReads, RankNeeds, StockNeeds, node_reads, rank_needs, stock_needs, swap_bytes
from lowmem_load.forecast.training import (
    Fixed,
    Limits,
    Model,
    Setup,
    TrainingNeeds,
    Verdict,
    judge,
    model_of,
    training_needs,
)
from lowmem_load.hf.names import model_config
from lowmem_load.hf.quantizers import dequantizing
from lowmem_load.load.plan import plan_ranks
from lowmem_load.phases import host_memory
from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.remote.checkpoint import OpenCheckpoint
from lowmem_load.settings.settings import Settings, read_settings

ALL_RANKS = 8
"""World size up to which every rank is planned. Of larger ones the first, a middle and the last are, which has least to
read where partitions do not come out even."""

Planner = Callable[..., list[LoadPlan]]
"""`plan_ranks` with all of its arguments but `ranks`."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a job will need.

    Attributes:
        name, dtype: of it.
        file_bytes, num_files: of the checkpoint.
        setup: the job.
        ranks: those planned.
        process_bytes: host memory of a process before the load, as of this one: with torch, transformers and DeepSpeed.
        together: what the ranks of the node that reads most read together; None where each reads alone.
        node_bytes: that this node reads.
        model: what decides what training needs.
        training: that.
        verdict: whether it fits.
        stock: what stock would take.
        read_seconds: that the node takes to read; None if no rate was given.
    """

    name: str
    dtype: str
    file_bytes: int
    num_files: int
    setup: Setup
    ranks: tuple[RankNeeds, ...]
    process_bytes: int
    together: NodeReads | None
    node_bytes: int
    model: Model
    training: TrainingNeeds
    verdict: Verdict
    stock: StockNeeds
    read_seconds: float | None = None

    @property
    def largest(self) -> RankNeeds:
        """The planned rank that takes most memory, or else reads most."""
        return max(self.ranks, key=lambda rank: (rank.host_peak_bytes + rank.device_peak_bytes, rank.read_bytes))


def forecast(
    checkpoint: OpenCheckpoint,
    ds_config: Any,
    *,
    world_size: int,
    gpus_per_node: int,
    device: str = "cuda",
    limits: Limits,
    read_rate: float | None = None,
    dequantize: bool = False,
    **keywords: Any,
) -> Forecast:
    """Return what a job will need. Reads headers only.

    Args:
        checkpoint: to be loaded.
        ds_config: as `load_model` takes it.
        world_size: ranks.
        gpus_per_node: ranks on a node.
        device: the type of the accelerator.
        limits: what memory there is.
        read_rate: bytes a second that a node reads.
        dequantize: whether quantized weights are loaded dequantized.
        **keywords: of `plan`.

    Raises:
        ConfigError: the ds_config or an argument cannot be used.
        CheckpointError: the checkpoint cannot.
        UnsupportedError: a combination that cannot be streamed, or of which needs cannot be estimated.
    """
    if dequantize:
        keywords["quantization_config"] = dequantizing(checkpoint.folder, keywords)
    settings = read_settings(ds_config, world_size=world_size)
    _require_estimable(settings)
    planned: Planner = partial(
        plan_ranks,
        checkpoint.folder,
        ds_config,
        world_size=world_size,
        device=_device(device),
        open_source=checkpoint.open_source,
        **keywords,
    )
    plans = planned(ranks=_chosen(world_size))
    settings = settings.for_model(model_config(checkpoint.folder, keywords))
    setup = _setup(settings, gpus_per_node)
    together = _together(plans, settings, setup.node_size, planned)
    found = _forecast_of(checkpoint.name, plans, settings, setup, together, limits, is_host=device == "cpu")
    return replace(found, read_seconds=None if read_rate is None else found.node_bytes / read_rate)


def _forecast_of(
    name: str,
    plans: Sequence[LoadPlan],
    settings: Settings,
    setup: Setup,
    together: NodeReads | None,
    limits: Limits,
    *,
    is_host: bool,
) -> Forecast:
    ranks = tuple(rank_needs(plan, settings, is_host=is_host) for plan in plans)
    model, fixed = model_of(plans[0], settings), _fixed(ranks[0], plans[0], settings, is_host=is_host)
    spared = 0 if together is None else together.wanted_bytes - together.shared_bytes
    return Forecast(
        name=name,
        dtype=str(settings.dtype).removeprefix("torch."),
        file_bytes=sum(file.nbytes for file in plans[0].files),
        num_files=len(plans[0].files),
        setup=setup,
        ranks=ranks,
        process_bytes=fixed.process_bytes + fixed.shared_bytes,
        together=together,
        node_bytes=max(rank.read_bytes for rank in ranks) * setup.node_size - spared,
        model=model,
        training=training_needs(model, setup),
        verdict=judge(model, setup, fixed, limits),
        stock=stock_needs(plans[0], held_on_host_bytes=ranks[0].host_bytes),
    )


def _require_estimable(settings: Settings) -> None:
    """Refuse what the estimate of training, and the verdict, would be wrong for."""
    if settings.stage != 3 or settings.shard_size != settings.world_size:
        what = f"stage {settings.stage}" if settings.stage != 3 else f"mics_shard_size {settings.shard_size}"
        raise UnsupportedError(
            f"zero_optimization.{what}: needs are estimated for stage 3 with partitions over all ranks only"
        )


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"accelerator: expected cuda, cpu or another device of torch, got {name!r}") from error


def _chosen(world_size: int) -> list[int]:
    return list(range(world_size)) if world_size <= ALL_RANKS else [0, world_size // 2, world_size - 1]


def _setup(settings: Settings, gpus_per_node: int) -> Setup:
    offload = settings.ds_config["zero_optimization"].get("offload_optimizer") or {}
    optimizer = offload.get("device", "none")
    return Setup(
        *(settings.world_size, gpus_per_node, str(getattr(optimizer, "value", optimizer)), settings.offload_device),
        hpz_ranks=settings.secondary_size,
    )


def _fixed(needs: RankNeeds, plan: LoadPlan, settings: Settings, *, is_host: bool) -> Fixed:
    """Return what a load takes beside its partitions; where the CPU is the accelerator these count as its own."""
    process, offload = host_memory(), settings.offload_device
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


def _together(plans: Sequence[LoadPlan], settings: Settings, node_size: int, planned: Planner) -> NodeReads | None:
    """Return what the ranks of a node read together: of that whose rank reads most, which is planned whole for it."""
    most = max(plans, key=lambda plan: plan.read_bytes)
    if settings.offload_device == "nvme" or not most.shareable_bytes:
        return None
    first = most.rank // node_size * node_size
    of_node = range(first, min(first + node_size, most.world_size))
    known = {plan.rank: plan for plan in plans}
    whole = [known[rank] for rank in of_node] if set(of_node) <= set(known) else planned(ranks=of_node)
    return node_reads(whole)
