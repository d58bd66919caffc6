"""The folder that the name of a model stands for: where it is, what lies in it, whether it can be loaded from.

A local folder may stand for a URL or a Hub id whose weights are not downloaded.
"""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError
from transformers.utils import find_adapter_config_file

from lowmem_load.errors import CheckpointError, UnsupportedError, error_text, listed
from lowmem_load.files.index import WEIGHTS, check_files, check_index, of_variant, read_json
from lowmem_load.files.remote_checkpoint import folder_of_model, folder_of_url
from lowmem_load.files.stand_ins import is_url, origin
from lowmem_load.phases import no_callback

MAX_QUOTED = 1000  # characters of another package's error in a message: transformers lists all model types


def check_name(name: str, subfolder: str) -> None:
    """Refuse a local folder that cannot be loaded from, before anything asks the Hub."""
    looks_local = name.startswith((".", "~", os.sep)) or os.path.isabs(name) or name.count("/") > 1
    if not os.path.isdir(name):
        if os.path.isfile(name):
            raise CheckpointError(f"{name}: is a file; pass the folder that holds it and its config.json")
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
        reason = offline if huggingface_hub.constants.HF_HUB_OFFLINE else error_text(error, MAX_QUOTED)
        return f"{no_folder(name)}; as a model on the Hub: {reason}"
    folder, shown = os.path.join(name, subfolder), os.path.join(origin(name), subfolder)
    files = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    shards = [match for match in map(_SHARD.fullmatch, files) if match]
    lacking = {f"{shard[1]}.{shard[2]}.index.json" for shard in shards}.difference(files)
    if lacking:
        return (
            f"{shown}: holds {listed([shard[0] for shard in shards], 3)}, but no {' or '.join(lacking)}, "
            "which says what tensor is in which file; copy it there, too, or save the model again"
        )
    text = f"{shown}: {error_text(error, MAX_QUOTED).replace(name, origin(name))} It holds {listed(files)}"
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


