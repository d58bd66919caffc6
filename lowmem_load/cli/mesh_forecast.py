"""What a load for FSDP2, tensor and expert parallelism reads and needs on a rank, and what training needs then."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lowmem_load.api.plan_model import plan_sharded
from lowmem_load.hf.names import distributed_config
from lowmem_load.io.hub_checkpoint import OpenCheckpoint
from lowmem_load.pipeline.load import MAX_THREADS

STATES = 4
"""Tensors of a shard's size in training with Adam: parameters, gradients, and two moments, all in fp32."""

COMPUTE_BYTES = 2
"""Bytes of an element in forward and backward: bf16."""


@dataclass(frozen=True, slots=True)
class MeshForecast:
    """What one rank of a mesh needs, in bytes.

    Attributes:
        name: of the checkpoint.
        sizes: of the `DistributedConfig`.
        world_size: ranks of the job.
        file_bytes: of the files of the checkpoint.
        shard_bytes: of the shards, in fp32.
        needed_bytes, read_bytes, num_reads: see `LoadPlan`.
        load_bytes: of the load at its peak: shards, buffers, and a staging buffer for each reading thread.
        training_bytes: of parameters, gradients and Adam's moments, all in fp32, and of the largest parameter in bf16.
            Activations and further gathered layers come on top.
        device_bytes: that the rank has; None if it was not said.
    """

    name: str
    sizes: Mapping[str, int]
    world_size: int
    file_bytes: int
    shard_bytes: int
    needed_bytes: int
    read_bytes: int
    num_reads: int
    load_bytes: int
    training_bytes: int
    device_bytes: int | None

    @property
    def fits(self) -> bool:
        """Whether load and training fit into the memory of the device, if that is known."""
        return self.device_bytes is None or max(self.load_bytes, self.training_bytes) <= self.device_bytes


def forecast_mesh(
    checkpoint: OpenCheckpoint, sizes: Mapping[str, int], *, device_bytes: int | None, **keywords: Any
) -> MeshForecast:
    """Return what the first rank of a mesh needs: uneven shards make it the largest.

    Args:
        checkpoint: whose headers are read.
        sizes: of the `DistributedConfig`: fsdp_size, tp_size, dp_replicate_size, ep_size.
        device_bytes: see `MeshForecast`.
        **keywords: of `plan`.

    Raises:
        UnsupportedError: this release of transformers has no `DistributedConfig`.
    """
    world_size = sizes["fsdp_size"] * sizes["tp_size"] * sizes["dp_replicate_size"]
    planned = plan_sharded(
        *(checkpoint.folder, distributed_config(sizes)),
        rank=0,
        world_size=world_size,
        dtype=torch.float32,
        open_source=checkpoint.open_source,
        **keywords,
    )
    numel = sum(each.numel for target in planned.targets for each in target.destinations)
    shard_bytes = sum(each.numel * target.dtype.itemsize for target in planned.targets for each in target.destinations)
    buffers = sum(math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in planned.buffers)
    passing = MAX_THREADS * planned.staging_bytes + planned.largest_temporary_bytes
    largest = max((target.numel for target in planned.targets), default=0)
    return MeshForecast(
        name=checkpoint.name,
        sizes=dict(sizes),
        world_size=world_size,
        file_bytes=sum(file.nbytes for file in planned.files),
        shard_bytes=shard_bytes,
        needed_bytes=planned.needed_bytes,
        read_bytes=planned.read_bytes,
        num_reads=planned.num_reads,
        load_bytes=shard_bytes + buffers + passing,
        training_bytes=STATES * 4 * numel + buffers + COMPUTE_BYTES * largest,
        device_bytes=device_bytes,
    )
