"""All that `lowmem-load plan` says of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import lowmem_load.ds.partition  # noqa: F401  imports DeepSpeed, of which the memory of a process is measured here
from lowmem_load.api.plan_model import plan_ranks
from lowmem_load.cli.load_forecast import NodeReads, RankNeeds, StockNeeds, node_reads, rank_needs, stock_needs
from lowmem_load.cli.training_forecast import (
    Limits,
    Model,
    Setup,
    TrainingNeeds,
    Verdict,
    judge,
    model_of,
    training_needs,
)
from lowmem_load.config.settings import Settings, read_settings
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.hf.names import model_config
from lowmem_load.hf.quantizers import dequantizing
from lowmem_load.io.hub_checkpoint import OpenCheckpoint
from lowmem_load.phases import host_memory
from lowmem_load.planning.load_plan import LoadPlan

Planner = Callable[..., list[LoadPlan]]
"""`plan_ranks` with all of its arguments but `ranks`."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a job will need.

    Attributes:
        name, dtype: of it.
        file_bytes, num_files: of the checkpoint.
        setup: the job.
        rank: what a load takes on rank 0. Partitions are of one size, so others need about the same.
        together: what the ranks of a node read together; None where each reads alone.
        node_bytes, read_seconds: that a node reads, and takes for that; None if no rate was given.
        model, training: what decides what training needs, and that.
        verdict: whether it fits.
        stock: what stock would take.
    """

    name: str
    dtype: str
    file_bytes: int
    num_files: int
    setup: Setup
    rank: RankNeeds
    together: NodeReads | None
    node_bytes: int
    read_seconds: float | None
    model: Model
    training: TrainingNeeds
    verdict: Verdict
    stock: StockNeeds


def forecast(
    checkpoint: OpenCheckpoint,
    ds_config: Any,
    *,
    world_size: int,
    gpus_per_node: int,
    device: str,
    limits: Limits,
    read_rate: float | None = None,
    dequantize: bool = False,
    **keywords: Any,
) -> Forecast:
    """Return what a job will need. Reads headers only.

    Args:
        checkpoint: to be loaded.
        ds_config: as `load_model` takes it.
        world_size: ranks, `gpus_per_node` of them on a node.
        gpus_per_node: see `world_size`.
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
    process, is_host = host_memory(), device == "cpu"
    settings = read_settings(ds_config, world_size=world_size)
    _require_estimable(settings)
    if dequantize:
        keywords["quantization_config"] = dequantizing(checkpoint.folder, keywords)
    planned: Planner = partial(
        plan_ranks,
        checkpoint.folder,
        ds_config,
        world_size=world_size,
        device=_device(device),
        open_source=checkpoint.open_source,
        **keywords,
    )
    (plan,) = planned(ranks=[0])
    settings = settings.for_model(model_config(checkpoint.folder, keywords))
    setup, model = _setup(settings, gpus_per_node, is_host=is_host), model_of(plan, settings)
    rank = rank_needs(plan, settings, is_host=is_host)
    together = None
    if plan.shareable_bytes and settings.offload_device != "nvme":
        together = node_reads(planned(ranks=range(setup.node_size)))
    spared_bytes = 0 if together is None else together.wanted_bytes - together.shared_bytes
    node_bytes = setup.node_size * plan.read_bytes - spared_bytes
    return Forecast(
        name=checkpoint.name,
        dtype=str(settings.dtype).removeprefix("torch."),
        file_bytes=sum(file.nbytes for file in plan.files),
        num_files=len(plan.files),
        setup=setup,
        rank=rank,
        together=together,
        node_bytes=node_bytes,
        read_seconds=None if read_rate is None else node_bytes / read_rate,
        model=model,
        training=training_needs(model, setup),
        verdict=judge(model, setup, rank, process, limits),
        stock=stock_needs(plan, held_on_host_bytes=rank.host_bytes),
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


def _setup(settings: Settings, gpus_per_node: int, *, is_host: bool) -> Setup:
    offload = settings.ds_config["zero_optimization"].get("offload_optimizer") or {}
    optimizer = offload.get("device", "none")
    return Setup(
        *(settings.world_size, gpus_per_node, str(getattr(optimizer, "value", optimizer)), settings.offload_device),
        hpz_ranks=settings.secondary_size,
        is_host=is_host,
    )
