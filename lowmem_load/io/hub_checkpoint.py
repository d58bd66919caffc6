"""Opens a checkpoint by name without downloading its weights: small files are fetched, weights are read by ranges."""

from __future__ import annotations

import contextlib
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

from lowmem_load.errors import CheckpointError
from lowmem_load.io.hub_file import HubFile
from lowmem_load.io.source import ByteSource, LocalFile, Opener

MAX_SMALL_NBYTES = 64 << 20
"""Most bytes of a file that is fetched whole, such as an index."""

MAX_NAME_NBYTES = 255
"""Most bytes of a file name, as on most file systems."""

WEIGHTS = (".safetensors", ".bin")
SMALL = (".json", ".py")


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A checkpoint that can be described.

    Attributes:
        name: as given.
        folder: a local folder. Weights on the Hub have empty files in their place there.
        revision: commit on the Hub; None for a local folder.
        open_source: opens files of `folder`, wherever their bytes are.
    """

    name: str
    folder: str
    revision: str | None
    open_source: Opener


@contextlib.contextmanager
def open_checkpoint(
    name: str, *, subfolder: str = "", revision: str | None = None, token: str | bool | None = None
) -> Iterator[OpenCheckpoint]:
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
    info = _model_info(name, revision, token)
    with tempfile.TemporaryDirectory(prefix="lowmem_load-") as base:
        folder = os.path.join(base, name.replace("/", "--"))
        remote = _lay_out(info, name, folder, subfolder, token)

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


def _model_info(name: str, revision: str | None, token: str | bool | None) -> Any:
    try:
        return huggingface_hub.HfApi().model_info(name, revision=revision, files_metadata=True, token=token)
    except HFValidationError as error:
        raise CheckpointError(f"{name}: neither a folder nor a Hub id: {error}") from error
    except HfHubHTTPError as error:
        raise CheckpointError(f"{name}: no such folder, and the Hub says: {error}") from error
    except Exception as error:  # of httpx or requests, depending on huggingface_hub
        raise CheckpointError(
            f"{name}: no such folder, and the Hub at {huggingface_hub.constants.ENDPOINT} cannot be reached: {error}"
        ) from error


def _lay_out(info: Any, name: str, folder: str, subfolder: str, token: str | bool | None) -> dict[str, HubFile]:
    """Fill the folder; return its files on the Hub by path. File names are untrusted: none may leave the folder."""
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
            remote[path] = HubFile(path, url, nbytes, str(version), token)
        elif last.endswith(SMALL) and nbytes <= MAX_SMALL_NBYTES and not last.startswith("tokenizer"):
            _fetch_small(name, file, path, str(info.sha), token)
    return remote


def _fetch_small(name: str, file: str, path: str, commit: str, token: str | bool | None) -> None:
    try:
        shutil.copyfile(huggingface_hub.hf_hub_download(name, file, revision=commit, token=token), path)
    except Exception as error:  # of httpx or requests, or of the cache on disk
        raise CheckpointError(f"{name}: {file} cannot be fetched from the Hub: {error}") from error
