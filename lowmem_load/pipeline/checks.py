"""Checks before anything is read: which loads can be streamed, and whether what ranks write fits on their disks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lowmem_load.config.settings import Settings
from lowmem_load.distributed.nodes import machine
from lowmem_load.distributed.verdict import spell_ranks
from lowmem_load.ds import zero_init
from lowmem_load.errors import CheckpointError, ConfigError, LowMemLoadError, ModelBuildError, UnsupportedError, listed
from lowmem_load.hf import loader
from lowmem_load.pipeline.describe import Described

PLACED_BY_STOCK = ("device_map", "quantization_config", "gguf_file")
"""Keywords of loads that transformers itself does under stages 0 to 2."""

SHARDS = ("distributed_config", "tp_plan", "tp_size")
"""Keywords by which `from_pretrained` shards a model."""


class DiskUse(NamedTuple):
    """What one rank will write below a folder, in bytes, and what is free there to users other than root.

    Ranks that share a file system have an equal `file_system`. A network file system counts once per machine, because
    nothing shows for sure that two machines share it.
    """

    folder: str
    file_system: str
    needed_bytes: int
    free_bytes: int


def may_work_in_stock(error: Exception) -> bool:
    """Return whether an error of all ranks is about streaming, not about files, the ds_config or other ranks."""
    # Errors of other classes come from transformers or the model, which may not be ready for symbolic tensors.
    return isinstance(error, UnsupportedError | ModelBuildError) or not isinstance(error, LowMemLoadError | OSError)


def is_left_alone(call: loader.Call, settings: Settings) -> bool:
    """Return whether transformers does a load by itself, also inside `streaming()`."""
    return settings.stage < 3 and any(call.kwargs.get(name) for name in PLACED_BY_STOCK)


def refuse_device_map(call: loader.Call, settings: Settings) -> None:
    """Raise ConfigError for a device_map under ZeRO-3."""
    if settings.stage == 3 and call.kwargs.get("device_map") is not None:
        raise ConfigError(f"{call.name}: device_map and ZeRO-3 both place parameters; remove device_map")


def check_described(described: Described) -> None:
    """Raise for what cannot be planned."""
    zero_init.refuse_partitioned(described.model)
    described.constructor.check(described.name, described.model)
    quantizer: Any = getattr(described.model, "hf_quantizer", None)
    if quantizer is not None:
        _check_quantized(described, quantizer.quantization_config)
    described.target.check(described.model)


def _check_quantized(described: Described, quantization: Any) -> None:
    from lowmem_load.hf.quantizers import is_four_bit

    if not is_four_bit(quantization):
        return
    from lowmem_load.hf import four_bit

    if unpacked := four_bit.unpacked(described.model):
        raise CheckpointError(
            f"{described.name}: {listed(unpacked)} are to be held in 4 bits, but "
            "the files have no values for them, or packed ones without their quantization state"
        )
    four_bit.check_packed(described.model, described.settings)


def check_around(init: Any, described: Described) -> None:
    """Raise if a zero.Init around this load makes other parameters than the load."""
    settings, device = described.settings, described.settings.offload_device
    device = described.target.device.type if device == "none" else device
    zero_init.refuse_another(init, dtype=settings.dtype, device=device, world_size=settings.world_size)


def disk_uses(needed: Mapping[str, int]) -> list[DiskUse]:
    """Return what this rank will write, given in bytes by folder, with what is free there."""
    return [
        DiskUse(folder, f"{machine()} {os.stat(folder).st_dev}", nbytes, shutil.disk_usage(folder).free)
        for folder, nbytes in needed.items()
    ]


def check_room(name: str, uses: Sequence[Sequence[DiskUse]]) -> None:
    """Raise ConfigError, which names each file system that is too full, unless all that the ranks will write fits."""
    sharing: dict[str, list[tuple[int, DiskUse]]] = {}
    for rank, held in enumerate(uses):
        for use in held:
            sharing.setdefault(use.file_system, []).append((rank, use))
    problems = []
    for shared in sharing.values():
        needed, free = sum(use.needed_bytes for _, use in shared), min(use.free_bytes for _, use in shared)
        if needed > free:
            writers = spell_ranks(sorted({rank for rank, _ in shared}))
            problems.append(
                f"{shared[0][1].folder}: rank(s) {writers} will write {needed} bytes to its file system, and {free} "
                "are free there"
            )
    if problems:
        raise ConfigError(
            f"{name}: offload_param.nvme_path: {'; '.join(problems)}. Free space, or name another folder; nothing has "
            "been read yet"
        )
