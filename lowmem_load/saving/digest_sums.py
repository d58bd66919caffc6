"""The sum that stands for the values of a tensor, added up from any pieces of it. Pure; works where the tensor lies.

[Note: sums of values] Ranks hold ranges of a tensor that begin and end anywhere, and more ranks cut elsewhere. So its
sum must be the sum, in any order, of those of any pieces. The bytes are taken as integers m of 8 bits (where an element
is one byte) or 16, in blocks b of 1024. There are 8 lanes. Each is

    sum over b of u[b] * (sum over j of k[j] * m[b, j])   modulo 2**64

with keys k of 27 and u of 64 bits, other ones for each lane. The inner sum stays below 2**53 and is a product of
matrices of float64, exact in whatever order it is added up; so it runs at the speed of BLAS.

What it proves: two tensors that differ, and were not made with the keys in view, have equal sums with a probability
below 2**-200 over the choice of the keys. (In a block that differs, at most one value in 2**27 of some k[j] makes the
inner sums equal; where they differ, u[b] hides it with at most 2**-36. So it is below 2**-26 for each of 8 independent
lanes.) No kind of damage is likelier to pass than another: flipped bits, swapped stretches, a shift, bytes of another
tensor. The keys are expanded from a constant by SHAKE-256 and Philox, taken to be as good as drawn. They are public, so
somebody who chooses the weights can make two tensors of equal sums: it is a check against accidents. Against forgery
there is `verify_checkpoint`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch

LANES = 8
BLOCK_UNITS = 1024
PIECE_BLOCKS = 512
"""Blocks that are worked on at a time: 4 MiB as float64."""

_KEY_BITS = 27  # 10 bits of the block, 15 of a signed unit: below 2**53, to where float64 knows every integer
_VERSION = b"lowmem_load model_digest 1\n"


class Keys:
    """The keys of all lanes."""

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
    """Return what elements of a tensor contribute to its sum, for each lane.

    Memory: 5 MiB beside `values`, on its device.

    `values` are flat and contiguous, of any dtype; the first of them is element `start` of the whole tensor.
    """
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
    """Return the sum of pieces that together make a tensor."""
    return tuple(sum(lanes) % (1 << 64) for lanes in zip(*sums, strict=True))


def _pieces(units: torch.Tensor, start: int) -> Iterator[tuple[int, int, int, torch.Tensor]]:
    """Yield first block, number of blocks, units before it in the first block, and the units, of each piece."""
    done = 0
    while done < units.numel():
        block, before = divmod(start + done, BLOCK_UNITS)
        piece = units[done : done + PIECE_BLOCKS * BLOCK_UNITS - before]
        yield block, -(-(before + piece.numel()) // BLOCK_UNITS), before, piece
        done += piece.numel()
