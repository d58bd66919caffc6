"""Pickles made by hand: calls of any function, and tensors whose views lie."""

import functools
import io
import zipfile
from typing import Any

import torch


class Call:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def saved(value: Any) -> bytes:
    """Returns the pickle that torch.save puts into its zip."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with zipfile.ZipFile(buffer) as file:
        (name,) = (name for name in file.namelist() if name.endswith("/data.pkl"))
        return file.read(name)


def assembled(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x03tQ"
NAMED = b"}X\x01\x00\x00\x00a"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
FIRST = b"K\x00K\x01\x85K\x01\x85"
REST = b"\x89ccollections\nOrderedDict\n)RtR"


def with_tensor(view: bytes, storage: bytes = STORAGE) -> bytes:
    """Returns a pickled {"a": tensor}; `view` is the opcodes of its offset, sizes and strides."""
    return assembled(NAMED + REBUILD + b"(" + storage + view + REST + b"s")


def colliding(count: int, *before: int) -> list[tuple[int, ...]]:
    """Returns tuples of integers that have one hash, after equal first ones: the last of each is solved for."""
    prime_1, prime_2, prime_5 = 11400714785074694791, 14029467366897019727, 2870177450012600261

    def step(lane: int, value: int) -> int:
        lane = (lane + value * prime_2) % (1 << 64)
        return ((lane << 31 | lane >> 33) * prime_1) % (1 << 64)

    start = functools.reduce(step, before, prime_5)
    found: list[tuple[int, ...]] = []
    first = 0
    while len(found) < count:
        first += 1
        last = -step(start, first) * pow(prime_2, -1, 1 << 64) % (1 << 64)
        if last < 1 << 60:
            found.append((*before, first, last))
    assert len(set(map(hash, found))) == 1
    return found
