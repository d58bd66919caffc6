"""A digest of a loaded model that is the same for any number of ranks and any partitioning.

[Note: sums of values] Ranks hold ranges of a tensor that begin and end anywhere. So the digest of a tensor is made of
sums that can be added up from those of any pieces, in any order. The bytes are taken as integers m of 8 bits (if an
element is one byte) or of 16 bits, in blocks b of 1024. There are 8 lanes. Each lane is

    sum over b of u[b] * (sum over j of k[j] * m[b, j])   modulo 2**64

with its own keys k of 27 bits and u of 64 bits. The inner sum stays below 2**53, so float64 holds it exactly.

Two tensors that differ have equal sums with a probability below 2**-200: below 2**-26 for each of the independent
lanes. (In a block that differs, at most one value in 2**27 of some k[j] makes the inner sums equal; otherwise u[b]
hides the difference with at most 2**-36.) The keys are expanded from a constant and public: whoever chooses the weights
can make two tensors with equal sums. So the digest is a check against accidents, not against forgery.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import nn

from lowmem_load.distributed.exchange import added_up
from lowmem_load.distributed.group import RankGroup
from lowmem_load.saving.local_shards import group_of, local_shard_of, unwrapped
from lowmem_load.text import fingerprint

LANES = 8
BLOCK_UNITS = 1024
PIECE_BLOCKS = 512
"""Blocks that are summed at a time: 4 MiB as float64."""

_KEY_BITS = 27  # with 10 bits of the block and 15 of a signed unit: below 2**53, where float64 is exact
_HALF_BITS, _HALF = np.uint64(32), np.uint64((1 << 32) - 1)
_VERSION = b"lowmem_load model_digest 1\n"


def model_digest(model: nn.Module) -> dict[str, str]:
    """Return a digest of each parameter and persistent buffer of a model, without gathering any.

    They are the same for any number of ranks and any partitioning (ZeRO, offload, DTensors), and for an ordinary
    `from_pretrained` in a plain process. So two loads, or a load and what was saved of it, are equal if their digests
    are. Of replicas the first one is digested; under an engine, the parameters, not the optimizer's copies.

    Collective: all ranks of the partition group, if parameters are partitioned. Call it between steps, not inside
        `GatheredParameters`, whose changes reach the partitions when the block ends.
    Memory: a few MiB, and a copy of a replicated parameter that is not contiguous.

    Args:
        model: of transformers or any other, or an engine, DDP or what torch.compile returned that holds one.

    Returns:
        Hex, by the first name of each tensor. A digest covers all names of the tensor, its shape, dtype and values.

    Raises:
        UnsupportedError: names a parameter or buffer that has no values on this rank, or that nvme has no buffer for.
        RankError: another rank failed.
    """
    parts = [_Part(names, tensor) for names, tensor in _distinct(unwrapped(model))]
    keys, groups = Keys(), list(dict.fromkeys(part.group for part in parts if part.group is not None))
    with RankGroup(groups[0]).step("digesting the model") if groups else contextlib.nullcontext():
        for part in parts:
            part.take(keys)
    for group in groups:
        together, ranks = [part for part in parts if part.group is group], RankGroup(group)
        with ranks.step("adding up the digests") as step:
            step.digest = {"tensors": fingerprint(part.names[0] for part in together)}
        with ranks.step("receiving the sums of all ranks"):
            # Not through the store: each rank would read the sums of all. As halves, of which no sum overflows.
            sums = np.array([part.sums for part in together], np.uint64)
            halves = torch.from_numpy(np.stack([sums & _HALF, sums >> _HALF_BITS]).astype(np.int64))
            low, high = added_up(ranks, halves).numpy().astype(np.uint64)
        for part, of_all in zip(together, (low + (high << _HALF_BITS)).tolist(), strict=True):
            part.sums = tuple(of_all)
    return {part.names[0]: part.hexdigest() for part in parts}


class _Part:
    """A parameter or buffer. `group` are the ranks that hold its pieces; None if this rank holds it in full.

    `sums` has the sum of each lane: first of this rank's elements, then of the whole tensor.
    """

    def __init__(self, names: list[str], tensor: torch.Tensor) -> None:
        self.names, self.group, self.sums = names, group_of(tensor), (0,) * LANES
        self._tensor, self._shape = tensor, tuple(tensor.shape)

    def take(self, keys: Keys) -> None:
        shard = local_shard_of(self.names[0], self._tensor, 0, masters=False)  # rank 0 takes what is whole
        self._shape = shard.source.shape
        with shard.memory() as pieces:
            self.sums = add([self.sums, *(sums_of(memory, first, keys) for memory, first in pieces)])

    def hexdigest(self) -> str:
        head = (*sorted(self.names), str(self._shape), str(self._tensor.dtype))
        lines = (*head, *(f"{lane:016x}" for lane in self.sums))
        return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def _distinct(model: nn.Module) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Yield each parameter and each persistent buffer once, with all of its names in order."""
    persistent = model.state_dict(keep_vars=True)
    buffers = [(name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if name in persistent]
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *buffers):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    for number, tensor in tensors.items():
        yield names[number], tensor


