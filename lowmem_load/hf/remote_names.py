"""Names of checkpoints that are not on this machine: a local folder stands for a URL, or a Hub id that is streamed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import huggingface_hub

from lowmem_load.errors import CheckpointError
from lowmem_load.hf.hub_files import cached_folder, hub_keywords
from lowmem_load.hf.model_folder import check_name
from lowmem_load.io.stand_ins import is_url, origin
from lowmem_load.phases import no_callback

T = TypeVar("T")

_OF_THE_HUB = ("revision", "token", "cache_dir", "force_download", "local_files_only", "proxies", "resume_download")
"""Keywords of `from_pretrained` that a folder has no use for."""


def find_folder(
    name: Any, kwargs: Mapping[str, Any], *, stream: bool = False, check: Callable[[], object] = no_callback
) -> tuple[Any, dict[str, Any]]:
    """Return the folder that takes the place of a name, and the keywords that go with it.

    Other names, and models that the Hub's cache holds, stay as they are.

    Args:
        name: a folder, a Hub id or a URL.
        kwargs: of `from_pretrained`.
        stream: whether a model on the Hub is read from there, if it is not in the cache.
        check: called while this waits; may raise to end it.
    """
    subfolder = kwargs.get("subfolder") or ""
    if is_url(name):
        from lowmem_load.io.remote_checkpoint import folder_of_url

        folder = folder_of_url(name, subfolder=subfolder, check=check)
    elif stream and isinstance(name, str) and not os.path.isdir(name) and not _is_cached(name, kwargs):
        from lowmem_load.io.remote_checkpoint import folder_of_model

        keywords = hub_keywords(kwargs, ("revision", "token", "cache_dir"))
        folder, _ = folder_of_model(name, subfolder=subfolder, check=check, **keywords)
    else:
        return name, dict(kwargs)
    return folder, {key: value for key, value in kwargs.items() if key not in _OF_THE_HUB}


def local_folder(url: str, *, subfolder: str = "") -> str:
    """Return the local folder of a checkpoint in a store: its configuration, tokenizer and code, for any library.

    `AutoTokenizer.from_pretrained(local_folder(url))` works as for any folder, and so does `AutoModel...` inside of
    `streaming()` and after `install()`. Weights are not downloaded: empty files stand for them, which loads of this
    package read by ranges. Other code that reads weights needs a download.

    Args:
        url: of a folder (s3://, gs://, az://, https://, ...). Any other name is returned as it is.
        subfolder: of which the files are needed, too.

    Local; the processes of a node fetch the small files once.

    Raises:
        CheckpointError: there is no checkpoint, it cannot be read, or an HTTP server does not list its files.
        ConfigError: a package is not installed.
    """
    return str(find_folder(url, {"subfolder": subfolder})[0])


class Checkpoint(NamedTuple):
    """A checkpoint that can be described: `folder` has its small files, and files of weights that `open_file` opens."""

    name: str
    folder: str
    revision: str | None  # commit on the Hub


def find_checkpoint(name: str, *, subfolder: str = "", revision: str | None = None) -> Checkpoint:
    """Return the folder of a name, whose weights are not downloaded.

    With `HF_HUB_OFFLINE`, a Hub id means what is in the local cache.

    Raises:
        CheckpointError: there is no such folder, and no such model on the Hub, or the Hub cannot be reached.
    """
    from lowmem_load.io.remote_checkpoint import folder_of_model, folder_of_url

    if is_url(name):
        return Checkpoint(origin(name), folder_of_url(name, subfolder=subfolder), None)
    if os.path.isdir(name):
        return Checkpoint(name, name, None)
    check_name(name, "")
    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        return Checkpoint(name, *folder_of_model(name, subfolder=subfolder, revision=revision))
    return Checkpoint(name, cached_folder(name, {"revision": revision}), None)


def rename_loaded(loaded: T) -> T:
    """Give what was loaded from a folder the name that the folder stands for: users load more by it."""
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    named: list[Any] = [model, getattr(model, "config", None)]
    for thing in named:
        folder = getattr(thing, "name_or_path", None)
        if isinstance(folder, str) and origin(folder) != folder:
            thing.name_or_path = origin(folder)
    return loaded


def _is_cached(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Return whether the Hub's cache holds the weights of a model, or the Hub may not be asked."""
    if kwargs.get("local_files_only") or huggingface_hub.constants.HF_HUB_OFFLINE:
        return True
    from lowmem_load.io.remote_checkpoint import WEIGHTS, of_variant

    subfolder = kwargs.get("subfolder") or ""

    def cached(file: str) -> str | None:
        path = f"{subfolder}/{file}" if subfolder else file
        there = huggingface_hub.try_to_load_from_cache(name, path, **hub_keywords(kwargs, ("cache_dir", "revision")))
        return there if isinstance(there, str) else None

    try:
        for file in (of_variant(file, kwargs.get("variant")) for file in WEIGHTS):
            if (path := cached(file)) is not None and file.endswith(".json"):
                shards = set(json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"].values())
                return all(cached(str(shard)) is not None for shard in shards)
            if path is not None:
                return True
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{name}: neither a Hub id nor usable in the Hub's cache: {error}") from error
    return False
