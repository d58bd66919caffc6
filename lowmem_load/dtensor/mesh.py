"""FSDP2 over a device mesh, and the device of a sharded model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    _flat_param,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor, placement_types

from lowmem_load.errors import UnsupportedError
from lowmem_load.replaced import Replacement, replaced


def is_mesh(value: object) -> bool:
    """Return whether this is a `DeviceMesh`."""
    return isinstance(value, DeviceMesh)


def offloads(policy: Mapping[str, Any]) -> bool:
    """Return whether the keywords of `fully_shard` keep shards in host memory."""
    return isinstance(policy.get("offload_policy"), CPUOffloadPolicy)


def shard_fully(model: nn.Module, mesh: Any, blocks: Iterable[nn.Module], policy: Mapping[str, Any]) -> None:
    """Apply `fully_shard` to blocks, then to the model. `policy` has its other keywords."""
    for block in blocks:
        fully_shard(block, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)


def reshard(model: nn.Module) -> None:
    """Put the DTensors back in the place of what FSDP2 keeps gathered, as after a forward without gradients. Local.

    Raises:
        UnsupportedError: FSDP1, whose parameters do not say which part of which tensor they are, wraps a module.
    """
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise UnsupportedError(
                f"{name or type(model).__name__}: is wrapped by FSDP1 (FullyShardedDataParallel), whose shards cannot "
                "be told apart; use FSDP2 (fully_shard), or FSDP1's own state dicts"
            )
        if isinstance(module, FSDPModule):
            module.reshard()


def mesh_device(model: nn.Module) -> torch.device:
    """Return the device of the mesh over which a model is sharded."""
    kind = next((each.device_mesh.device_type for each in model.parameters() if isinstance(each, DTensor)), "cpu")
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def fsdp_over_all_ranks(
    device_type: str,
    world_size: int,
    *,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool,
    offload_params: bool,
    pin_memory: bool,
) -> tuple[DeviceMesh, dict[str, Any]]:
    """Return a mesh of all ranks, and the other keywords of `fully_shard`. Gradients are reduced in fp32."""
    policy: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32),
        "reshard_after_forward": reshard_after_forward,
    }
    if offload_params:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=pin_memory)
    return init_device_mesh(device_type, (world_size,)), policy


def made_real(make_real: Callable[[torch.Tensor], torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Inside, what torch reads past its dispatcher goes through `make_real` first. For all threads.

    c10d scatters a list of lists, and FSDP1 gives its flat parameters other storages.

    Source: torch 2.13 `distributed/tensor/placement_types.py`, `Shard._shard_tensor`;
    `distributed/fsdp/_flat_param.py`, `FlatParamHandle.flatten_tensors`.
    """

    def scatter(ordinary: Any, output: torch.Tensor, parts: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        return ordinary(output, [make_real(part) for part in parts], *args, **kwargs)

    def flatten(ordinary: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return make_real(ordinary(*args, **kwargs))

    replacements: list[Replacement] = [(placement_types, "mesh_scatter", scatter)]
    replacements.append((_flat_param.FlatParamHandle, "flatten_tensors", flatten))
    return replaced(*replacements, everywhere=True)


def scatter_into(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Fill a parameter or buffer with the values of the first rank. Collective: of its mesh, or of all without one."""
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            values = values.to(tensor.device_mesh.device_type, tensor.dtype)
            tensor.copy_(distribute_tensor(values, tensor.device_mesh, tensor.placements))
        else:
            held = values.to(tensor.device, tensor.dtype, copy=True).contiguous()
            dist.broadcast(held.view(-1).view(torch.uint8), 0)  # gloo knows fewer dtypes than torch
            tensor.copy_(held)
