"""A file on the Hugging Face Hub as a byte source: a ranged GET for each read, in the session of huggingface_hub."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from lowmem_load.errors import CheckpointError, TruncatedFileError

TIMEOUT_S = 30.0
"""Seconds without a byte from the server after which a read fails."""

MAX_CACHED_NBYTES = 64 << 20
"""Most bytes of one file that are cached, so that a header that two stages read is fetched once."""


class HubFile:
    """A file of one commit of a repository. It never changes. A `ByteSource`.

    Args:
        path: see `ByteSource.path`.
        url: of the file, at a commit.
        nbytes: size of the file.
        version: hash of the file, as the Hub gives it.
        token: as in huggingface_hub; None for the stored one.
    """

    is_remote = True

    def __init__(self, path: str, url: str, nbytes: int, version: str, token: str | bool | None = None) -> None:
        self.path, self.nbytes, self.version = path, nbytes, version
        self._url, self._token = url, token
        self._cached: dict[tuple[int, int], bytes] = {}
        self._cached_nbytes = 0
        self._lock = threading.Lock()

    def read_into(self, offset: int, memory: memoryview) -> None:
        """See `ByteSource`."""
        if not memory:
            return
        if (missing := offset + memory.nbytes - self.nbytes) > 0:
            raise TruncatedFileError(f"{self.path}: ended at byte {self.nbytes} ({missing} short)")
        memory[:] = self._bytes(offset, memory.nbytes)

    def close(self) -> None:
        """Do nothing: the session owns the connections."""

    def _bytes(self, offset: int, nbytes: int) -> bytes:
        cached = self._cached.get((offset, nbytes))
        if cached is not None:
            return cached
        found = self._fetch(offset, nbytes)
        with self._lock:
            if self._cached_nbytes + nbytes <= MAX_CACHED_NBYTES:
                self._cached_nbytes += nbytes
                self._cached[offset, nbytes] = found
        return found

    def _check_range(self, headers: Any, offset: int, nbytes: int) -> None:
        content_range = str(headers.get("Content-Range", ""))
        if not content_range.startswith(f"bytes {offset}-"):
            raise CheckpointError(
                f"{self.path}: {self._url} sent the range {content_range[:80]!r}, "
                f"expected bytes {offset}-{offset + nbytes - 1}; download the checkpoint and name its folder"
            )
        if headers.get("Content-Encoding", "identity") != "identity":  # a few bytes may unpack to any number
            raise CheckpointError(f"{self.path}: {self._url} sent compressed bytes although identity was asked for")

    def _fetch(self, offset: int, nbytes: int) -> bytes:
        headers = {**build_hf_headers(token=self._token), "Range": f"bytes={offset}-{offset + nbytes - 1}"}
        headers["Accept-Encoding"] = "identity"
        try:
            with _response(self._url, headers) as response:
                hf_raise_for_status(response)
                if response.status_code != 206:  # the whole file would follow
                    raise CheckpointError(
                        f"{self.path}: {self._url} answers a request for a range with status {response.status_code}, "
                        "expected 206; download the checkpoint and name its folder"
                    )
                self._check_range(response.headers, offset, nbytes)
                content = _at_most(response, nbytes)
        except CheckpointError:
            raise
        except Exception as error:  # of httpx or requests, depending on huggingface_hub
            raise CheckpointError(f"{self.path}: cannot be read from {self._url}: {error}") from error
        if len(content) != nbytes:
            raise TruncatedFileError(
                f"{self.path}: the Hub sent {len(content)} bytes, expected {nbytes} from byte {offset} on"
            )
        return content


def _at_most(response: Any, nbytes: int) -> bytes:
    """Return the body. Of one that is too large, stop reading once that is certain."""
    content = bytearray()
    for part in response.iter_bytes() if hasattr(response, "iter_bytes") else response.iter_content(1 << 16):
        content += part
        if len(content) > nbytes:
            break
    return bytes(content)


@contextlib.contextmanager
def _response(url: str, headers: dict[str, str]) -> Iterator[Any]:
    """Yield the response before its body is read. huggingface_hub uses httpx; before 1.0, requests."""
    session: Any = get_session()
    if callable(getattr(session, "stream", None)):
        with session.stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
            yield response
    else:
        with session.get(url, headers=headers, timeout=TIMEOUT_S, stream=True) as response:
            yield response
