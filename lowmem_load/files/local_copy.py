"""Copies of what ranks read from stores, on a disk of the node, where the next load reads it.

[Note: copies] The copy of a file is sparse: it has what ranks of this node have read. Each read is entered into the
list next to it, with a checksum, once it is written. The next load makes a read there if the list has it, and the bytes
have its checksum. A restart on as many ranks makes the same reads, so a node that reads its share of a file asks the
store for no weights. Nothing is locked, flushed or ever whole: what a kill, a crash, a full disk or another process has
spoiled is read from the store. The name of a copy has the size and the version of the object.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from pathlib import Path

import numpy as np

from lowmem_load.files.remote_file import RemoteFile
from lowmem_load.files.source import ByteSource
from lowmem_load.files.stand_ins import open_file, origin, readable_name
from lowmem_load.locks import ForkedLock
from lowmem_load.text import fingerprint

logger = logging.getLogger(__name__)


class LocalCopies:
    """The copies of a load in a folder. Once one cannot be written, all of them are removed, and the load goes on."""

    def __init__(self, folder: str) -> None:
        self.folder, self.is_kept = folder, True
        self._used, self._lock = list[Path](), ForkedLock()

    def open(self, path: str) -> ByteSource:
        """As `open_file`. What is read of a file in a store is copied."""
        source = open_file(path)
        return CopiedFile(source, self) if isinstance(source, RemoteFile) else source

    def place(self, url: str, version: str) -> Path:
        """Return the path for the copy of a file, after those of its other versions are removed."""
        folder = Path(self.folder, readable_name(url, [url]))
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
            if folder.lstat().st_uid != os.getuid():
                raise PermissionError(f"{folder} belongs to another user, who could write other weights into it")
            self._used.append(folder)  # not before: what `drop` removes is this user's
            (folder / version).touch(0o600)
            for former in folder.iterdir():
                if former.stem != version:
                    former.unlink(missing_ok=True)
        except OSError as error:
            self.drop(error)
        return folder / version

    def drop(self, error: OSError) -> None:
        """Remove the copies that this load has used, with one warning."""
        with self._lock:
            is_first, self.is_kept = self.is_kept, False
        if is_first:
            logger.warning("%s: copies cannot be written there, so this load removes its own: %s", self.folder, error)
            for folder in self._used:
                shutil.rmtree(folder, ignore_errors=True)


class CopiedFile:
    """A `ByteSource` in a store, with a copy."""

    is_remote = True

    def __init__(self, source: RemoteFile, copies: LocalCopies) -> None:
        self.path, self.nbytes, self.version, self.close = source.path, source.nbytes, source.version, source.close
        self._source, self._copies = source, copies
        self._copy = copies.place(origin(self.path), fingerprint([str(self.nbytes), self.version]))
        self._list, self._sums = self._copy.with_suffix(".reads"), dict[tuple[int, int], int]()
        with contextlib.suppress(OSError):
            lines = self._list.read_bytes() if copies.is_kept else b""
            for line in re.findall(rb"^(\d+) (\d+) (\d+)$", lines, re.MULTILINE):
                offset, nbytes, checksum = map(int, line)
                self._sums[offset, nbytes] = checksum

    def read_into(self, offset: int, memory: memoryview) -> None:
        """See `ByteSource`."""
        expected = self._sums.get((offset, memory.nbytes))
        if expected is not None:
            with contextlib.suppress(OSError), self._copy.open("rb", buffering=0) as file:
                os.preadv(file.fileno(), [memory], offset)
            if _checksum(memory) == expected:
                return
        self._source.read_into(offset, memory)
        if self._copies.is_kept:
            try:
                self._write(offset, memory)
            except OSError as error:
                self._copies.drop(error)

    def _write(self, offset: int, memory: memoryview) -> None:
        with self._copy.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), memory, offset)  # if only a part is written, the checksum says so
        with self._list.open("ab", buffering=0) as file:  # each line by one call, as others write at the same time
            file.write(b"\n%d %d %d\n" % (offset, memory.nbytes, _checksum(memory)))


def _checksum(memory: memoryview) -> int:
    """Return a sum that differs if a part was lost: of 16 MiB in 1 ms, where a CRC takes 10."""
    num_words = memory.nbytes // 8
    words = np.frombuffer(memory, np.uint64, num_words)
    total = (int(words.sum()) + int.from_bytes(memory[8 * num_words :], "little")) % (1 << 64)
    return total << 32 | int(np.count_nonzero(words))  # the sum alone may be that of zeros
