"""What the name of a model stands for: its configuration, class and processor."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import huggingface_hub
import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from lowmem_load.errors import CheckpointError, ConfigError, UnsupportedError, error_text, listed
from lowmem_load.formats.index import base_of_adapter, check_model_config
from lowmem_load.hf.hub_files import adapter_config_file, config_file, has_file, hub_keywords
from lowmem_load.io.stand_ins import origin_of

MAX_QUOTED = 1000  # characters of another package's error in a message: transformers lists all model types

DTYPE_KEYWORD = "dtype" if hasattr(PretrainedConfig, "torch_dtype") else "torch_dtype"
"""The keyword of `from_pretrained`. transformers 4.56 renamed it and made the old name a property."""


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
            f"{os.path.join(origin_of(name), subfolder)}: has no config.json, which says what model the weights are "
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
        raise CheckpointError(_what_is_there(name, subfolder, error)) from error


def _what_is_there(name: str, subfolder: str, error: Exception) -> str:
    if not os.path.isdir(name):
        offline = "the Hub's cache does not have its files, and HF_HUB_OFFLINE is set"
        reason = offline if huggingface_hub.constants.HF_HUB_OFFLINE else error_text(error, MAX_QUOTED)
        return f"{no_folder(name)}; as a model on the Hub: {reason}"
    folder, shown = os.path.join(name, subfolder), os.path.join(origin_of(name), subfolder)
    files = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    shards = [match for match in map(_SHARD.fullmatch, files) if match]
    lacking = {f"{shard[1]}.{shard[2]}.index.json" for shard in shards}.difference(files)
    if lacking:
        return (
            f"{shown}: holds {listed([shard[0] for shard in shards], 3)}, but no {' or '.join(lacking)}, "
            "which says what tensor is in which file; copy it there, too, or save the model again"
        )
    text = error_text(error, MAX_QUOTED).replace(name, origin_of(name))
    return f"{shown}: {text} It holds {listed(files)}"


_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.(safetensors|bin)")

_TRAINING_STATE = re.compile(r"(optimizer|scheduler|scaler)\b.*|rng_state.*\.pth|.*_(optim|model)_states\.pt")
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
    states = [file for file in files if _TRAINING_STATE.fullmatch(file)]
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


def refuse_foreign(name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise for a keyword that asks for a file format which every rank would have to load in full."""
    for keyword, end in {"gguf_file": ".gguf", "from_tf": ".h5", "from_flax": ".msgpack"}.items():
        if kwargs.get(keyword):
            convert = _FOREIGN_FILES[end].format(file=kwargs[keyword])
            raise UnsupportedError(
                f"{name}: {keyword} cannot be streamed; convert once, without lowmem_load, by {convert}"
            )


def model_config(name: str, kwargs: Mapping[str, Any]) -> Any:
    """Return the transformers configuration that `from_pretrained(name, **kwargs)` will use."""
    given = kwargs.get("config")
    if given is not None and not isinstance(given, str | os.PathLike):
        return given
    where, hub, file = name if given is None else os.fspath(given), hub_keywords(kwargs), None
    if given is None:
        check_name(name, kwargs.get("subfolder") or "")
    try:
        adapter = adapter_config_file(name, hub) if given is None else None
        if adapter is not None:
            from lowmem_load.hf.remote_names import located

            where, hub = located(base_of_adapter(adapter), {})
        file = config_file(where, hub)
        if file is not None:
            check_model_config(file)
        check_config(where, hub.get("subfolder") or "")
        # Without trust_remote_code transformers would ask at the keyboard, and wait.
        return AutoConfig.from_pretrained(where, **{"trust_remote_code": False, **hub})
    except CheckpointError:
        raise
    except Exception as error:  # transformers trusts the values, so a wrong one may raise anything
        if file is None and not os.path.exists(where):
            raise CheckpointError(_what_is_there(where, "", error)) from error
        raise CheckpointError(
            f"{file or where}: no usable model configuration: {error_text(error, MAX_QUOTED)}"
        ) from error


