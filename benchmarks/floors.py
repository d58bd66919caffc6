"""The floor: reads the bytes of a rank's partitions without a model."""

from __future__ import annotations

import io
import itertools
import math
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.checkpoint import SourceTensor, read_headers
from benchmarks.memory import available_bytes
from lowmem_load.errors import TruncatedFileError

HUGE_PAGE_BYTES = 2 << 20
# Of a partition: what is touched before a load in touched memory.
SPARE_MEMORY = 1.2
# Seconds from when memory is freed until the kernel tells the hypervisor of all that is free (mm/page_reporting.c).
REPORT_DELAY_S = 2.0
# The share of the available memory that all ranks together may touch for that.
SPARE_SHARE = 0.7


class Piece(NamedTuple):
    path: str
    start: int
    nbytes: int


def partition_range(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the flat range (elements, end exclusive) of a parameter that `rank` owns, without padding."""
    partition_numel = -(-numel // world_size)
    return min(rank * partition_numel, numel), min((rank + 1) * partition_numel, numel)


def read_plain(path: Path, rank: int, world_size: int) -> tuple[dict[str, torch.Tensor], int]:
    """Return this rank's partitions, and the number of reads: file order, one thread, memory of its own for each."""
    names, pieces = partitions(path, rank, world_size)
    memory, num_reads = read_pieces(pieces)
    return dict(zip(names, memory, strict=True)), num_reads


def have_memory_backed(path: Path, world_size: int, meet: Callable[[], object]) -> None:
    """Touch some memory and give it back, so that the machine has it at hand when this rank loads a checkpoint.

    A hypervisor may take back what its guest has freed (free page reporting of virtio-balloon): then the first to use
    it, within the next seconds, waits for it, 2.4 s for a GiB here. That belongs to no way to load. So it is held until
    what was freed before has been taken: then nothing is for the next `REPORT_DELAY_S`.

    Args:
        path: of the checkpoint.
        world_size: ranks that load it.
        meet: returns when all ranks have come to it.
    """
    spare_bytes = SPARE_MEMORY * sum(tensor.nbytes for tensor in read_headers(path))
    nbytes = int(min(spare_bytes, SPARE_SHARE * (available_bytes() or math.inf)) / world_size)
    with huge_pages(nbytes) as pages:
        for start in range(0, nbytes, HUGE_PAGE_BYTES):
            pages[start] = 0
        meet()
        time.sleep(1.1 * REPORT_DELAY_S)


def partitions(path: Path, rank: int, world_size: int) -> tuple[list[str], list[Piece]]:
    """Return the names of all parameters, and where this rank's partition of each lies."""
    tensors = read_headers(path)
    return [tensor.name for tensor in tensors], [_piece(tensor, rank, world_size) for tensor in tensors]


def _piece(tensor: SourceTensor, rank: int, world_size: int) -> Piece:
    start, end = partition_range(tensor.numel, rank, world_size)
    itemsize = tensor.nbytes // tensor.numel
    return Piece(str(tensor.path), tensor.byte_offset + start * itemsize, (end - start) * itemsize)


def read_pieces(pieces: Sequence[Piece]) -> tuple[list[torch.Tensor], int]:
    """Return the bytes of each piece, and the number of reads: in order, one thread, memory of its own for each.

    Raises:
        TruncatedFileError: a file ends before a piece does.
    """
    memory, num_reads = [], 0
    for path, of_file in itertools.groupby(pieces, key=lambda piece: piece.path):
        with open(path, "rb", buffering=0) as file:
            for piece in of_file:
                memory.append(torch.empty(piece.nbytes, dtype=torch.uint8))
                num_reads += _read_into(file, memory[-1], piece)
    return memory, num_reads


def huge_pages(nbytes: int) -> mmap.mmap:
    """Return fresh memory, in huge pages where the system has any."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _read_into(file: io.FileIO, part: torch.Tensor, piece: Piece) -> int:
    view = memoryview(part.numpy().data)
    done = num_reads = 0
    while done < len(view):
        count = os.preadv(file.fileno(), [view[done:]], piece.start + done)
        if count == 0:
            raise TruncatedFileError(f"{piece.path}: ends {len(view) - done} bytes too early")
        done += count
        num_reads += 1
    return num_reads