def refuse_gguf(name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise for a file in a format which every rank would have to load in full."""
    if file := kwargs.get("gguf_file"):
        raise UnsupportedError(
            f"{name}: lowmem_load cannot read gguf_file; convert it once, without lowmem_load, by "
            f'model_class.from_pretrained(folder, gguf_file="{file}").save_pretrained(new_folder)'
        )


# -- where a name is found: Hub ids and URLs ---------------------------------------------------------------------------

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
        folder = folder_of_url(name, subfolder=subfolder, check=check)
    elif stream and isinstance(name, str) and not os.path.isdir(name) and not _is_cached(name, kwargs):
        keywords = hub_keywords(kwargs, ("revision", "token", "cache_dir"))
        folder, _ = folder_of_model(name, subfolder=subfolder, check=check, **keywords)
    else:
        return name, dict(kwargs)
    return folder, {key: value for key, value in kwargs.items() if key not in _OF_THE_HUB}


def local_folder(url: str, *, subfolder: str = "") -> str:
    """Return a local folder of a checkpoint in an object store: its configuration, tokenizer and code.

    `AutoTokenizer.from_pretrained(local_folder(url))` works as for any folder, and so does `AutoModel...` after
    `install()`. Weights are not downloaded: files without data stand for them, which loads of
    this package read by ranges. Other code that reads weights needs a download.

    Args:
        url: of a folder (s3://, gs://, az://, https://, ...). Any other name is returned as it is.
        subfolder: of which the files are needed, too.

    Local; the processes of a node fetch the small files once.

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
    """Return the folder of a name, whose weights are not downloaded. A Hub id means what the cache holds, or the Hub.

    Raises:
        CheckpointError: there is no such folder, and no such model on the Hub, or the Hub cannot be reached.
    """
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
    """Return whether the Hub's cache holds the weights of a model, or the Hub may not be asked."""
    if kwargs.get("local_files_only") or huggingface_hub.constants.HF_HUB_OFFLINE:
        return True
    folder, variant = kwargs.get("subfolder") or "", kwargs.get("variant")
    try:
        paths = [_cached_file(name, posixpath.join(folder, of_variant(file, variant)), kwargs) for file in WEIGHTS]
    except ValueError as error:
        raise CheckpointError(f"{name}: neither a folder nor a Hub id: {error}") from error
    path = next(filter(None, paths), "")
    if not path.endswith(".json"):
        return bool(path)
    check_index(path, needs_metadata=False)
    try:
        check_files(path)
    except CheckpointError:
        return False
    return True


def _cached_file(name: str, file: str, kwargs: Mapping[str, Any]) -> str | None:
    """Return the path of a file in the Hub's cache. Raises ValueError if the name is not a Hub id."""
    keywords = {key: value for key, value in hub_keywords(kwargs, ("cache_dir", "revision")).items() if value}
    path = huggingface_hub.try_to_load_from_cache(name, file, **keywords)
    return path if isinstance(path, str) else None


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

    `huggingface_hub.snapshot_download` refuses that. Raises CheckpointError if the cache has nothing of the model.
    """
    folder = kwargs.get("subfolder") or ""
    files = ("config.json", "model_index.json", "adapter_config.json", *WEIGHTS)
    for file in dict.fromkeys((*(posixpath.join(folder, file) for file in files), *files)):
        with contextlib.suppress(ValueError):  # the name is not a Hub id
            if path := _cached_file(name, file, kwargs):
                return path.removesuffix(file).rstrip("/")
    keywords = hub_keywords(kwargs, ("cache_dir", "revision"))
    try:  # of other files, which a module of one's own may have
        return str(huggingface_hub.snapshot_download(name, local_files_only=True, **keywords))
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
        return _named_by(path) if path.endswith(".json") else [path]
    if not os.path.isdir(path):
        path = _download(path, subfolder, variant, **of_hub)
    folder = os.path.join(path, subfolder)
    if not os.path.isdir(folder):
        raise CheckpointError(no_folder(folder))
    paths = [os.path.join(folder, name) for name in _chosen(folder, os.listdir(folder), variant)]
    return _named_by(paths[0]) if paths[0].endswith(".json") else paths


def _download(name: str, subfolder: str, variant: str | None, **keywords: Any) -> str:
    """Return the folder of a model in the Hub's cache, with its files of weights. Offline: what is in the cache.

    `keywords` are revision, token and cache_dir.
    """
    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    download = functools.partial(huggingface_hub.snapshot_download, name, local_files_only=offline, **keywords)
    folder = posixpath.join(subfolder.strip("/"), "")
    try:
        if offline:
            return cached_folder(name, {**keywords, "subfolder": subfolder})
        of_repository = {key: value for key, value in keywords.items() if key != "cache_dir"}
        listed_names = huggingface_hub.HfApi().list_repo_files(name, **of_repository)
        names = [file.removeprefix(folder) for file in listed_names if posixpath.dirname(file) == folder.rstrip("/")]
        files = [folder + file for file in _chosen(f"{name}/{folder}", names, variant)]
        path = str(download(allow_patterns=files))
        if files[0].endswith(".json"):
            named = read_json(os.path.join(path, files[0]))["weight_map"].values()
            download(allow_patterns=[folder + file for file in named])
        return path
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
            raise CheckpointError(f"{folder}: holds the indexes {listed(indexes)}; name one by its path")
        if indexes or files:
            return indexes or files
    of_variant = f" of the variant {variant!r}" if variant else ""
    raise CheckpointError(
        f"{folder}: holds no weights{of_variant} ({', '.join(WEIGHTS_ENDS)}); {listed(names)} are there"
    )


def _of_variant(names: list[str], variant: str | None) -> list[str]:
    """Return the names of a variant ("model.fp16.safetensors"); without one, those of none, if there are any."""
    ends = {*"".join(WEIGHTS_ENDS).split("."), "index", "json"}
    parts = {name: [part for part in name.split(".")[1:] if part not in ends] for name in names}
    if variant is not None:
        return [name for name in names if any(part.split("-")[0] == variant for part in parts[name])]
    return [name for name in names if not parts[name]] or names


def _named_by(index: str) -> list[str]:
    check_index(index, needs_metadata=False)
    check_files(index)
    return [os.path.join(os.path.dirname(index), file) for file in sorted(set(read_json(index)["weight_map"].values()))]
