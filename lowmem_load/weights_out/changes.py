"""Changes: elements that differ from what was sent last, in messages, and as flat indices of the tensors. No ranks.

[Note: changes] A rank keeps its last message of each bucket, the snapshot, and sends of each part only the elements
whose bits differ. A message of changes has a count for each part of the full message, and then for each part the
positions in it and the values there; or all values, and `ALL` as count, if those are fewer bytes. Each of these begins
at a multiple of `ALIGNMENT`. Receivers know the nest of each part, which turns positions into indices of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from lowmem_load.errors import ConfigError
from lowmem_load.files.memory import source_elements
from lowmem_load.planning.expression import Shape
from lowmem_load.planning.nest import Nest
from lowmem_load.weights_out.buckets import ALIGNMENT, MessagePart, PlannedTensor

ALL = -1

CHUNK_NUMEL = 1 << 20
"""Elements that are compared at a time: what that takes stays in the processor's cache."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes that tell NaNs and zeros apart, by itemsize."""


class Change(NamedTuple):
    """What differs in a tensor: `tensor.view(-1)[indices] = values`. `shape` is that of the full tensor.

    The indices are int32, or int64 for a tensor that has more elements than int32 can count. None comes twice.

    Example:
        for bucket in iter_weights(engine, changed_only=True):  # on every rank
            for name, new in bucket:
                num_changed = len(new.indices) if isinstance(new, Change) else new.numel()
    """

    indices: torch.Tensor
    values: torch.Tensor
    shape: Shape


def apply_changes(state: Mapping[str, torch.Tensor], changes: Iterable[tuple[str, torch.Tensor | Change]]) -> None:
    """Write a bucket of `iter_weights(changed_only=True)` into tensors, in place.

    Args:
        state: full tensors by the names of the checkpoint, such as those that came the first time.
        changes: the bucket.

    Raises:
        ConfigError: a name is not in the state, or a shape, dtype or index does not fit it. Nothing was written then.

    Example:
        state = {name: tensor.clone() for bucket in iter_weights(engine) for name, tensor in bucket}
        for bucket in iter_weights(engine, changed_only=True):  # on every rank
            apply_changes(state, bucket)
    """
    pairs = list(changes)
    for name, new in pairs:
        _check(name, state.get(name), new)
    for name, new in pairs:
        tensor = state[name].detach()
        if isinstance(new, Change):  # `put_` does not know every dtype, such as float8
            bits = tensor.view(_BITS[tensor.dtype.itemsize])
            bits.put_(new.indices.to(bits.device, torch.int64), new.values.to(bits.device).view(bits.dtype))
        else:
            tensor.copy_(new)


def _check(name: str, tensor: torch.Tensor | None, new: torch.Tensor | Change) -> None:
    """Raise ConfigError unless a change fits the tensor of its name."""
    values = new.values if isinstance(new, Change) else new
    found = "" if tensor is None else f"is {tensor.dtype} of shape {tuple(tensor.shape)}"
    if tensor is None:
        error = "is not in the state"
    elif (tensor.dtype, tuple(tensor.shape)) != (values.dtype, tuple(new.shape)):
        error = f"{found}, but the change is {values.dtype} of shape {tuple(new.shape)}"
    elif isinstance(new, Change) and (new.indices.ndim, new.indices.shape) != (1, values.shape):
        error = f"has {tuple(new.indices.shape)} indices for {tuple(values.shape)} values"
    elif isinstance(new, Change) and len(values) and not 0 <= new.indices.min() <= new.indices.max() < tensor.numel():
        error = f"{found}, but indices reach from {new.indices.min()} to {new.indices.max()}"
    else:
        return
    raise ConfigError(f"apply_changes: {name}: {error}; give it the state that took all changes so far, from the first")


def changed_elements(
    nest: Nest, memory: torch.Tensor, before: torch.Tensor, device: torch.device
) -> list[torch.Tensor]:
    """Return the positions in a part that changed and the values there, or all values. `before` gets the present ones.

    `memory` is flat, as for the nest; `before` is the part of the snapshot.
    """
    positions, values, first = [], [], 0
    bits = _BITS[before.dtype.itemsize]
    for piece in nest.split(CHUNK_NUMEL):
        present = source_elements(piece, memory).to(device)
        for dtype in piece.casts:
            present = present.to(dtype)
        present = present.reshape(-1)
        last = before[first : first + len(present)]
        if len(found := (present.view(bits) != last.view(bits).to(device)).nonzero().view(-1)):
            positions.append((found + first).to(_position_dtype(nest.numel)))
            values.append(present.view(bits)[found])  # torch does not index every dtype
            last.copy_(present)
        first += len(present)
    if not positions:
        return [torch.empty(0, dtype=_position_dtype(nest.numel)), before[:0]]
    pair = [torch.cat(positions), torch.cat(values).view(before.dtype)]
    return pair if sum(piece.nbytes for piece in pair) < before.nbytes else [before]


def pack(parts: Iterable[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return what a message of changes has, given the `changed_elements` of each part."""
    parts = list(parts)
    counts = torch.tensor([len(part[0]) if len(part) > 1 else ALL for part in parts], dtype=torch.int64)
    return [counts, *(piece for part in parts for piece in part)] if parts else []


def packed_bytes(pieces: Iterable[torch.Tensor]) -> int:
    """Return the bytes of a message."""
    return sum(_aligned(piece.nbytes) for piece in pieces)


def write_message(pieces: Iterable[torch.Tensor], message: torch.Tensor) -> None:
    """Write what was packed into the bytes of a message."""
    start = 0
    for piece in pieces:
        message[start : start + piece.nbytes].view(piece.dtype).copy_(piece)
        start += _aligned(piece.nbytes)


def read_message(
    message: torch.Tensor, parts: Iterable[MessagePart], tensors: Sequence[PlannedTensor]
) -> Iterator[tuple[MessagePart, torch.Tensor | None, torch.Tensor]]:
    """Yield the positions (None for all) and values of each part of a message, as views of it."""
    parts, start = list(parts), 0

    def take(numel: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal start
        taken = message[start : start + numel * dtype.itemsize].view(dtype)
        start += _aligned(taken.nbytes)
        return taken

    for part, count in zip(parts, take(len(parts), torch.int64).tolist(), strict=True):
        numel, dtype = part.nest.numel, tensors[part.number].dtype
        positions = None if count == ALL else take(count, _position_dtype(numel))
        yield part, positions, take(numel if count == ALL else count, dtype)


def change_of(shape: Shape, parts: Sequence[tuple[Nest, torch.Tensor | None, torch.Tensor]]) -> Change:
    """Return the change of a tensor from the nests, positions and values of its parts."""
    indices, values = [], []
    for nest, positions, present in parts:
        places = torch.arange(nest.numel, device=present.device) if positions is None else positions
        indices.append(flat_indices(nest, places).to(_position_dtype(math.prod(shape))))
        values.append(present.view(_BITS[present.dtype.itemsize]))
    return Change(torch.cat(indices), torch.cat(values).view(parts[0][2].dtype), shape)


def flat_indices(nest: Nest, positions: torch.Tensor) -> torch.Tensor:
    """Return the elements of the destination to which those at positions of a part go, in the order of its axes."""
    rest, indices = positions.to(torch.int64), torch.full_like(positions, nest.destination, dtype=torch.int64)
    for size, _, stride in reversed(nest.axes[1:]):
        indices += rest % size * stride
        rest = rest // size
    return indices.add_(rest, alpha=nest.axes[0].destination) if nest.axes else indices


def _position_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel <= torch.iinfo(torch.int32).max else torch.int64


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT
