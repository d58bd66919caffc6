"""Bytes in memory as a source, for tests that need no files and want to know what is read."""

import hashlib

from lowmem_load.errors import TruncatedFileError


class MemorySource:
    """Bytes in memory, with a note of what is read of them. A `ByteSource`.

    Attributes:
        reads: first byte and end, exclusive, of each read so far.
    """

    def __init__(self, path: str, data: bytes) -> None:
        self.path, self.nbytes = path, len(data)
        self.version = hashlib.sha256(data).hexdigest()
        self.reads: list[tuple[int, int]] = []
        self._data = data

    def read_into(self, offset: int, memory: memoryview) -> None:
        """See `ByteSource`."""
        end = offset + memory.nbytes
        if end > max(offset, self.nbytes):
            raise TruncatedFileError(f"{self.path}: ended at byte {self.nbytes} ({end - self.nbytes} bytes short)")
        self.reads.append((offset, end))
        memory[:] = self._data[offset:end]

    def close(self) -> None:
        """Do nothing."""
