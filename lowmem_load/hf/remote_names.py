"""Names of checkpoints that are not on this machine: a local folder takes the place of a URL, or of a streamed Hub id.

Inside `urls_as_names`, configurations, tokenizers and auto classes of transformers get that folder, whoever asks.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import huggingface_hub
import transformers.models.auto.auto_factory as auto_factory
import transformers.models.auto.modeling_auto  # noqa: F401  defines the auto classes of models

from lowmem_load import foreign_names
from lowmem_load.errors import CheckpointError, UnsupportedError
from lowmem_load.hf.hub_files import hub_keywords
from lowmem_load.hf.load_lock import is_loading
from lowmem_load.hf.model_folder import check_name, no_folder
from lowmem_load.io.stand_ins import is_stand_in, is_url, origin_of, origins_named
from lowmem_load.replaced import replaced

T = TypeVar("T")

_NAME = "pretrained_model_name_or_path"

_OF_THE_HUB = ("revision", "token", "cache_dir", "force_download", "local_files_only", "proxies", "resume_download")
"""Keywords of `from_pretrained` that a folder has no use for."""


def find_folder(
    name: Any, kwargs: Mapping[str, Any], *, stream: bool = False, check: Callable[[], object] = int
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

        folder = folder_of_url(name, subfolder=subfolder, variant=kwargs.get("variant"), check=check)
    elif stream and isinstance(name, str) and not os.path.isdir(name) and not _is_cached(name, kwargs):
        from lowmem_load.io.remote_checkpoint import folder_of_model

        keywords = hub_keywords(kwargs, ("revision", "token", "cache_dir"))
        folder, _ = folder_of_model(name, subfolder=subfolder, check=check, **keywords)
    else:
        return name, dict(kwargs)
    return folder, {key: value for key, value in kwargs.items() if key not in _OF_THE_HUB}


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
        return Checkpoint(origin_of(name), folder_of_url(name, subfolder=subfolder), None)
    if os.path.isdir(name):
        return Checkpoint(name, name, None)
    check_name(name, "")
    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        return Checkpoint(name, *folder_of_model(name, subfolder=subfolder, revision=revision))
    try:
        return Checkpoint(
            name, str(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True)), None
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{no_folder(name)}, and not in the cache of the Hub; HF_HUB_OFFLINE is set, so the Hub was not asked"
        ) from error


@contextlib.contextmanager
def urls_as_names(*, everywhere: bool = False, in_load: bool = False) -> Iterator[None]:
    """Inside, transformers takes URLs as names. Models are left to loads of this package; this may be one of them."""
    owners = [foreign_names.AUTO_MODEL.of(cls) for cls in _auto_models(auto_factory._BaseAutoModelClass)]
    handlers = dict.fromkeys((*owners, *foreign_names.NAMED), _from_folder)
    if not in_load:
        handlers[foreign_names.FROM_PRETRAINED] = _refuse_remote
    with replaced(handlers, everywhere=everywhere):
        yield


def _auto_models(base: type) -> Iterator[type]:
    """Yield the auto classes of models: most have a copy of the method of the first one."""
    for cls in (base, *base.__subclasses__()):
        if "from_pretrained" in vars(cls):
            yield cls
        if cls is not base:
            yield from _auto_models(cls)


def _from_folder(ordinary: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
    name = args[0] if args else kwargs.get(_NAME)
    if not is_url(name):
        return ordinary(cls, *args, **kwargs)
    folder, kwargs = find_folder(name, kwargs)
    kwargs.pop(_NAME, None)
    with origins_named():
        return rename_loaded(ordinary(cls, folder, *args[1:], **kwargs))


def _refuse_remote(ordinary: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
    name = args[0] if args else kwargs.get(_NAME)
    is_remote = is_url(name) or (isinstance(name, str) and is_stand_in(name))
    if is_remote and not is_loading():
        raise UnsupportedError(
            f"{origin_of(str(name))}: only loads into ZeRO-3 partitions or FSDP2 shards read from a remote store, "
            "and none is active here; download the checkpoint and name its folder"
        )
    return ordinary(cls, *args, **kwargs)


def rename_loaded(loaded: T) -> T:
    """Give what was loaded from a folder the name that the folder stands for: users load more by it."""
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    named: list[Any] = [model, getattr(model, "config", None)]
    for thing in named:
        folder = getattr(thing, "name_or_path", None)
        if isinstance(folder, str) and origin_of(folder) != folder:
            thing.name_or_path = origin_of(folder)
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
