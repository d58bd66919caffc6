"""Loads of a model type on meshes of DTensors: by `load_model`, and by transformers itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests import parity

Loaded = tuple[nn.Module, dict[str, Any]]


class UnshardableError(Exception):
    """torch or transformers cannot shard this model, whoever loads it."""


def differences(model: nn.Module, reference: nn.Module) -> list[str]:
    """Returns what differs between a sharded and an ordinary model, bit for bit. Collective."""
    from torch.distributed.tensor import DTensor

    found = []
    for kind in ("named_parameters", "named_buffers"):
        held = dict(getattr(model, kind)(remove_duplicate=False))
        expected = dict(getattr(reference, kind)(remove_duplicate=False))
        if held.keys() != expected.keys():
            found.append(f"{kind}: {sorted(held.keys() ^ expected.keys())}")
        for name in sorted(held.keys() & expected.keys()):
            whole = held[name].full_tensor() if isinstance(held[name], DTensor) else held[name]
            whole, wanted = whole.detach(), expected[name].detach()
            if whole.dtype != wanted.dtype or whole.shape != wanted.shape:
                found.append(f"{name}: {whole.dtype} {tuple(whole.shape)}, not {wanted.dtype} {tuple(wanted.shape)}")
            elif not parity._same_bytes(whole.reshape(-1), wanted.reshape(-1)):
                found.append(f"{name}: {int((whole != wanted).sum())} of {wanted.numel()} elements differ")
    return found


def _over_mesh(shape: Callable[[int], tuple[int, ...]], *, columns: bool = False) -> Callable[..., Loaded]:
    """Returns a load over a mesh; `columns` shards along dim 1 where that divides evenly."""

    def load(cls: Any, path: str, reference: nn.Module, dtype: torch.dtype) -> Loaded:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard

        from lowmem_load import load_model, load_report
        from lowmem_load.dtensor.mesh import shard_fully
        from lowmem_load.hf.names import blocks

        sizes = shape(dist.get_world_size())
        mesh = init_device_mesh("cpu", sizes)

        def place(parameter: nn.Parameter) -> Shard:
            return Shard(1) if parameter.ndim > 1 and parameter.shape[1] % sizes[-1] == 0 else Shard(0)

        policy: dict[str, Any] = {"shard_placement_fn": place} if columns else {}
        trial = copy.deepcopy(reference).to("meta")
        try:
            shard_fully(trial, mesh, blocks(trial), policy)
        except Exception as error:
            raise UnshardableError(f"fully_shard: {error}") from error
        model = load_model(path, mesh, auto_class=cls, dtype=dtype, policy=policy)
        return model, load_report(model).loading_info

    return load


def _by_config(**sizes: int) -> Callable[..., Loaded]:
    """Returns a load by a `DistributedConfig`; fsdp_size makes up for the rest of the world."""

    def load(cls: Any, path: str, reference: nn.Module, dtype: torch.dtype) -> Loaded:
        from lowmem_load import load_model, load_report

        model = load_model(path, _config(reference, sizes), auto_class=cls, dtype=dtype)
        return model, load_report(model).loading_info

    return load


def _transformers(cls: Any, path: str, reference: nn.Module, dtype: torch.dtype) -> Loaded:
    """Loads as transformers itself does with fsdp_size."""
    model, info = cls.from_pretrained(
        path, distributed_config=_config(reference, {}), dtype=dtype, output_loading_info=True
    )
    return model, info


def _config(reference: Any, sizes: dict[str, int]) -> Any:
    import torch.distributed as dist
    from transformers.distributed import DistributedConfig

    rest = dist.get_world_size() // sizes.get("tp_size", 1)
    config = DistributedConfig(**sizes, fsdp_size=rest)
    try:
        copy.deepcopy(reference)._resolve_parallel_plans(config)
    except Exception as error:
        raise UnshardableError(f"transformers has no plan: {error}") from error
    return config


LOADS: dict[str, Callable[..., Loaded]] = {
    "fsdp": _over_mesh(lambda world_size: (world_size,)),
    "columns": _over_mesh(lambda world_size: (world_size,), columns=True),
    "hsdp": _over_mesh(lambda world_size: (2, world_size // 2)),
    "tp": _by_config(tp_size=2),
    "ep": _by_config(tp_size=2, ep_size=2),
    "transformers": _transformers,
}
"""Ways to load a sharded model; the last is transformers' own."""
