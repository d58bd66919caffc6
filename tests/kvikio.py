"""A stand-in for kvikio with the signatures of 26.10 that lowmem_load uses; the device's memory is filled by a copy."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any, ClassVar

import torch


class IOFuture:
    """Of a read that has ended."""

    def __init__(self, found: int) -> None:
        self._found = found

    def get(self) -> int:
        return self._found

    def done(self) -> bool:
        return True


class CuFile:
    """A file; `preads` notes the bytes of each read."""

    num_open: ClassVar[int] = 0
    preads: ClassVar[list[int]] = []

    def __init__(self, file: Path | str, flags: str = "r") -> None:
        assert flags == "r"
        self._descriptor = os.open(file, os.O_RDONLY)
        CuFile.num_open += 1

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        os.close(self._descriptor)
        CuFile.num_open -= 1

    def pread(self, buf: Any, size: int | None = None, file_offset: int = 0, task_size: int | None = None) -> IOFuture:
        assert buf.dtype == torch.uint8 and buf.is_contiguous()  # of what has no such dtype, no interface is given
        found = os.pread(self._descriptor, buf.nbytes if size is None else size, file_offset)
        if found:
            buf[: len(found)].copy_(torch.frombuffer(bytearray(found), dtype=torch.uint8))
        CuFile.preads.append(len(found))
        return IOFuture(len(found))


def stand_in() -> Any:
    """Returns a module, with the submodule that is used."""
    made, driver = types.ModuleType("kvikio"), types.ModuleType("kvikio.cufile_driver")
    driver.opened = []  # type: ignore[attr-defined]
    driver.initialize = lambda: driver.opened.append(1)  # type: ignore[attr-defined]
    made.CuFile, made.cufile_driver = CuFile, driver  # type: ignore[attr-defined]
    return made