# -- sums ------------------------------------------------------------------------------------------------------------


class Keys:
    """The keys of all lanes. See [Note: sums of values]."""

    def __init__(self) -> None:
        nbytes = BLOCK_UNITS * LANES * 4
        drawn = hashlib.shake_256(_VERSION).digest(nbytes + 16)
        inner = np.frombuffer(drawn, "<u4", BLOCK_UNITS * LANES) >> (32 - _KEY_BITS)
        self.inner = torch.from_numpy(inner.astype(np.float64)).view(BLOCK_UNITS, LANES)
        self._outer = np.frombuffer(drawn, "<u8", 2, nbytes)

    def outer(self, first_block: int, num_blocks: int) -> np.ndarray:
        """Return the keys of consecutive blocks. Shape: `(num_blocks, LANES)`, uint64."""
        generator = np.random.Philox(counter=[first_block * LANES // 4, 0, 0, 0], key=self._outer)  # 4 at each count
        return generator.random_raw(num_blocks * LANES).reshape(num_blocks, LANES)


def sums_of(values: torch.Tensor, start: int, keys: Keys) -> tuple[int, ...]:
    """Return what flat elements, of which the first is element `start` of a tensor, add to the sum of each lane."""
    total = np.zeros(LANES, np.uint64)
    units = values.view(torch.int8 if values.itemsize == 1 else torch.int16)
    inner = keys.inner.to(units.device)
    staged = torch.empty(PIECE_BLOCKS, BLOCK_UNITS, dtype=torch.float64, device=units.device)
    for first_block, num_blocks, before, piece in _pieces(units, start * max(1, values.itemsize // 2)):
        flat = staged[:num_blocks].view(-1)
        flat[:before].zero_()
        flat[before : before + piece.numel()].copy_(piece)
        flat[before + piece.numel() :].zero_()
        sums = torch.mm(staged[:num_blocks], inner).to(torch.int64).cpu().numpy().view(np.uint64)
        total += (sums * keys.outer(first_block, num_blocks)).sum(0, dtype=np.uint64)
    return tuple(int(lane) for lane in total)


def add(sums: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the sums of a tensor, given those of its pieces."""
    return tuple(sum(lanes) % (1 << 64) for lanes in zip(*sums, strict=True))


def _pieces(units: torch.Tensor, start: int) -> Iterator[tuple[int, int, int, torch.Tensor]]:
    """Yield of each piece: first block, number of blocks, units before it in the first block, and its units."""
    done = 0
    while done < units.numel():
        block, before = divmod(start + done, BLOCK_UNITS)
        piece = units[done : done + PIECE_BLOCKS * BLOCK_UNITS - before]
        yield block, -(-(before + piece.numel()) // BLOCK_UNITS), before, piece
        done += piece.numel()
