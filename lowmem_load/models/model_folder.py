"""The folder that the name of a model stands for: what lies in it, and whether it can be loaded from."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import huggingface_hub

from lowmem_load.errors import CheckpointError, UnsupportedError, error_text, listed
from lowmem_load.files.stand_ins import origin

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
    text = error_text(error, MAX_QUOTED).replace(name, origin(name))
    return f"{shown}: {text} It holds {listed(files)}"


_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.(safetensors|bin)")

WEIGHTS_ENDS = (".safetensors", ".bin", ".pt", ".pth")
"""Ends of names of files that may have weights."""

_TRAINING_STATE = re.compile(
    r"(optimizer|scheduler|scaler)\b.*|rng_state.*\.pth|.*_(optim|model)_states\.pt|training_args\.bin"
)
"""Files of a training run beside the weights."""


_FOREIGN_FILES: Mapping[str, str] = {
    ".gguf": 'model_class.from_pretrained(folder, gguf_file="{file}").save_pretrained(new_folder)',
    ".h5": "model_class.from_pretrained(folder, from_tf=True).save_pretrained(new_folder), with transformers 4",
    ".ckpt.index": "model_class.from_pretrained(folder, from_tf=True).save_pretrained(new_folder), with transformers 4",
    ".msgpack": "model_class.from_pretrained(folder, from_flax=True).save_pretrained(new_folder), with transformers 4",
    ".pth": "the script that came with the model, or torch.load(..., weights_only=True) and safetensors' save_file",
    ".pt": "the script that came with the model, or torch.load(..., weights_only=True) and safetensors' save_file",
}
"""How to convert weights that cannot be streamed, by the end of their file names."""


_INDEX = r"(\.index(\..+)?\.json)?"
"""What an index has after the name of the file in place of which there are several, which may be in other folders."""


def check_weights(name: str, subfolder: str, use_safetensors: bool | None) -> None:
    """Refuse a local folder with neither safetensors files nor `pytorch_model*.bin`, nor an index of such files."""
    folder = os.path.join(name, subfolder)
    if not os.path.isdir(folder):  # on the Hub, where transformers chooses the files
        return
    files = sorted(os.listdir(folder))
    safe = any(re.search(rf"\.safetensors{_INDEX}\Z", file) for file in files)
    torch_files = any(re.match(rf"pytorch_model.*\.bin{_INDEX}\Z", file) for file in files)
    if (safe and use_safetensors is not False) or (torch_files and not use_safetensors):
        return
    if safe or torch_files:
        there = "safetensors" if safe else "pytorch_model*.bin"
        raise CheckpointError(f"{folder}: use_safetensors={use_safetensors}, but it holds only {there}; drop it")
    states = [file for file in files if is_training_state(file)]
    foreign = {file: end for file in files for end in _FOREIGN_FILES if file.endswith(end) and file not in states}
    if not foreign:
        what = "it holds no weights at all"
        if states:
            what = f"it holds the state of a training run ({listed(states, 3)}); name the folder of the model"
        if any(file.endswith("_model_states.pt") for file in states):
            what += ", or make one by `lowmem-load consolidate`"
        raise CheckpointError(f"{folder}: no pytorch_model*.bin and no safetensors files; {what}")
    file, end = next(iter(foreign.items()))
    raise CheckpointError(
        f"{folder}: no pytorch_model*.bin and no safetensors files to stream from; it holds "
        f"{', '.join(list(foreign)[:5])}. Convert once with {_FOREIGN_FILES[end].format(file=file)}"
    )


def is_training_state(file: str) -> bool:
    """Return whether a file of this name has the state of a training run, and no weights."""
    return _TRAINING_STATE.fullmatch(file) is not None


def refuse_foreign(name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise for a keyword that asks for a file format which every rank would have to load in full."""
    for keyword, end in {"gguf_file": ".gguf", "from_tf": ".h5", "from_flax": ".msgpack"}.items():
        if kwargs.get(keyword):
            convert = _FOREIGN_FILES[end].format(file=kwargs[keyword])
            raise UnsupportedError(
                f"{name}: {keyword} cannot be streamed; convert once, without lowmem_load, by {convert}"
            )
