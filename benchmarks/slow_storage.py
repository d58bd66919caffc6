"""A folder seen through FUSE, with a wait before each read: `python -m benchmarks.slow_storage FOLDER MOUNT SECONDS`.

Needs `pip install mfusepy`, libfuse and leave to mount. The kernel caches, reads ahead and maps files as on NFS.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import mfusepy


class SlowFolder(mfusepy.Operations):  # type: ignore[misc]  # where it is not installed
    """Read-only: every read is answered `wait_s` later than it could be; any number of them at a time."""

    use_ns = True

    def __init__(self, folder: Path, wait_s: float) -> None:
        self._folder, self._wait_s = folder, wait_s

    def _path(self, path: str) -> Path:
        return self._folder / path.lstrip("/")

    def getattr(self, path: str, _fh: int | None = None) -> dict[str, Any]:
        """Return the attributes of a file."""
        try:
            found = os.lstat(self._path(path))
        except OSError as error:
            raise mfusepy.FuseOSError(error.errno) from error
        times = {f"st_{name}": getattr(found, f"st_{name}_ns") for name in ("atime", "ctime", "mtime")}
        return {name: getattr(found, name) for name in ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid")} | times

    def readdir(self, path: str, _fh: int) -> list[str]:
        """Return the names in a folder."""
        return [".", "..", *os.listdir(self._path(path))]

    def open(self, path: str, _flags: int) -> int:
        """Return a descriptor."""
        return os.open(self._path(path), os.O_RDONLY)

    def read(self, _path: str, size: int, offset: int, fh: int) -> bytes:
        """Return bytes of a file, late."""
        time.sleep(self._wait_s)
        return os.pread(fh, size, offset)

    def release(self, _path: str, fh: int) -> int:
        """Close a descriptor."""
        os.close(fh)
        return 0


if __name__ == "__main__":
    mfusepy.FUSE(SlowFolder(Path(sys.argv[1]), float(sys.argv[3])), sys.argv[2], foreground=True, ro=True)
