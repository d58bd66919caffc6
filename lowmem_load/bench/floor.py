"""What no load can be faster than: bytes of files, read into fresh memory, without a model."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from lowmem_load.errors import TruncatedFileError


class Piece(NamedTuple):
    """Bytes of a file."""

    path: str
    start: int
    nbytes: int


def read_plain(pieces: Sequence[Piece]) -> tuple[list[torch.Tensor], int]:
    """Return the bytes of each piece, and the number of reads: in order, one thread, memory of its own for each.

    Raises:
        TruncatedFileError: a file ends before a piece does.
    """
    memory, num_reads = [], 0
    with _opened(pieces) as descriptors:
        for piece in pieces:
            memory.append(torch.empty(piece.nbytes, dtype=torch.uint8))
            num_reads += _read_into(descriptors[piece.path], memory[-1], piece)
    return memory, num_reads


def read_tuned(pieces: Sequence[Piece], num_threads: int) -> tuple[list[torch.Tensor], int]:
    """Do the same as fast as the machine allows: with several threads, into huge pages.

    Raises:
        TruncatedFileError: a file ends before a piece does.
    """
    pages = huge_pages(sum(piece.nbytes for piece in pieces))
    memory, used = [], 0
    for piece in pieces:
        part = torch.frombuffer(pages, dtype=torch.uint8, count=piece.nbytes, offset=used) if piece.nbytes else None
        memory.append(torch.empty(0, dtype=torch.uint8) if part is None else part)
        used += piece.nbytes

    with _opened(pieces) as descriptors, ThreadPoolExecutor(num_threads) as threads:

        def read(piece: Piece, part: torch.Tensor) -> int:
            return _read_into(descriptors[piece.path], part, piece)

        return memory, sum(threads.map(read, pieces, memory))


def huge_pages(nbytes: int) -> mmap.mmap:
    """Return fresh memory, in huge pages where the system has any."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


@contextlib.contextmanager
def _opened(pieces: Iterable[Piece]) -> Iterator[dict[str, int]]:
    descriptors = {path: os.open(path, os.O_RDONLY) for path in {piece.path for piece in pieces}}
    try:
        yield descriptors
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _read_into(descriptor: int, part: torch.Tensor, piece: Piece) -> int:
    view = memoryview(part.numpy().data)
    done = num_reads = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], piece.start + done)
        if count == 0:
            raise TruncatedFileError(f"{piece.path}: ends {len(view) - done} bytes too early")
        done += count
        num_reads += 1
    return num_reads
