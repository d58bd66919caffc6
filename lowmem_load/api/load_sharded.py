"""Loads of models that transformers shards by a `DistributedConfig`, or FSDP2 over a device mesh."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lowmem_load.api.load_into import load_into
from lowmem_load.api.request import spelled
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.dtensor.mesh import is_mesh, mesh_device, offloads, shard_fully
from lowmem_load.errors import ConfigError
from lowmem_load.hf import intercept, loader, names
from lowmem_load.hf.active import ordinary_path
from lowmem_load.hf.intercept import load_lock
from lowmem_load.hf.skeleton import allocate, file_keywords, filled_by
from lowmem_load.report import OnLoad

_SHARDS = ("distributed_config", "tp_plan", "tp_size")
"""Keywords by which `from_pretrained` shards a model."""


def is_sharding(target: Any) -> bool:
    """Return whether the second argument of `load_model` is a `DistributedConfig` or a `DeviceMesh`."""
    return names.is_distributed_config(target) or is_mesh(target)


def load_sharded(
    name: str | os.PathLike[str],
    sharding: Any,
    *,
    auto_class: str | type | None,
    dtype: str | torch.dtype | None,
    progress: bool | None,
    verify: bool,
    policy: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Do what `load_model` does with a `DistributedConfig`, or a `DeviceMesh` and the policy of `fully_shard`."""
    ranks = DistributedInterface()
    policy_of_mesh = policy or {}
    with load_lock(), ranks.session("the load"):
        with ranks.step("checking the arguments") as step:
            where = spelled(name)
            config = names.model_config(where, kwargs)
            cls = names.model_class(auto_class, config, bool(kwargs.get("trust_remote_code")))
            if policy is not None and not is_mesh(sharding):
                raise ConfigError("policy: goes with a DeviceMesh; a DistributedConfig has its own")
            step.digest = {"as sharding": str(sharding), "policy": str(sorted(map(str, policy_of_mesh)))}

        def shard(model: nn.Module) -> None:
            if is_mesh(sharding):
                shard_fully(model, sharding, names.blocks(model), policy_of_mesh)

        if not is_mesh(sharding):
            kwargs["distributed_config"] = sharding
        filling = _filling(
            where, kwargs, shard, is_offloaded=offloads(policy_of_mesh), progress=progress, verify=verify
        )
        with filling:
            return cls.from_pretrained(where, **{names.DTYPE_KEYWORD: dtype}, **kwargs)


def sharded_calls(
    *, progress: bool | None, verify: bool, on_load: OnLoad | None = None, everywhere: bool = False
) -> Any:
    """Return a block in which `from_pretrained(distributed_config=...)` loads as `load_model` does."""

    def load(call: loader.Call) -> tuple[nn.Module, dict[str, Any]]:
        with _filling(call.name, call.kwargs, progress=progress, verify=verify, on_load=on_load):
            return call.run()

    return intercept.intercepted(load, _is_sharded, everywhere=everywhere)


def _is_sharded(kwargs: Mapping[str, Any]) -> bool:
    return any(kwargs.get(keyword) is not None for keyword in _SHARDS)


@contextmanager
def _filling(
    name: str,
    kwargs: Mapping[str, Any],
    shard: Callable[[nn.Module], None] = lambda _: None,
    *,
    is_offloaded: bool = False,
    progress: bool | None,
    verify: bool,
    on_load: OnLoad | None = None,
) -> Iterator[None]:
    """Inside, a `from_pretrained` of these keywords reads what each rank's shards hold."""

    def fill(model: nn.Module, dtype: torch.dtype) -> Mapping[str, Any]:
        shard(model)
        on_host = is_offloaded or names.offloads(model)
        allocate(model, torch.device("cpu") if on_host else mesh_device(model))
        with intercept.outermost():
            report = load_into(model, name, dtype=dtype, progress=progress, verify=verify, **file_keywords(kwargs))
        if on_load is not None:
            on_load(report)
        return report.loading_info

    with ordinary_path(), filled_by(fill):
        yield
