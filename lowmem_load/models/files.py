"""The files of weights that a path stands for, and their tensors by name."""

from __future__ import annotations

import functools
import os
import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import huggingface_hub
import torch

from lowmem_load.errors import CheckpointError, listed
from lowmem_load.files.format import NESTS, CheckpointFile, CheckpointFormat
from lowmem_load.files.index import check_index, read_json
from lowmem_load.files.safetensors import Safetensors
from lowmem_load.models.model_folder import WEIGHTS_ENDS, is_training_state, no_folder
from lowmem_load.models.remote_names import cached_folder
from lowmem_load.planning.proof import prove_names
from lowmem_load.symbolic.constructor import Context
from lowmem_load.symbolic.tensor import SymbolicTensor
from lowmem_load.text import outer_prefix

T = TypeVar("T")

Rename: TypeAlias = Callable[[str], "str | None"] | Mapping[str, str]
"""Turns the name of a tensor in the files into its name in the module, None or "" for one that is left out: a function,
or a mapping of regular expressions, of which all are substituted, in order."""


COMPILED = "_orig_mod"
"""With which all names of a compiled module begin."""

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
    parts = {name: name.replace(".index", "").split(".")[1:-1] for name in names}
    if variant is not None:
        return [name for name in names if any(part.split("-")[0] == variant for part in parts[name])]
    return [name for name in names if not _is_variant(name)] or names


def _is_variant(name: str) -> bool:
    """Return whether a name has a part between its stem and its end."""
    return len(re.sub(r"(\.safetensors|\.bin|\.pt|\.pth|\.index|\.json)\b", "", name).split(".")) > 1


def _named_by(index: str) -> list[str]:
    check_index(index, needs_metadata=False)
    files = sorted(set(read_json(index)["weight_map"].values()))
    paths = [os.path.join(os.path.dirname(index), file) for file in files]
    if absent := [path for path in paths if not os.path.isfile(path)]:
        raise CheckpointError(f"{index}: names {listed(absent)}, which are not there; copy them, too")
    return paths


def tensors_in(paths: Iterable[str], context: Context) -> dict[str, torch.Tensor]:
    """Return the tensors of several files by name, as symbolic ones. Nothing of them is read.

    Raises CheckpointError if a name is in several files.
    """
    tensors: dict[str, torch.Tensor] = {}
    homes: dict[str, str] = {}
    for path in paths:
        file = context.file(path, file_format(path))
        for name, tensor in _symbols(file, context):
            if name in tensors:
                raise CheckpointError(
                    f"{name}: is in {homes[name]} and in {path}; name one of the files by its path, or pass variant="
                )
            tensors[name], homes[name] = tensor, path
    return tensors


def _symbols(file: CheckpointFile, context: Context) -> Iterator[tuple[str, torch.Tensor]]:
    expressions = {name: file.expression(name) for name in file.names}
    shared = {id(node): SymbolicTensor(node, context.read_now) for node in expressions.values()}
    yield from ((name, shared[id(node)]) for name, node in expressions.items())


def renamed(
    tensors: Mapping[str, T], rename: Rename | None, children: Collection[str]
) -> tuple[dict[str, T], set[str]]:
    """Return tensors under the names of the module, and which are left out.

    Without `rename`, what training code puts before all names is dropped. `children` are the first parts of the names
    in the module.

    Raises:
        CheckpointError: two tensors get one name.
    """
    outer = outer_prefix(tensors.keys(), [key for key in (*NESTS, COMPILED) if key not in children])
    new_name = (lambda name: name.removeprefix(outer)) if rename is None else _as_function(rename)
    names = {old: new for old in tensors if (new := new_name(old))}
    left_out = tensors.keys() - names.keys()
    prove_names("rename", tensors, names, left_out)
    return {new: tensors[old] for old, new in names.items()}, left_out


def _as_function(rename: Rename) -> Callable[[str], str | None]:
    if not isinstance(rename, Mapping):
        return rename
    patterns = [(re.compile(pattern), new) for pattern, new in rename.items()]

    def substitute(name: str) -> str:
        for pattern, new in patterns:
            name = pattern.sub(new, name)
        return name

    return substitute


def file_format(path: str) -> CheckpointFormat:
    """Return the format of a file of weights."""
    if path.endswith(".safetensors"):
        return Safetensors()
    from lowmem_load.files.torch_zip import NestedTorchZip  # few loads need it

    return NestedTorchZip()
