"""Files whose bytes go from storage to device memory past the host: GPUDirect Storage, by way of kvikio.

Not run on hardware yet: tested against a stand-in with kvikio's signatures. Source: kvikio 26.10, `kvikio/cufile.py`
(`CuFile`, `pread`), `kvikio/cufile_driver.py` (`initialize`), and its page on runtime settings.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from lowmem_load.errors import CheckpointError, ConfigError, TruncatedFileError
from lowmem_load.read.source import LocalFile, Opener, file_version

VARIABLE = "LOWMEM_LOAD_GDS"
"""Of the environment: "1" asks for GPUDirect Storage."""

_COMPAT_MODE = "KVIKIO_COMPAT_MODE"
_OFF = ("off", "false", "no", "0")


def chosen_source() -> Opener:
    """Return what opens files: `GdsFile` where the environment asks for it, else `LocalFile`.

    Raises:
        ConfigError: it asks for what is not there, or would be replaced by ordinary reads without a word.
    """
    asked = os.environ.get(VARIABLE, "0")
    if asked not in ("", "0", "1"):
        raise ConfigError(f"{VARIABLE}: the environment has {asked!r}, expected 0 or 1")
    if asked != "1":
        return LocalFile
    if os.environ.get(_COMPAT_MODE, "").lower() not in _OFF:
        raise ConfigError(
            f"{VARIABLE}=1 needs {_COMPAT_MODE}=OFF, set before Python starts: else kvikio reads through host memory "
            "where there is no GPUDirect Storage, without a word"
        )
    try:
        import kvikio
        import kvikio.cufile_driver

        kvikio.cufile_driver.initialize()
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"{VARIABLE}=1, but there is no GPUDirect Storage here: {type(error).__name__}: {error}; install kvikio "
            f"and cuFile, or unset {VARIABLE}"
        ) from error
    return GdsFile


class GdsFile(LocalFile):
    """A local file that also fills device memory. Unaligned ends, and reads below 1 MiB, kvikio copies by itself.

    Args:
        path: of the file.

    Raises:
        CheckpointError: it cannot be opened, or is no regular file.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._direct: Any = None
        import kvikio

        try:
            self._direct = kvikio.CuFile(path, "r")  # opens the path once more
            if file_version(os.fstat(self._direct.fileno())) != self.version:
                raise CheckpointError(f"{path}: was replaced while it was opened; load again once nobody writes to it")
        except (RuntimeError, OSError) as error:
            self.close()
            raise CheckpointError(f"{path}: cannot be opened for GPUDirect Storage: {error}") from error
        except CheckpointError:
            self.close()
            raise

    def read_to_device(self, offset: int, memory: torch.Tensor) -> None:
        """Fill contiguous device memory, of bytes, with those from `offset` on; return when they are there.

        Raises:
            TruncatedFileError: the bytes end before the memory is full.
            CheckpointError: they cannot be read.
        """
        try:
            found = self._direct.pread(memory, size=memory.nbytes, file_offset=offset).get()
        except (RuntimeError, OSError) as error:
            raise CheckpointError(f"{self.path}: cannot be read by GPUDirect Storage: {error}") from error
        if found != memory.nbytes:
            short = memory.nbytes - found
            raise TruncatedFileError(f"{self.path}: ended at byte {offset + found} ({short} bytes short)")

    def close(self) -> None:
        """See `ByteSource`."""
        direct, self._direct = self._direct, None
        if direct is not None:
            direct.close()
        super().close()
