"""The folder that the name of a model stands for: where it is, what lies in it, whether it can be loaded from.

A local folder may stand for a URL or a Hub id whose weights are not downloaded.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError
from transformers.utils import find_adapter_config_file

from lowmem_load.errors import CheckpointError, error_text, listed
from lowmem_load.files.index import WEIGHTS, check_files, check_index, of_variant, read_json
from lowmem_load.files.remote_checkpoint import folder_of_model, folder_of_url
from lowmem_load.files.stand_ins import is_url, origin
from lowmem_load.phases import no_callback
from lowmem_load.training_checkpoints.safetensors_shards import shard_files


def check_name(name: str, subfolder: str) -> None:
    """Refuse a local folder that cannot be loaded from, before anything asks the Hub."""
    looks_local = name.startswith((".", "~", os.sep)) or os.path.isabs(name) or name.count("/") > 1
    if not os.path.isdir(name):
        if os.path.isfile(name):
            raise CheckpointError(f"{name}: is a file; pass the folder that has it and its config.json")
        if looks_local:
            raise CheckpointError(no_folder(name))
        return
    folder = os.path.join(name, subfolder)
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: no such subfolder")
    if not os.listdir(folder):
        raise CheckpointError(f"{folder}: the folder is empty")


def no_folder(name: str) -> str:
    """Return the text that a folder is not there; of a relative name also where it was looked for."""
    return f"{name}: no such folder" + ("" if os.path.isabs(name) else f" in {os.getcwd()}")


def check_config(name: str, subfolder: str) -> None:
    """Refuse a local folder without a configuration: transformers takes the default one of the class."""
    folder = os.path.join(name, subfolder)
    if os.path.isdir(folder) and not {"config.json", "adapter_config.json"}.intersection(os.listdir(folder)):
        raise CheckpointError(
            f"{os.path.join(origin(name), subfolder)}: has no config.json, which says what model the weights are "
            "of; copy it there, or pass config="
        )


def distributed_folder(name: str, subfolder: str) -> str | None:
    """Return the folder of a name if it is one of `save_pretrained(distributed_checkpoint=True)`; None for others."""
    folder = os.path.join(name, subfolder)
    return folder if os.path.isdir(folder) and shard_files(folder) else None


@contextlib.contextmanager
def files_explained(name: str, subfolder: str) -> Iterator[None]:
    """Turn transformers' error that it finds no files into one that says what is there."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # of the system, which names the file
            raise
        raise CheckpointError(what_is_there(name, subfolder, error)) from error


def what_is_there(name: str, subfolder: str, error: Exception) -> str:
    """Return the text that transformers finds no files, with what is there in their place."""
    if not os.path.isdir(name):
        offline = "the Hub's cache does not have its files, and HF_HUB_OFFLINE is set"
        reason = offline if huggingface_hub.constants.HF_HUB_OFFLINE else error_text(error)
        return f"{no_folder(name)}; as a model on the Hub: {reason}"
    folder, shown = os.path.join(name, subfolder), os.path.join(origin(name), subfolder)
    files = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    shards = [match for match in map(_SHARD.fullmatch, files) if match]
    lacking = {f"{shard[1]}.{shard[2]}.index.json" for shard in shards}.difference(files)
    if lacking:
        return (
            f"{shown}: has {listed([shard[0] for shard in shards], 3)}, but lacks {' or '.join(lacking)}, "
            "which says what tensor is in which file; copy it there, too, or save the model again"
        )
    text = f"{shown}: {error_text(error).replace(name, origin(name))} It has {listed(files)}"
    states = [file for file in files if is_training_state(file)]
    if states:
        text += f", of which {listed(states, 3)} are the state of a training run; name the folder of the model"
    if any(file.endswith("_model_states.pt") for file in states):
        text += ", or make one by `lowmem-load consolidate`"
    return text


_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.(safetensors|bin)")

WEIGHTS_ENDS = (".safetensors", ".bin", ".pt", ".pth")
"""Ends of names of files that may have weights."""

_TRAINING_STATE = re.compile(
    r"(optimizer|scheduler|scaler)\b.*|rng_state.*\.pth|.*_(optim|model)_states\.pt|training_args\.bin"
)
"""Files of a training run next to the weights."""


def is_training_state(file: str) -> bool:
    """Return whether a file of this name has the state of a training run, and no weights."""
    return _TRAINING_STATE.fullmatch(file) is not None


# -- where a name is found: Hub ids and URLs ---------------------------------------------------------------------------

T = TypeVar("T")

_OF_THE_HUB = ("revision", "token", "cache_dir", "force_download", "local_files_only", "proxies", "resume_download")
"""Keywords of `from_pretrained` that a folder has no use for."""


