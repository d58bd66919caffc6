"""Opens a checkpoint by name without downloading its weights: small files are fetched, weights are read by ranges."""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from lowmem_load.errors import CheckpointError, TruncatedFileError
from lowmem_load.io.source import ByteSource, LocalFile, Opener

TIMEOUT_S = 30.0
"""Seconds without a byte from the server after which a read fails."""

MAX_CACHED_READS = 8
"""Latest reads of one file that are cached, so that a header that two stages read is fetched once."""

MAX_SMALL_NBYTES = 64 << 20
"""Most bytes of a file that is fetched whole, such as an index."""

MAX_NAME_NBYTES = 255
"""Most bytes of a file name, as on most file systems."""

WEIGHTS = (".safetensors", ".bin")
SMALL = (".json", ".py")


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A checkpoint that can be described. `folder` has empty files for weights on the Hub; `open_source` opens them."""

    name: str
    folder: str
    revision: str | None
    open_source: Opener


@contextlib.contextmanager
def open_checkpoint(name: str, *, subfolder: str = "", revision: str | None = None) -> Iterator[OpenCheckpoint]:
    """Yield a local folder, or for a Hub id a temporary folder with its small files, whose weights are read by ranges.

    With `HF_HUB_OFFLINE`, a Hub id means what is in the local cache.

    Raises:
        CheckpointError: there is no such folder, and no such model on the Hub, or the Hub cannot be reached.
    """
    if os.path.isdir(name):
        yield OpenCheckpoint(name, name, None, LocalFile)
        return
    if name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise CheckpointError(f"{name}: no such folder")
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        yield OpenCheckpoint(name, _cached(name, revision), None, LocalFile)
        return
    info = _model_info(name, revision)
    with tempfile.TemporaryDirectory(prefix="lowmem_load-") as base:
        folder = os.path.join(base, name.replace("/", "--"))
        remote = _lay_out(info, name, folder, subfolder)

        def open_source(path: str) -> ByteSource:
            return remote.get(os.path.abspath(path)) or LocalFile(path)

        yield OpenCheckpoint(name, folder, str(info.sha), open_source)


def _cached(name: str, revision: str | None) -> str:
    try:
        return str(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{name}: no such folder, and not in the cache of the Hub; HF_HUB_OFFLINE is set, so the Hub was not asked"
        ) from error


def _model_info(name: str, revision: str | None) -> Any:
    try:
        return huggingface_hub.HfApi().model_info(name, revision=revision, files_metadata=True)
    except HFValidationError as error:
        raise CheckpointError(f"{name}: neither a folder nor a Hub id: {error}") from error
    except HfHubHTTPError as error:
        raise CheckpointError(f"{name}: no such folder, and the Hub says: {error}") from error
    except Exception as error:  # of httpx or requests, depending on huggingface_hub
        raise CheckpointError(
            f"{name}: no such folder, and the Hub at {huggingface_hub.constants.ENDPOINT} cannot be reached: {error}"
        ) from error


def _lay_out(info: Any, name: str, folder: str, subfolder: str) -> dict[str, HubFile]:
    # File names are untrusted: none may leave the folder.
    remote: dict[str, HubFile] = {}
    os.makedirs(os.path.join(folder, subfolder))
    for sibling in info.siblings:
        file, nbytes = str(sibling.rfilename), int(sibling.size or 0)
        head, last = posixpath.split(file)
        if head not in ("", subfolder.strip("/")) or last in ("", ".", ".."):
            continue
        if "\0" in last or len(os.fsencode(last)) > MAX_NAME_NBYTES:
            raise CheckpointError(f"{name}: lists a file with the impossible name {last[:80]!r}")
        path = os.path.abspath(os.path.join(folder, head, last))
        if last.endswith(WEIGHTS):
            Path(path).touch()
            url = huggingface_hub.hf_hub_url(name, file, revision=info.sha)
            version = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
            remote[path] = HubFile(path, url, nbytes, str(version))
        elif last.endswith(SMALL) and nbytes <= MAX_SMALL_NBYTES and not last.startswith("tokenizer"):
            _fetch_small(name, file, path, str(info.sha))
    return remote


def _fetch_small(name: str, file: str, path: str, commit: str) -> None:
    try:
        shutil.copyfile(huggingface_hub.hf_hub_download(name, file, revision=commit), path)
    except Exception as error:  # of httpx or requests, or of the cache on disk
        raise CheckpointError(f"{name}: {file} cannot be fetched from the Hub: {error}") from error


class HubFile:
    """A `ByteSource` on the Hub, of one commit: it never changes. `version` is its hash there."""

    is_remote = True

    def __init__(self, path: str, url: str, nbytes: int, version: str) -> None:
        self.path, self.nbytes, self.version = path, nbytes, version
        self._url = url
        self._bytes = functools.lru_cache(MAX_CACHED_READS)(self._fetch)

    def read_into(self, offset: int, memory: memoryview) -> None:
        """See `ByteSource`."""
        if not memory:
            return
        if (missing := offset + memory.nbytes - self.nbytes) > 0:
            raise TruncatedFileError(f"{self.path}: ended at byte {self.nbytes} ({missing} short)")
        memory[:] = self._bytes(offset, memory.nbytes)

    def close(self) -> None:
        """Do nothing: the session owns the connections."""

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
        headers = {**build_hf_headers(), "Range": f"bytes={offset}-{offset + nbytes - 1}"}
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
    # Of a body that is too large, stop reading once that is certain.
    content = bytearray()
    for part in response.iter_bytes() if hasattr(response, "iter_bytes") else response.iter_content(1 << 16):
        content += part
        if len(content) > nbytes:
            break
    return bytes(content)


@contextlib.contextmanager
def _response(url: str, headers: dict[str, str]) -> Iterator[Any]:
    # huggingface_hub uses httpx; before 1.0, requests.
    session: Any = get_session()
    if callable(getattr(session, "stream", None)):
        with session.stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
            yield response
    else:
        with session.get(url, headers=headers, timeout=TIMEOUT_S, stream=True) as response:
            yield response
