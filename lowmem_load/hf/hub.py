"""Files of the Hub: asked for by one rank of a node, and taken from the cache by the others.

Part of the transformers seam, see `loader.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import transformers.models.auto.auto_factory as auto_factory
import transformers.utils.hub as transformers_hub

from lowmem_load.contract import TRANSFORMERS, require
from lowmem_load.hf.replaced import Replacement
from lowmem_load.symbolic.context import Once

require(
    TRANSFORMERS,
    {
        "transformers.models.auto.auto_factory": ("find_adapter_config_file",),
        "transformers.utils.hub": ("cached_files",),
    },
)

_SNAPSHOT = re.compile(r"/models--[^/]+/snapshots/([0-9a-f]{40})/")
"""In paths of the cache of the Hub: the commit that a file is of."""

_COMMIT = re.compile("[0-9a-f]{40}")


def commit_in(path: str) -> str:
    """Return the commit that a file in the cache of the Hub is of; "" for one that lies elsewhere."""
    found = _SNAPSHOT.search(path)
    return found[1] if found else ""


def pinned_commit(kwargs: Mapping[str, Any]) -> str:
    """Return the commit that keywords of `from_pretrained` ask for; "" where it is for the Hub to say.

    A `ResolvedRevision` of huggingface_hub 1.x is a text that has one beside it.
    """
    revision = kwargs.get("revision")
    commit = str(getattr(revision, "resolved", revision))
    return commit if _COMMIT.fullmatch(commit) else ""


def asked_once(once: Once) -> Replacement:
    """Let one of the ranks that share what they find ask the Hub, and download; the others look when it has.

    Of a commit, transformers 5 asks the Hub for nothing that the cache knows, not even for what it knows not to be
    there. So what one rank has asked for needs no second request.
    """

    def cached_files(
        ordinary: Callable[..., Any], path_or_repo_id: Any, filenames: list[str], *args: Any, **kwargs: Any
    ) -> Any:
        def ask() -> Any:
            return ordinary(path_or_repo_id, filenames, *args, **kwargs)

        def look(_: bytes) -> Any:
            return ordinary(path_or_repo_id, filenames, *args, **{**kwargs, "force_download": False})

        if os.path.isdir(path_or_repo_id):
            return ask()
        key = f"hub {path_or_repo_id} {kwargs.get('subfolder') or ''} {filenames}"
        return once(key, ask, lambda _: b"asked", look)

    return transformers_hub, "cached_files", cached_files


_LOOKUP = ("cache_dir", "local_files_only")
"""Keywords of `from_pretrained` that say where an adapter is looked for."""


def adapter_sought_alike(name: str, kwargs: Mapping[str, Any]) -> Replacement:
    """Let an auto class look for the adapter of a model where all else of it is looked for, not in the default cache.

    In the cache it is known that there is none; of another one each rank would ask the Hub.
    Source: transformers 5.23 `auto_factory.py`, `from_pretrained`: these keywords are not handed on.

    Adapters of other models are looked for as ever.
    """
    handed_on = {key: kwargs[key] for key in _LOOKUP if key in kwargs}

    def find_adapter_config_file(ordinary: Callable[..., Any], asked: Any, **keywords: Any) -> Any:
        return ordinary(asked, **({**handed_on, **keywords} if asked == name else keywords))

    return auto_factory, "find_adapter_config_file", find_adapter_config_file
