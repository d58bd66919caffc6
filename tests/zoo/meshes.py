"""Loads of a model type on meshes of DTensors: by `load_model`, and by transformers itself."""

import copy
import functools
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lowmem_load import UnsupportedError, get_load_report, lazy, load_model
from lowmem_load.engines.mesh import shard_fully
from lowmem_load.models.skeleton import blocks

Loaded = tuple[nn.Module, dict[str, Any]]


class UnshardableError(Exception):
    """torch or transformers cannot shard this model, whoever loads it, or lowmem_load refuses to."""


def _over_mesh(shape: Callable[[int], tuple[int, ...]]) -> Callable[..., Loaded]:
    """Returns a load over a mesh."""

    def load(cls: Any, path: str, reference: nn.Module, dtype: torch.dtype) -> Loaded:
        sizes = shape(dist.get_world_size())
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])

        trial = copy.deepcopy(reference).to("meta")
        try:
            shard_fully(trial, mesh, blocks(trial), {})
        except Exception as error:
            raise UnshardableError(f"fully_shard: {error}") from error
        model = load_model(path, mesh=mesh, auto_class=cls, dtype=dtype)
        return model, get_load_report(model).loading_info

    return load


def _by_config(*, default: bool = False, **sizes: int) -> Callable[..., Loaded]:
    """Returns a load by a `DistributedConfig`: ours, or transformers' own; fsdp_size makes up for the rest."""

    def load(cls: Any, path: str, reference: nn.Module, dtype: torch.dtype) -> Loaded:
        config = _config(reference, sizes)
        if default:
            model, info = cls.from_pretrained(path, distributed_config=config, dtype=dtype, output_loading_info=True)
            return model, info
        try:
            model = load_model(path, config, auto_class=cls, dtype=dtype)
        except UnsupportedError as error:
            raise UnshardableError(f"lowmem_load: {error}") from error
        return model, get_load_report(model).loading_info

    return load


def _config(reference: Any, sizes: dict[str, int]) -> Any:
    """Returns the configuration by which transformers can shard this model; it does so here, without values."""
    from transformers.distributed import DistributedConfig

    rest = dist.get_world_size() // (sizes.get("tp_size", 1) * sizes.get("dp_replicate_size", 1))
    config = DistributedConfig(**sizes, fsdp_size=rest)
    try:
        trial = copy.deepcopy(reference).to("meta")
        trial.maybe_distribute_model(trial, config, _meshes(config.to_json_string()))
    except Exception as error:
        raise UnshardableError(f"transformers: {error}") from error
    return config


@functools.lru_cache(maxsize=1)
def _meshes(config: str) -> Any:
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh

    return initialize_distributed_mesh(DistributedConfig(**json.loads(config)))[1]


def _lazily(cls: Any, path: str, _: nn.Module, dtype: torch.dtype) -> Loaded:
    """Loads without a mesh: every weight is read when it is compared."""
    model = lazy(path, auto_class=cls, dtype=dtype)
    return model, get_load_report(model).loading_info


LOADS: dict[str, Callable[..., Loaded]] = {
    "fsdp": _over_mesh(lambda world_size: (world_size,)),
    "hsdp": _over_mesh(lambda world_size: (2, world_size // 2)),
    "lazy": _lazily,
    "tp": _by_config(tp_size=2),
    "ep": _by_config(ep_size=2),
    "default-fsdp": _by_config(default=True),
    "default-hsdp": _by_config(default=True, dp_replicate_size=2),
    "default-tp": _by_config(default=True, tp_size=2),
    "default-ep": _by_config(default=True, ep_size=2),
}
"""Ways to load a model that is sharded, or lazy; `default` is transformers' own `from_pretrained`."""
