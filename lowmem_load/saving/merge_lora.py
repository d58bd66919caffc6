"""This rank's elements of weights that adapters are merged into while they are saved. See `hf/merging.py`.

To merge an adapter row by row, each rank gathers the adapter, which is small, and merges its own elements of the
weight, a block of rows at a time. All other weights are gathered by all ranks, one at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lowmem_load.errors import UnsupportedError
from lowmem_load.hf.merging import FEW_ROWS, Merge
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.saving.local_shards import LocalShard, Piece, is_dtensor

BLOCK_BYTES = 8 << 20
"""Bytes of a block of rows in float32. Merging it takes a few times as much."""


def row_blocks(mine: FlatRange, num_rows: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the rows that have any of these elements, in blocks: their start and end, and those of the rows to compute.

    At least `FEW_ROWS` are computed at a time.
    """
    size = max(FEW_ROWS, BLOCK_BYTES // (width * torch.float32.itemsize))
    start, last = mine.start // width, -(-mine.end // width)
    while start < last:
        end = min(last, start + size)
        lower = max(0, min(start, end - FEW_ROWS))
        yield start, end, lower, min(num_rows, max(end, lower + FEW_ROWS))
        start = end


def merged_pieces(merge: Merge, shard: LocalShard, adapters: Mapping[int, torch.Tensor]) -> Iterator[Piece]:
    """Yield this rank's elements of a merged weight in pieces, given the gathered parameters of adapters by `id`."""
    if is_dtensor(shard.tensor):
        raise UnsupportedError(
            f"{shard.source.name}: is a DTensor, whose adapters cannot be merged while it is saved; save the adapter, "
            "and merge it into an ordinary load"
        )
    if not shard.mine:
        return
    (mine,), (num_rows, width) = shard.mine, shard.source.shape
    device = next(iter(adapters.values())).device
    with shard.memory() as [(memory, first)]:
        for first_row, last_row, lower, upper in row_blocks(mine, num_rows, width):
            origin = lower * width
            start, end = max(mine.start, first_row * width), min(mine.end, last_row * width)
            rows = torch.zeros((upper - lower, width), dtype=memory.dtype, device=device)
            rows.view(-1)[start - origin : end - origin] = memory[start - first : end - first]
            merged = merge.run_on_rows(rows, lower, adapters)
            yield merged.reshape(-1)[start - origin : end - origin], start


def gathered_adapters(merges: Iterable[Merge]) -> dict[int, torch.Tensor]:
    """Return copies of the gathered parameters of all adapters, by `id`. Collective."""
    parameters = [parameter for merge in merges for parameter in merge.adapters()]
    with _gathered(parameters):
        return {id(parameter): parameter.detach().clone() for parameter in parameters}


def digest_of_values(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of the bytes of tensors: ranks with different adapters would write a mixture of models."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()[:16]


def gathered_and_merged(merge: Merge, shards: Sequence[LocalShard]) -> list[torch.Tensor]:
    """Return the merged weights, gathered and flat, on ranks that write any of their elements. Collective."""
    with _gathered([*merge.parameters, *merge.adapters()]):
        if not any(shard.mine for shard in shards):
            return []
        merged = merge.run({id(parameter): parameter.detach().clone() for parameter in merge.parameters})
        return [tensor.reshape(-1) for tensor in merged]


def _gathered(parameters: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    if "deepspeed" not in sys.modules:
        return contextlib.nullcontext()
    from lowmem_load.ds.parameters import gathered

    return gathered(parameters)