def find_folder(
    name: Any, kwargs: Mapping[str, Any], *, stream: bool = False, check: Callable[[], object] = no_callback
) -> tuple[Any, dict[str, Any]]:
    """Return the folder that takes the place of a URL, and the keywords of `from_pretrained` that go with it.

    With `stream` also that of a model on the Hub, unless it is in the cache. Other names stay as they are. `check` is
    called while this waits, and may raise to end it.
    """
    subfolder = kwargs.get("subfolder") or ""
    if is_url(name):
        folder = folder_of_url(name, subfolder=subfolder, check=check)
    elif stream and isinstance(name, str) and not os.path.isdir(name) and not _is_cached(name, kwargs):
        keywords = hub_keywords(kwargs, ("revision", "token", "cache_dir"))
        folder, _ = folder_of_model(name, subfolder=subfolder, check=check, **keywords)
    else:
        return name, dict(kwargs)
    return folder, {key: value for key, value in kwargs.items() if key not in _OF_THE_HUB}


def local_folder(url: str, *, subfolder: str = "") -> str:
    """Return the local folder that stands for a checkpoint at a URL. Any other name is returned as it is.

    It has the configuration, tokenizer and code, so `AutoTokenizer.from_pretrained(local_folder(url))` works as for any
    folder, and so does `AutoModel...` after `install()`. Weights are not downloaded: files without data stand for
    them, and lowmem_load reads ranges from the store. Other code that reads weights needs a download. It needs no other
    ranks, and the processes of a node fetch the small files once.

    Args:
        url: URL of a folder (s3://, gs://, az://, https://, ...).
        subfolder: subfolder whose files are needed, too. Default: none.

    Raises:
        CheckpointError: there is no checkpoint, it cannot be read, or an HTTP server does not list its files.
        ConfigError: a package is not installed.

    Example:
        folder = local_folder("s3://bucket/models/Llama-3.1-70B")
        config = AutoConfig.from_pretrained(folder)  # or AutoTokenizer
        model = load_model(folder, ds_config)  # reads ranges of the weights
    """
    return str(find_folder(url, {"subfolder": subfolder})[0])


def find_checkpoint(name: str, *, subfolder: str = "", revision: str | None = None) -> str:
    """Return the folder of a name, whose weights are not downloaded. A Hub id means what the cache has, or the Hub."""
    kwargs = {"subfolder": subfolder, "revision": revision}
    if not is_url(name):
        check_name(name, "")
    folder, _ = find_folder(name, kwargs, stream=True)
    return folder if os.path.isdir(folder) else cached_folder(name, kwargs)


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
    """Return whether the Hub's cache has the weights of a model, or the Hub may not be asked."""
    if kwargs.get("local_files_only") or huggingface_hub.constants.HF_HUB_OFFLINE:
        return True
    try:
        folder = os.path.join(cached_folder(name, kwargs), kwargs.get("subfolder") or "")
        paths = [os.path.join(folder, of_variant(file, kwargs.get("variant"))) for file in WEIGHTS]
        found = [path for path in paths if os.path.isfile(path)]
        return bool(found and files_of(found[0]))  # of an index, it checks the files
    except CheckpointError:
        return False


_DOWNLOAD_KEYWORDS = ("cache_dir", "force_download", "token", "local_files_only", "revision", "subfolder")
HUB_KEYWORDS = (*_DOWNLOAD_KEYWORDS, "proxies", "code_revision", "trust_remote_code")
"""Keywords of `from_pretrained` that say where files come from."""


def hub_keywords(kwargs: Mapping[str, Any], keys: Sequence[str] = HUB_KEYWORDS) -> dict[str, Any]:
    """Return these keywords with their values, as far as they are given."""
    return {key: kwargs[key] for key in keys if key in kwargs}


def adapter_config_file(name: str, kwargs: Mapping[str, Any]) -> str | None:
    """Return the path of the adapter_config.json that a name stands for; None if it does not stand for an adapter."""
    path: str | None = find_adapter_config_file(name, **hub_keywords(kwargs, _DOWNLOAD_KEYWORDS))
    return path


def config_file(name: str, kwargs: Mapping[str, Any]) -> str | None:
    """Return the path of the config.json that a name stands for, downloaded if need be; None if there is none."""
    if os.path.isfile(name):
        return name
    with contextlib.suppress(OSError, ValueError):  # such as that there is no such model
        return find_file(name, "config.json", {**kwargs, "force_download": False})
    return None


def find_file(name: str, file: str, kwargs: Mapping[str, Any]) -> str | None:
    """Return the path of a file of a folder, or of a model on the Hub (offline: in its cache), which is downloaded."""
    if os.path.isdir(name):
        path = os.path.join(name, kwargs.get("subfolder") or "", file)
        return path if os.path.isfile(path) else None
    try:
        return huggingface_hub.hf_hub_download(name, file, **hub_keywords(kwargs, _DOWNLOAD_KEYWORDS))
    except EntryNotFoundError:  # also raised offline, for a file that is not in the cache
        return None


