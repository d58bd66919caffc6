"""What a device mesh shards: FSDP2 over it, and which elements of a tensor this rank has, in which memory.

The only module that touches private names of DTensor. Checked against torch 2.13.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, debug
from torch.distributed.tensor.placement_types import _StridedShard

from lowmem_load import foreign_names
from lowmem_load.errors import UnsupportedError
from lowmem_load.planning.regions import Cuts, Grid, Mesh, Split, grid_of
from lowmem_load.replaced import replaced


def is_mesh(value: object) -> bool:
    """Return whether this is a `DeviceMesh`."""
    return isinstance(value, DeviceMesh)


def offloads(policy: Mapping[str, Any]) -> bool:
    """Return whether the keywords of `fully_shard` keep shards in host memory."""
    return isinstance(policy.get("offload_policy"), CPUOffloadPolicy)


POLICY = inspect.signature(fully_shard).parameters.keys() - {"module", "mesh"}
"""Keywords of `fully_shard` that say how it shards."""


def shard_fully(model: nn.Module, mesh: Any, blocks: Iterable[nn.Module], policy: Mapping[str, Any]) -> None:
    """Apply `fully_shard` to blocks, then to the model. `policy` has its other keywords."""
    for block in blocks:
        fully_shard(block, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)


def reshard(model: nn.Module) -> None:
    """Put the DTensors back in the place of what FSDP2 keeps gathered, as after a forward without gradients. Local.

    Raise UnsupportedError for FSDP1, whose parameters do not say which part of which tensor they are.
    """
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise UnsupportedError(
                f"{name or type(model).__name__}: is wrapped by FSDP1 (FullyShardedDataParallel), whose flat "
                "parameters have no placements; use FSDP2 (torch.distributed.fsdp.fully_shard)"
            )
        if isinstance(module, FSDPModule):
            module.reshard()


def dtypes_of_computation(model: nn.Module) -> set[torch.dtype]:
    """Return the dtypes to which FSDP2 casts what it gathers.

    Source: torch 2.13 `distributed/fsdp/_fully_shard/_fsdp_state.py`, `FSDPState._mp_policy`.
    """
    modules = (module for module in model.modules() if isinstance(module, FSDPModule))
    policies = (module._get_fsdp_state()._mp_policy for module in modules)
    return {policy.param_dtype for policy in policies if policy.param_dtype is not None}


def forget_meshes() -> None:
    """Drop the meshes of another rank, for which this process has planned: torch keeps them with results of operations.

    Source: torch 2.13 `distributed/tensor/debug/__init__.py`. Older ones lack it, and plan one rank a process.
    """
    getattr(debug, "_clear_sharding_prop_cache", lambda: None)()


def host_mesh(shape: Sequence[int]) -> DeviceMesh:
    """Return a mesh of all ranks on their CPUs."""
    return init_device_mesh("cpu", tuple(shape))


def mesh_device(model: nn.Module) -> torch.device:
    """Return the device of the mesh over which a model is sharded."""
    kind = next((p.device_mesh.device_type for p in model.parameters() if isinstance(p, DTensor)), "cpu")
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def made_real(make_real: Callable[[torch.Tensor], torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Inside, what torch reads past its dispatcher goes through `make_real` first. For all threads.

    c10d scatters a list of lists, and FSDP1 gives its flat parameters other storages.

    Source: torch 2.13 `distributed/tensor/placement_types.py`, `Shard._shard_tensor`;
    `distributed/fsdp/_flat_param.py`, `FlatParamHandle.flatten_tensors`.
    """

    def scatter(ordinary: Any, output: Any, scatter_list: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        return ordinary(output, [make_real(part) for part in scatter_list], *args, **kwargs)

    def flatten(ordinary: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return make_real(ordinary(*args, **kwargs))

    return replaced({foreign_names.MESH_SCATTER: scatter, foreign_names.FLATTEN_TENSORS: flatten}, everywhere=True)


def part_of(values: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return the elements of a full tensor that are in a grid, flat and in its order."""
    values = values.reshape(values.shape or (1,))
    for dim, runs in enumerate(grid.runs):
        parts = [values.narrow(dim, start, end - start) for start, end in runs]
        values = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return values.reshape(-1)


# -- what this rank has of a DTensor -----------------------------------------------------------------------------------

CUTS_AS_HERE = Version(Version(torch.__version__).public) >= Version("2.11")
"""Whether torch cuts a dim by a stride that does not divide it as `grid_of` does: 2.8 gives ranks other elements."""


def local_shard(name: str, tensor: torch.Tensor, *, needs_memory: bool) -> tuple[Grid, torch.Tensor]:
    """Return the elements of a tensor that this rank owns, and the memory that has them: flat, row-major. Local.

    Unless it is a DTensor, each rank owns all of it. Without `needs_memory` it may be on the meta device.
    """
    grid, local = grid_of(tensor.shape, ()), tensor.detach()
    if isinstance(tensor, DTensor):
        mesh, grid = tensor.device_mesh, Grid((((0, 0),),))
        if mesh.get_coordinate():  # else this rank is not part of the mesh, so it owns nothing
            splits = dict(_splits(name, tensor))
            _check_places(name, mesh, list(splits))
            # Not the coordinate: a group has its ranks in ascending order, in whatever order the mesh has them.
            numbered = (replace(split, index=dist.get_rank(mesh.get_group(dim))) for dim, split in splits.items())
            grid = grid_of(tensor.shape, numbered)
        local = tensor._local_tensor.detach()
        if tuple(local.shape) != grid.sizes and grid.numel + local.numel():
            raise UnsupportedError(
                f"{name}: its placements {tensor.placements} on a mesh of {tuple(tensor.device_mesh.shape)} give this "
                f"rank a shard of shape {grid.sizes}, but its local tensor has shape {tuple(local.shape)}"
            )
    if local.is_meta and needs_memory:
        raise UnsupportedError(f"{name}: has no memory (meta device); call model.to_empty(device=...) first")
    if needs_memory and not local.is_contiguous():
        raise UnsupportedError(f"{name}: its memory is not contiguous; set its data to data.contiguous()")
    return grid, local.reshape(-1)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a DTensor; any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def all_ranks() -> Any:
    """Return the default process group, whose ranks own the shards of all DTensors together."""
    return dist.group.WORLD


def _check_places(name: str, mesh: DeviceMesh, dims: Sequence[int]) -> None:
    """Raise UnsupportedError if the order of a mesh gives two of its ranks one part along these dims."""
    if len(dims) < 2:
        return
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    ranks = mesh.mesh[tuple(slice(None) if dim in dims else index for dim, index in enumerate(coordinate))]
    places = torch.stack([ranks.argsort(dim).argsort(dim) for dim in range(ranks.ndim)])
    if len(set(zip(*places.flatten(1).tolist(), strict=True))) < ranks.numel():
        raise UnsupportedError(
            f"{name}: torch sorts the ranks of each process group, so the mesh {mesh.mesh.tolist()} gives several "
            "ranks the same part of this tensor, and some parts to none; make a mesh whose ranks are in one order "
            "along each dim"
        )


def is_first_replica(tensor: Any) -> bool:
    """Return whether this rank is the first of those that own equal shards of a DTensor.

    Replicas lie along the mesh dims of `Replicate`. Where the mesh is one of several equal parts of a root mesh, each
    part has a replica; the first part has the first rank of the root.
    """
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None or _root_mesh(mesh).mesh.flatten()[0] not in mesh.mesh:
        return False
    along = zip(coordinate, tensor.placements, strict=True)
    return not any(index for index, placement in along if isinstance(placement, Replicate))


def _root_mesh(mesh: Any) -> Any:
    # Source: torch 2.13 `distributed/device_mesh.py`, `DeviceMesh._get_root_mesh`; `_mesh_resources` before 2.10.
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.get_root_mesh(mesh)


def cuts_of(name: str, tensor: Any, meshes: dict[Any, Rooted]) -> Cuts:
    """Return the rule by which a DTensor lies on all ranks. `meshes` has those of tensors before, and gets its own."""
    mesh, dims = _rooted(tensor.device_mesh, meshes)
    cuts = []
    for mesh_dim, split in _splits(name, tensor):
        if (along := dims[mesh_dim]) is None:
            raise UnsupportedError(
                f"{name}: dim {mesh_dim} of {tensor.device_mesh} is not a dim of the mesh that it was made of; slice "
                "that one, or flatten some of its dims"
            )
        cuts.append((along, split))
    return Cuts(tuple(tensor.shape), mesh, tuple(cuts))


def chunks_of(tensor: Any, kinds: Any) -> tuple[Any, ...]:
    """Return ranks, shape and placements of the mesh of a DTensor, if it is `torch.chunk` among all ranks in order.

    Otherwise nothing. `kinds` may have classes in the place of torch's `Shard` and `Replicate`.
    """
    mesh, everyone = tensor.device_mesh.mesh, tuple(range(dist.get_world_size()))
    if tuple(mesh.flatten().tolist()) != everyone or not {*map(type, tensor.placements)} <= {Shard, Replicate}:
        return ()
    shard, replicate = getattr(kinds, "Shard", Shard), getattr(kinds, "Replicate", Replicate)
    placed = [shard(one.dim % tensor.ndim) if isinstance(one, Shard) else replicate() for one in tensor.placements]
    return everyone, tuple(mesh.shape), tuple(placed)


Rooted: TypeAlias = "tuple[Mesh, list[tuple[int, ...] | None]]"
"""The mesh from which a mesh was sliced or flattened, and those of its dims that each dim of the latter runs along."""


def _rooted(mesh: Any, meshes: dict[Any, Rooted]) -> Rooted:
    if mesh not in meshes:
        root = _root_mesh(mesh)
        ranks = tuple(root.mesh.flatten().tolist())
        whole = Mesh(ranks, tuple(root.mesh.shape)) if mesh is root else _rooted(root, meshes)[0]
        lines = (mesh.mesh.movedim(dim, 0).flatten(1)[:, 0] if mesh.ndim > 1 else mesh.mesh for dim in range(mesh.ndim))
        meshes[mesh] = whole, [whole.dims_along(line.tolist()) for line in lines]
    return meshes[mesh]


def holders(tensor: Any, world_size: int, known: dict[Any, Sequence[int]]) -> Sequence[int]:
    """Return the ranks that own the same elements as this one; none where that is not known.

    `known` has those of tensors before, and gets its own.
    """
    if not isinstance(tensor, DTensor):
        return range(world_size)
    mesh, is_replica = tensor.device_mesh, tuple(isinstance(placement, Replicate) for placement in tensor.placements)
    key = mesh, is_replica
    if key not in known:
        root, dims = _rooted(mesh, {})
        along = {mesh_dim: dims[mesh_dim] for mesh_dim, is_alike in enumerate(is_replica) if not is_alike}
        known[key] = ()
        if mesh.get_coordinate() is not None and None not in along.values():
            numbers = [root.group_ranks(root_dims or ()) for root_dims in along.values()]
            places = {rank: [numbered[rank] for numbered in numbers] for rank in root.ranks}
            own = [dist.get_rank(mesh.get_group(mesh_dim)) for mesh_dim in along]
            if places[dist.get_rank()] == own:
                known[key] = tuple(sorted(rank for rank, place in places.items() if place == own))
    return known[key]


def _splits(name: str, tensor: DTensor) -> Iterator[tuple[int, Split]]:
    """Yield each dim of the mesh that cuts a tensor, and the split, of which the index is that of the first rank."""
    mesh, sizes = tensor.device_mesh, list(tensor.shape)
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise UnsupportedError(
                f"{name}: has the placement {placement}, which no checkpoint can fill; redistribute it to Shard or "
                "Replicate first"
            )
        split_factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        split = Split(placement.dim % tensor.ndim, mesh.size(mesh_dim), 0, split_factor)
        is_even = sizes[split.dim] % (split.num_chunks * split_factor) == 0
        if split_factor > 1 and not (is_even or CUTS_AS_HERE):
            raise UnsupportedError(
                f"{name}: torch {torch.__version__} cuts a dim of {sizes[split.dim]} elements by {placement} otherwise "
                "than newer releases; install torch>=2.11, or choose sizes that divide it"
            )
        # After an uneven split sizes differ between ranks; 1 makes every later strided split uneven, too.
        sizes[split.dim] = sizes[split.dim] // split.num_chunks if is_even else 1
        yield mesh_dim, split
