"""Names of checkpoints: files of a model on the Hub, and local folders that stand for a URL or a streamed Hub id."""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError
from transformers.utils import find_adapter_config_file

from lowmem_load import foreign_names
from lowmem_load.errors import CheckpointError
from lowmem_load.files.stand_ins import is_url, origin
from lowmem_load.models.model_folder import check_name, no_folder
from lowmem_load.phases import no_callback
from lowmem_load.replaced import Handlers

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
        from lowmem_load.files.remote_checkpoint import folder_of_url

        folder = folder_of_url(name, subfolder=subfolder, check=check)
    elif stream and isinstance(name, str) and not os.path.isdir(name) and not _is_cached(name, kwargs):
        from lowmem_load.files.remote_checkpoint import folder_of_model

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
    from lowmem_load.files.remote_checkpoint import folder_of_model, folder_of_url

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
    from lowmem_load.files.remote_checkpoint import WEIGHTS, of_variant

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


_DOWNLOAD_KEYWORDS = ("cache_dir", "force_download", "token", "local_files_only", "revision", "subfolder")
HUB_KEYWORDS = (*_DOWNLOAD_KEYWORDS, "proxies", "code_revision", "trust_remote_code")
"""Keywords of `from_pretrained` that say where files come from."""


def hub_keywords(kwargs: Mapping[str, Any], keys: Sequence[str] = HUB_KEYWORDS) -> dict[str, Any]:
    """Return these keywords with their values, as far as they are given."""
    return {key: kwargs[key] for key in keys if key in kwargs}


def adapter_config_file(name: str, kwargs: Mapping[str, Any]) -> str | None:
    """Return the path of the adapter_config.json that a name stands for; None if it stands for no adapter."""
    path: str | None = find_adapter_config_file(name, **hub_keywords(kwargs, _DOWNLOAD_KEYWORDS))
    return path


def config_file(name: str, kwargs: Mapping[str, Any]) -> str | None:
    """Return the path of the config.json that a name stands for, downloaded if need be; None if there is none."""
    if os.path.isfile(name):
        return name
    if os.path.isdir(name):
        file = os.path.join(name, kwargs.get("subfolder") or "", "config.json")
        return file if os.path.exists(file) else None
    try:
        path: str = huggingface_hub.hf_hub_download(
            name, "config.json", **{**hub_keywords(kwargs, _DOWNLOAD_KEYWORDS), "force_download": False}
        )
        return path
    except (OSError, ValueError):  # such as that there is no such model
        return None


def has_file(name: str, file: str, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a folder, or a model on the Hub (offline: in its cache), has the file, which is downloaded."""
    if os.path.isdir(name):
        return os.path.isfile(os.path.join(name, kwargs.get("subfolder") or "", file))
    try:
        huggingface_hub.hf_hub_download(name, file, **hub_keywords(kwargs, _DOWNLOAD_KEYWORDS))
    except EntryNotFoundError:  # also raised offline, for a file that is not in the cache
        return False
    return True


def cached_folder(name: str, kwargs: Mapping[str, Any]) -> str:
    """Return the folder of a model in the Hub's cache, which may lack files that no load has asked for.

    `huggingface_hub.snapshot_download` refuses that. Raises CheckpointError if the cache has nothing of the model.
    """
    from lowmem_load.files.remote_checkpoint import WEIGHTS

    folder = kwargs.get("subfolder") or ""
    keywords = {key: value for key, value in hub_keywords(kwargs, ("cache_dir", "revision")).items() if value}
    files = ("config.json", "model_index.json", "adapter_config.json", *WEIGHTS)
    for file in dict.fromkeys((*(posixpath.join(folder, file) for file in files), *files)):
        with contextlib.suppress(ValueError):  # the name is no Hub id
            path = huggingface_hub.try_to_load_from_cache(name, file, **keywords)
            if isinstance(path, str):
                return path.removesuffix(file).rstrip("/")
    try:  # of other files, which a module of one's own may have
        return str(huggingface_hub.snapshot_download(name, local_files_only=True, **keywords))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{no_folder(name)}, and not in the cache of the Hub; HF_HUB_OFFLINE is set, so the Hub was not asked"
        ) from error


def files_beside(name: str, files: Sequence[str]) -> list[str]:
    """Return the paths of those of the files that a folder, or a model on the Hub, has; they are downloaded."""
    if os.path.isdir(name):
        return [path for path in (os.path.join(name, file) for file in files) if os.path.isfile(path)]
    paths = []
    for file in files:
        with contextlib.suppress(EntryNotFoundError):  # also raised offline, for a file that is not in the cache
            paths.append(huggingface_hub.hf_hub_download(name, file))
    return paths


def commit_in(path: str) -> str:
    """Return the commit of a file in the Hub's cache; "" for a file elsewhere."""
    match = re.search(r"/models--[^/]+/snapshots/([0-9a-f]{40})/", path)
    return match[1] if match else ""


def pinned_commit(kwargs: Mapping[str, Any]) -> str:
    """Return the commit that keywords of `from_pretrained` name; "" where the Hub has to say."""
    revision = kwargs.get("revision")
    commit = str(getattr(revision, "resolved", revision))  # huggingface_hub 1.x: a string with the commit on it
    return commit if re.fullmatch("[0-9a-f]{40}", commit) else ""


def commit_of(name: str, kwargs: Mapping[str, Any]) -> str:
    """Return the commit that a name stands for now; "" where it is not known, and for an adapter."""
    commit = pinned_commit(kwargs) or commit_in(config_file(name, kwargs) or "")
    if not commit:
        return ""
    there = {**kwargs, "revision": commit, "force_download": False}
    return "" if adapter_config_file(name, there) is not None else commit


def find_adapter_as_asked(name: str, kwargs: Mapping[str, Any]) -> Handlers:
    """Have an auto class look for the adapter of a model in the cache that the load uses, not in the default one."""
    passed_on = {key: kwargs[key] for key in ("cache_dir", "local_files_only") if key in kwargs}

    def find(ordinary: Callable[..., Any], path: Any, **keywords: Any) -> Any:
        return ordinary(path, **({**passed_on, **keywords} if path == name else keywords))

    return {foreign_names.FIND_ADAPTER: find}