def cached_folder(name: str, kwargs: Mapping[str, Any]) -> str:
    """Return the folder of a model in the Hub's cache, which may lack files that no load has asked for.

    Raises CheckpointError if the cache has nothing of the model.
    """
    keywords = hub_keywords(kwargs, ("cache_dir", "revision"))
    try:
        # It would refuse a folder that lacks one of the files that are not ignored.
        return str(huggingface_hub.snapshot_download(name, local_files_only=True, ignore_patterns="*", **keywords))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{no_folder(name)}, and not in the cache of the Hub; HF_HUB_OFFLINE is set, so the Hub was not asked"
        ) from error


def commit_in(path: str) -> str:
    """Return the commit of a file in the Hub's cache; "" for a file elsewhere."""
    match = re.search(r"/models--[^/]+/snapshots/([0-9a-f]{40})/", path)
    return match[1] if match else ""


def commit_of(name: str, kwargs: Mapping[str, Any]) -> str:
    """Return the commit that a name stands for now; "" where it is not known, and for an adapter."""
    revision = kwargs.get("revision")
    commit = str(getattr(revision, "resolved", revision))  # huggingface_hub 1.x: a string with the commit on it
    if not re.fullmatch("[0-9a-f]{40}", commit):
        commit = commit_in(config_file(name, kwargs) or "")
    if not commit:
        return ""
    there = {**kwargs, "revision": commit, "force_download": False}
    return "" if adapter_config_file(name, there) is not None else commit


# -- its files of weights, for loads by names --------------------------------------------------------------------------

FILE_KEYWORDS = frozenset(("subfolder", "variant", "revision", "token", "cache_dir"))
"""Keywords of `files_of`."""


def files_of(path: str, subfolder: str = "", variant: str | None = None, **of_hub: Any) -> list[str]:
    """Return the files of weights that a file, an index, a folder or a Hub id stands for. `of_hub`: see `_download`.

    Raises CheckpointError if there are none, or several that may be meant.
    """
    if os.path.isfile(path):
        files = [path]
    else:
        folder = os.path.join(path if os.path.isdir(path) else _download(path, subfolder, variant, **of_hub), subfolder)
        if not os.path.isdir(folder):
            raise CheckpointError(no_folder(folder))
        files = [os.path.join(folder, name) for name in _chosen(folder, os.listdir(folder), variant)]
    if files[0].endswith(".json"):
        names = _named_by(files[0])
        check_files(files[0])
        return [os.path.join(os.path.dirname(files[0]), name) for name in names]
    return files


def _download(name: str, subfolder: str, variant: str | None, **keywords: Any) -> str:
    """Return the folder of a model in the Hub's cache, with its files of weights. Offline: what is in the cache.

    `keywords` are revision, token and cache_dir.
    """
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return cached_folder(name, keywords)
    folder = posixpath.join(subfolder.strip("/"), "")
    try:
        listed_names = huggingface_hub.HfApi().list_repo_files(name, **hub_keywords(keywords, ("revision", "token")))
        names = [file.removeprefix(folder) for file in listed_names if posixpath.dirname(file) == folder.rstrip("/")]
        files = [folder + file for file in _chosen(f"{name}/{folder}", names, variant)]
        path = huggingface_hub.snapshot_download(name, allow_patterns=files, **keywords)
        if files[0].endswith(".json"):
            named = [folder + file for file in _named_by(os.path.join(path, files[0]))]
            huggingface_hub.snapshot_download(name, allow_patterns=named, **keywords)
        return str(path)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:  # errors of the Hub are one of these
        raise CheckpointError(f"{no_folder(name)}, and the Hub has none of this name: {error}") from error


def _chosen(folder: str, names: Iterable[str], variant: str | None) -> list[str]:
    """Return the names of the files of weights of a folder, or of the one index."""
    names = sorted(name for name in names if not is_training_state(name))
    for ends in (WEIGHTS_ENDS[:1], WEIGHTS_ENDS[1:]):
        files = _of_variant([name for name in names if name.endswith(ends)], variant)
        indexes = [name for end in ends for name in names if re.search(rf"\{end}\.index\b.*\.json\Z", name)]
        indexes = _of_variant(indexes, variant)
        if len(indexes) > 1:
            raise CheckpointError(f"{folder}: has the indexes {listed(indexes)}; name one by its path")
        if indexes or files:
            return indexes or files
    of_variant = f" of the variant {variant!r}" if variant else ""
    raise CheckpointError(
        f"{folder}: has no weights{of_variant} ({', '.join(WEIGHTS_ENDS)}); {listed(names)} are there"
    )


def _of_variant(names: list[str], variant: str | None) -> list[str]:
    """Return the names of a variant ("model.fp16.safetensors"); without one, those of none, if there are any."""
    ends = {*"".join(WEIGHTS_ENDS).split("."), "index", "json"}
    parts = {name: [part for part in name.split(".")[1:] if part not in ends] for name in names}
    if variant is not None:
        return [name for name in names if any(part.split("-")[0] == variant for part in parts[name])]
    return [name for name in names if not parts[name]] or names


def _named_by(index: str) -> list[str]:
    """Return the names of the files that an index names; raise CheckpointError if it is malformed."""
    check_index(index, needs_metadata=False)
    return sorted(set(read_json(index)["weight_map"].values()))
