"""Folders in object stores that files are written to, through obstore.

[Note: parts] A file goes out front to back as a multipart upload, several parts at a time. Its parts are equal, and the
rest is so small that the upload is over but for a few kilobytes before it is completed. Only then the file is there, at
once, in place of the former one of its name. A file that is not completed takes space until its upload is aborted.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import obstore
import torch
from obstore import exceptions

from lowmem_load.errors import CheckpointError
from lowmem_load.files.memory import map_memory
from lowmem_load.files.object_store import open_store, summary
from lowmem_load.files.remote_file import Check, map_in_threads
from lowmem_load.phases import no_callback
from lowmem_load.text import plain_url

PART_BYTES = 16 << 20
"""Fewest bytes of a part of a file that has more than one."""

IN_FLIGHT_BYTES = 64 << 20
"""Bytes of parts that are in flight at a time, unless a part has more."""

MAX_PARTS = 9_999
"""Most parts of a file besides its rest. S3 takes 10,000."""

PATIENCE = 4
"""Times as long as for reads until a request fails: the store answers when it has all of a part."""

_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")


class StoreFolder:
    """A folder in S3, GCS or Azure. All errors are CheckpointErrors that name a file, and no secret."""

    def __init__(self, url: str) -> None:
        self.url = plain_url(url).rstrip("/")

    @contextlib.contextmanager
    def open(self, key: str = "") -> Iterator[Any]:
        """Yield obstore's store for work with a file, or with the folder."""
        try:
            yield open_store(self.url, patience=PATIENCE)
        except (exceptions.BaseError, OSError) as error:  # OSError: where obstore has a file that is closed
            what = summary(error)
            advice = "; check the credentials, the region and the bucket's name, and that it may be listed and written"
            is_refused = re.search(r"\b(3\d\d|40[0-5])\b", what)
            raise CheckpointError(
                f"{self.url}{'/' * bool(key)}{key}: cannot be written: {what}{advice if is_refused else ''}"
            ) from None  # the error itself quotes answers

    def names(self, folders: Iterable[str]) -> set[str]:
        """Return the paths of the files in some folders inside this one, "." for this one itself."""
        with self.open() as store:
            prefixes = (None if folder == "." else folder for folder in folders)
            lists = [obstore.list_with_delimiter(store, prefix)["objects"] for prefix in prefixes]
        return {str(meta["path"]) for found in lists for meta in found}

    def get(self, key: str) -> bytes | None:
        """Return the content of a small file; None if it is not there."""
        with self.open(key) as store, contextlib.suppress(FileNotFoundError):
            return bytes(obstore.get(store, key).bytes())
        return None

    def put(self, key: str, content: bytes) -> None:
        """Write a small file."""
        with self.open(key) as store:
            obstore.put(store, key, content, use_multipart=False)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete files; those that are not there are gone already."""

        def delete(key: str) -> None:
            with self.open(key) as store, contextlib.suppress(FileNotFoundError):
                obstore.delete(store, key)

        map_in_threads(delete, keys, no_callback)


class Upload:
    """A file of `nbytes` that is written front to back, and is there once it is completed. See [Note: parts].

    Memory: twice `IN_FLIGHT_BYTES`, half of it in flight; none once all is written. `check` is called while this waits,
    and may raise to end it.
    """

    def __init__(self, folder: StoreFolder, key: str, nbytes: int, check: Check) -> None:
        self._folder, self._key, self.num_missing, self._check = folder, key, nbytes, check
        num_parts = max(1, min(nbytes // PART_BYTES, MAX_PARTS))
        self._part_bytes = nbytes // num_parts
        self._most_bytes = self._part_bytes * max(1, IN_FLIGHT_BYTES // self._part_bytes)
        self._memory = self._in_flight = _EMPTY
        self._filled = 0
        with folder.open(key) as store:
            # Each write waits until fewer parts are in flight, so until the parts of the one before have arrived.
            self._writer = obstore.open_writer(store, key, buffer_size=self._part_bytes, max_concurrency=1)

    def write(self, data: torch.Tensor) -> None:
        """Write flat bytes of host memory, which may be used again. The last ones return when all have arrived."""
        while data.numel():
            room = min(self._most_bytes, self.num_missing) - self._filled
            if not self._memory.numel():
                self._memory = map_memory(room)
            count = min(data.numel(), room)
            self._memory[self._filled : self._filled + count] = data[:count]
            self._filled, data = self._filled + count, data[count:]
            if count == room:
                self._send()

    def _send(self) -> None:
        content = self._memory[: self._filled].numpy()  # obstore does not copy it
        self.num_missing, self._filled = self.num_missing - self._filled, 0
        rest = 0 if self.num_missing else content.size % self._part_bytes
        self._put(content[: content.size - rest])
        self._memory, self._in_flight = self._in_flight, self._memory
        if not self.num_missing:
            self._put(content[content.size - rest :].tobytes())  # a copy, and it waits for all before
            self._memory = self._in_flight = _EMPTY

    def _put(self, content: Any) -> None:
        with self._folder.open(self._key):
            map_in_threads(self._writer.write, [content], self._check)

    def complete(self) -> None:
        """Let the file take its place."""
        with self._folder.open(self._key):
            self._writer.close()

    def abort(self) -> None:
        """Have the store forget what has arrived, unless the file has taken its place."""
        with contextlib.suppress(CheckpointError), self._folder.open(self._key):
            self._writer.__exit__(CheckpointError, None, None)
