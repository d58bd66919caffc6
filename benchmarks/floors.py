"""Two floors: how long it takes to read the bytes of a rank's partitions, without a model."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.checkpoint import SourceTensor, read_headers

# As many at most as lowmem_load has reads in flight (lowmem_load/stages/load.py).
MAX_THREADS = 4
HUGE_PAGE_BYTES = 2 << 20


def partition_range(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the flat range (elements, end exclusive) of a parameter that `rank` owns, without padding."""
    partition_numel = -(-numel // world_size)
    return min(rank * partition_numel, numel), min((rank + 1) * partition_numel, numel)


def read_plain(path: Path, rank: int, world_size: int) -> tuple[dict[str, torch.Tensor], int]:
    """Return this rank's partitions, and the number of reads: file order, one thread, memory of its own for each."""
    partitions, num_reads = {}, 0
    with _opened(path) as descriptors:
        for tensor in read_headers(path):
            start_byte, nbytes = _bytes_of(tensor, rank, world_size)
            partitions[tensor.name] = torch.empty(nbytes, dtype=torch.uint8)
            num_reads += _read_into(descriptors[tensor.path], partitions[tensor.name], tensor, start_byte)
    return partitions, num_reads


def read_tuned(path: Path, rank: int, world_size: int) -> tuple[dict[str, torch.Tensor], int]:
    """Do the same as fast as the machine allows: as many threads as lowmem_load has, into huge pages."""
    tensors = read_headers(path)
    ranges = [_bytes_of(tensor, rank, world_size) for tensor in tensors]
    pages = huge_pages(sum(nbytes for _, nbytes in ranges))
    partitions, used = {}, 0
    for tensor, (_, nbytes) in zip(tensors, ranges, strict=True):
        if nbytes:
            partitions[tensor.name] = torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=used)
        used += nbytes
    num_threads = min(MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // world_size))
    with _opened(path) as descriptors, ThreadPoolExecutor(num_threads) as threads:

        def read(tensor: SourceTensor, start_byte: int) -> int:
            return _read_into(descriptors[tensor.path], partitions[tensor.name], tensor, start_byte)

        found = [(tensor, start) for tensor, (start, nbytes) in zip(tensors, ranges, strict=True) if nbytes]
        return partitions, sum(threads.map(read, *zip(*found, strict=True)))


def huge_pages(nbytes: int) -> mmap.mmap:
    """Return fresh memory, in huge pages where the system has any."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def have_memory_backed(nbytes: int) -> None:
    """Touch memory and give it back, so that the machine has so much at hand.

    A hypervisor may take back what its guest has freed (free page reporting of virtio-balloon): then the first to use
    it, within the next seconds, waits for it, 2.4 s for a GiB here. That belongs to no way to load.
    """
    with huge_pages(nbytes) as pages:
        for start in range(0, nbytes, HUGE_PAGE_BYTES):
            pages[start] = 0


def _bytes_of(tensor: SourceTensor, rank: int, world_size: int) -> tuple[int, int]:
    start, end = partition_range(tensor.numel, rank, world_size)
    itemsize = tensor.nbytes // tensor.numel
    return start * itemsize, (end - start) * itemsize


@contextmanager
def _opened(path: Path) -> Iterator[dict[Path, int]]:
    descriptors = {file: os.open(file, os.O_RDONLY) for file in {tensor.path for tensor in read_headers(path)}}
    try:
        yield descriptors
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _read_into(descriptor: int, buffer: torch.Tensor, tensor: SourceTensor, start_byte: int) -> int:
    view = memoryview(buffer.numpy().data)
    done = num_reads = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], tensor.byte_offset + start_byte + done)
        if count == 0:
            raise EOFError(f"{tensor.name}: {tensor.path} ends {len(view) - done} bytes too early")
        done += count
        num_reads += 1
    return num_reads
