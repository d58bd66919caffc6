"""Files of a model on the Hub and in its cache."""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError
from transformers.utils import find_adapter_config_file

from lowmem_load import foreign_names
from lowmem_load.errors import CheckpointError
from lowmem_load.hf.model_folder import no_folder
from lowmem_load.replaced import Handlers

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
    from lowmem_load.io.remote_checkpoint import WEIGHTS

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