def config_values(config: Any) -> dict[str, str]:
    """Return the values of a configuration as JSON, by key, without those of this machine, such as the folder."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items() if not str(key).startswith("_")}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    values = plain(config.to_dict())
    return {key: json.dumps(values[key], sort_keys=True, default=lambda value: type(value).__name__) for key in values}


def model_class(auto_class: str | type | None, config: Any, trust_remote_code: bool) -> Any:
    """Return the class whose `from_pretrained` to call; given None, the one that the configuration names."""
    if isinstance(auto_class, type):
        if not callable(getattr(auto_class, "from_pretrained", None)):
            raise ConfigError(f"auto_class {auto_class.__name__} has no from_pretrained; pass a transformers class")
        return auto_class
    if auto_class is not None:
        return _class_named(auto_class, "auto_class")
    architectures = getattr(config, "architectures", None) or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) and name for name in architectures):
        raise ConfigError(f"the model's config: architectures: expected a list of class names, got {architectures!r}")
    if not architectures:
        raise ConfigError("the model's config names no architectures; pass auto_class, such as 'AutoModelForCausalLM'")
    remote = getattr(config, "auto_map", None)
    if trust_remote_code and isinstance(remote, Mapping):
        for auto_name, reference in remote.items():
            if auto_name.startswith("AutoModel") and str(reference).rpartition(".")[2] == architectures[0]:
                return _class_named(auto_name, "auto_map of the model's config")
    return _class_named(architectures[0], "architectures of the model's config")


def plain_class(model: object) -> type:
    """Return the class that a model had before FSDP2's `fully_shard` gave it one of its own."""
    return next(cls for cls in type(model).__mro__ if "FSDPModule" not in (each.__name__ for each in cls.__mro__))


def _class_named(name: str, where: str) -> Any:
    found = getattr(transformers, name, None)
    is_model = isinstance(found, type) and (issubclass(found, PreTrainedModel) or name.startswith("AutoModel"))
    if not is_model:
        raise ConfigError(
            f"{where}: transformers {transformers.__version__} has no model class {name!r}; "
            "pass a class, or trust_remote_code=True for code that comes with the checkpoint"
        )
    return found


PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
TOKENIZER_FILES = (
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json"),
)
"""A checkpoint with one of the files of a kind comes with a processor, or with a tokenizer."""


def load_processor(name: str, kwargs: Mapping[str, Any]) -> Any:
    """Return the processor that comes with a checkpoint, else its tokenizer; None if it comes with neither."""
    check_name(name, kwargs.get("subfolder", ""))
    hub = hub_keywords(kwargs)
    for kind, files in (("AutoProcessor", PROCESSOR_FILES), ("AutoTokenizer", TOKENIZER_FILES)):
        if any(has_file(name, file, hub) for file in files):
            try:
                return getattr(transformers, kind).from_pretrained(name, **hub)
            except Exception as error:  # the tokenizers library raises no class of its own
                raise CheckpointError(
                    f"{name}: its {kind.removeprefix('Auto').lower()} cannot be loaded: {error}; "
                    "repair its files, or remove all of them to load the model alone"
                ) from error
    return None


def enable_checkpointing(model: Any, checkpoint_kwargs: Mapping[str, Any]) -> None:
    """Make the model recompute activations in the backward pass, and keep no key-value cache."""
    # transformers 5.23 renamed it, and warns about the old name.
    enable = getattr(model, "activation_checkpointing_enable", None)
    keyword = "gradient_checkpointing_kwargs" if enable is None else "activation_checkpointing_kwargs"
    try:
        (enable or model.gradient_checkpointing_enable)(**{keyword: dict(checkpoint_kwargs)})
    except ValueError as error:
        raise UnsupportedError(f"{type(model).__name__}: no gradient checkpointing: {error}") from error
    configs: list[Any] = [model.config, getattr(model.config, "text_config", None)]
    for config in configs:
        if hasattr(config, "use_cache"):
            config.use_cache = False
