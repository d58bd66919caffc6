"""What a name stands for: files, configuration, class, processor. Public names of transformers and the Hub only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import transformers
from huggingface_hub.errors import EntryNotFoundError
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import find_adapter_config_file

from lowmem_load.errors import CheckpointError, ConfigError, UnsupportedError, spelled
from lowmem_load.formats.index import base_of_adapter, check_model_config
from lowmem_load.hf.hub import commit_in, pinned_commit

MAX_TOLD = 1000
"""Characters of an error of somebody else's in a message: transformers lists all model types."""

DTYPE_KEYWORD = "dtype" if hasattr(PretrainedConfig, "torch_dtype") else "torch_dtype"
"""What `from_pretrained` calls the dtype: the older name became a property when 4.56 renamed it."""

HUB_KEYWORDS = (
    *("cache_dir", "force_download", "proxies", "token", "local_files_only", "revision", "code_revision"),
    *("subfolder", "trust_remote_code"),
)
"""Keywords of `from_pretrained` that say where files come from; the configuration is resolved with the same ones."""


_DOWNLOAD_KEYWORDS = ("cache_dir", "force_download", "token", "local_files_only", "revision", "subfolder")


def check_name(name: str, subfolder: str) -> None:
    """Refuse a name that is meant as a local folder but cannot be loaded from, before anything asks the Hub.

    Raises:
        CheckpointError: says what is missing.
    """
    looks_local = name.startswith((".", "~", os.sep)) or os.path.isabs(name) or name.count("/") > 1
    if not os.path.isdir(name):
        if os.path.isfile(name):
            raise CheckpointError(f"{name}: is a file; pass the folder that holds it and its config.json")
        if looks_local:
            raise CheckpointError(f"{name}: no such folder")
        return
    folder = os.path.join(name, subfolder)
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: no such subfolder")
    if not os.listdir(folder):
        raise CheckpointError(f"{folder}: the folder is empty")


_FOREIGN_FILES: Mapping[str, str] = {
    ".gguf": 'model_class.from_pretrained(folder, gguf_file="{file}").save_pretrained(new_folder)',
    ".h5": "model_class.from_pretrained(folder, from_tf=True).save_pretrained(new_folder), with transformers 4",
    ".ckpt.index": "model_class.from_pretrained(folder, from_tf=True).save_pretrained(new_folder), with transformers 4",
    ".msgpack": "model_class.from_pretrained(folder, from_flax=True).save_pretrained(new_folder), with transformers 4",
    ".pth": "the script that came with the model, or torch.load(..., weights_only=True) and safetensors' save_file",
    ".pt": "the script that came with the model, or torch.load(..., weights_only=True) and safetensors' save_file",
}
"""Weights that cannot be streamed, by the end of their file names, and what converts them."""


def check_weights(name: str, subfolder: str, use_safetensors: bool | None) -> None:
    """Refuse a local folder with neither safetensors files nor `pytorch_model*.bin`, naming what it holds instead.

    Raises:
        CheckpointError: says how to convert.
    """
    folder = os.path.join(name, subfolder)
    if not os.path.isdir(folder):  # a Hub id: transformers picks the files
        return
    files = sorted(os.listdir(folder))
    safe = any(file.endswith(".safetensors") for file in files)
    torch_files = any(file.startswith("pytorch_model") and file.endswith(".bin") for file in files)
    if (safe and use_safetensors is not False) or (torch_files and not use_safetensors):
        return
    if safe or torch_files:
        there = "safetensors" if safe else "pytorch_model*.bin"
        raise CheckpointError(f"{folder}: use_safetensors={use_safetensors}, but it holds only {there}; drop it")
    foreign = {file: end for file in files for end in _FOREIGN_FILES if file.endswith(end)}
    if not foreign:
        raise CheckpointError(f"{folder}: no pytorch_model*.bin and no safetensors files; it holds no weights at all")
    file, end = next(iter(foreign.items()))
    raise CheckpointError(
        f"{folder}: no pytorch_model*.bin and no safetensors files to stream from; it holds "
        f"{', '.join(list(foreign)[:5])}. Convert once with {_FOREIGN_FILES[end].format(file=file)}"
    )


def refuse_foreign(name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise when the caller asks for a format of which every rank would have to hold the whole model.

    Raises:
        UnsupportedError: says how to convert.
    """
    for keyword, end in {"gguf_file": ".gguf", "from_tf": ".h5", "from_flax": ".msgpack"}.items():
        if kwargs.get(keyword):
            convert = _FOREIGN_FILES[end].format(file=kwargs[keyword])
            raise UnsupportedError(
                f"{name}: {keyword} cannot be streamed; convert once, without lowmem_load, by {convert}"
            )


def model_config(name: str, kwargs: Mapping[str, Any]) -> Any:
    """Return the transformers configuration that `from_pretrained(name, **kwargs)` will use.

    Raises:
        CheckpointError: there is none, or it is malformed.
    """
    given = kwargs.get("config")
    if given is not None and not isinstance(given, str | os.PathLike):
        return given
    hub = {key: kwargs[key] for key in HUB_KEYWORDS if key in kwargs}
    where, file = name if given is None else os.fspath(given), None
    try:
        adapter = find_adapter_config_file(name, **{key: hub[key] for key in _DOWNLOAD_KEYWORDS if key in hub})
        if given is None and adapter is not None:
            where, hub = base_of_adapter(adapter), {}
        file = _config_file(where, hub)
        if file is not None:
            check_model_config(file)
        # Not given, transformers would ask at the keyboard, and wait.
        return AutoConfig.from_pretrained(where, **{"trust_remote_code": False, **hub})
    except CheckpointError:
        raise
    except Exception as error:  # of any class: it reads values as if they were what they should be
        raise CheckpointError(f"{file or where}: no usable model configuration: {spelled(error, MAX_TOLD)}") from error


def _config_file(name: str, hub: Mapping[str, Any]) -> str | None:
    """Return the path of the config.json that a name stands for; None where transformers has to say why there is none.

    On the Hub it is what transformers is about to fetch anyway.
    """
    if os.path.isfile(name):
        return name
    if os.path.isdir(name):
        file = os.path.join(name, hub.get("subfolder") or "", "config.json")
        return file if os.path.exists(file) else None
    where = {key: value for key, value in hub.items() if key in _DOWNLOAD_KEYWORDS and key != "force_download"}
    try:
        path: str = huggingface_hub.hf_hub_download(name, "config.json", **where)
        return path
    except (OSError, ValueError):  # such as that there is no such model
        return None


def commit_of(name: str, kwargs: Mapping[str, Any]) -> str:
    """Return the commit that a name on the Hub stands for now, for which the Hub is asked once.

    Nothing where that is not known, and for an adapter: the model that it belongs to has commits of its own.
    """
    hub = {key: kwargs[key] for key in HUB_KEYWORDS if key in kwargs}
    commit = pinned_commit(kwargs) or commit_in(_config_file(name, hub) or "")
    if not commit:
        return ""
    where = {key: hub[key] for key in _DOWNLOAD_KEYWORDS if key in hub and key != "force_download"}
    return "" if find_adapter_config_file(name, **{**where, "revision": commit}) is not None else commit


def config_text(config: Any) -> str:
    """Return what a configuration says of the model, as JSON: equal for ranks that build the same one.

    Not what says where it came from: names with an underscore in front, such as the folder.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items() if not str(key).startswith("_")}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return json.dumps(plain(config.to_dict()), sort_keys=True, default=lambda value: type(value).__name__)


def model_class(auto_class: str | type | None, config: Any, trust_remote_code: bool) -> Any:
    """Return the class whose `from_pretrained` to call.

    `auto_class` is a class, the name of a transformers class, or None for the one that `config.architectures` names.
    With `trust_remote_code`, `config.auto_map` may name a class that comes with the checkpoint.

    Raises:
        ConfigError: there is no such class.
    """
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


def _class_named(name: str, where: str) -> Any:
    found = getattr(transformers, name, None)
    is_model = isinstance(found, type) and (issubclass(found, PreTrainedModel) or name.startswith("AutoModel"))
    if not is_model:
        raise ConfigError(
            f"{where}: transformers {transformers.__version__} has no model class {name!r}; "
            "pass a class, or trust_remote_code=True for code that comes with the checkpoint"
        )
    return found


def refuse_quantized(config: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise for a quantized model that ZeRO-3 cannot partition, unless it is to be dequantized.

    Raises:
        UnsupportedError: names the method.
    """
    quantization = kwargs.get("quantization_config") or getattr(config, "quantization_config", None)
    if quantization is None or is_four_bit(quantization):
        return
    fields = _fields(quantization)
    if fields.get("dequantize") is True:
        return
    raise UnsupportedError(
        f"quantization {quantization_method(quantization)!r} cannot be partitioned by ZeRO-3: every rank "
        "would hold the whole model; ask for dequantize=True where the method has it (fp8, mxfp4), load a "
        "dequantized checkpoint, use bitsandbytes in 4 bits, or use ZeRO stage 0, 1 or 2"
    )


def quantization_method(quantization: Any) -> str:
    """Return the method of a quantization config, an object or as in a config.json."""
    method = _fields(quantization).get("quant_method", type(quantization).__name__)
    return str(getattr(method, "value", method))


def is_four_bit(quantization: Any) -> bool:
    """Return whether a quantization config, an object or as in a config.json, is one of bitsandbytes in 4 bits."""
    fields = _fields(quantization)
    method = fields.get("quant_method", "bitsandbytes")  # config.json of old checkpoints has none
    return getattr(method, "value", method) == "bitsandbytes" and bool(
        fields.get("load_in_4bit") or fields.get("_load_in_4bit")  # a property of the object
    )


def _fields(quantization: Any) -> Mapping[str, Any]:
    return quantization if isinstance(quantization, Mapping) else vars(quantization)


def cached_folder(name: str, subfolder: str, revision: str | None, cache_dir: str | os.PathLike[str] | None) -> str:
    """Return the folder in the Hub's cache that holds the configuration of the named model; nothing is fetched.

    Raises:
        CheckpointError: there is none.
    """
    for file in ("config.json", "adapter_config.json"):
        inside = "/".join((*Path(subfolder).parts, file))
        try:
            found = huggingface_hub.try_to_load_from_cache(name, inside, cache_dir=cache_dir, revision=revision)
        except ValueError as error:
            raise CheckpointError(f"{name}: neither a folder nor a Hub id: {error}") from error
        if isinstance(found, str):
            return os.path.dirname(found)
    raise CheckpointError(
        f"{name}: neither a folder nor, with this revision and subfolder, in the Hub's cache; download it first, or "
        "pass a folder"
    )


# -- what goes with a model ------------------------------------------------------------------------------------------

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
TOKENIZER_FILES = (
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json"),
)
"""Of either kind, one is enough to say that the checkpoint comes with a processor, or with a tokenizer."""


def load_processor(name: str, kwargs: Mapping[str, Any]) -> Any:
    """Return the processor that comes with a checkpoint, else its tokenizer; None if it comes with neither.

    Which of these holds is read off the names of its files, so that one that is there but broken is an error.

    Raises:
        CheckpointError: there is one, but it cannot be loaded.
    """
    hub = {key: kwargs[key] for key in HUB_KEYWORDS if key in kwargs}
    for kind, files in (("AutoProcessor", PROCESSOR_FILES), ("AutoTokenizer", TOKENIZER_FILES)):
        if any(_has_file(name, file, hub) for file in files):
            try:
                return getattr(transformers, kind).from_pretrained(name, **hub)
            except Exception as error:  # the tokenizers library raises no class of its own
                raise CheckpointError(
                    f"{name}: its {kind.removeprefix('Auto').lower()} cannot be loaded: {error}; "
                    "repair its files, or remove all of them to load the model alone"
                ) from error
    return None


def _has_file(name: str, file: str, hub: Mapping[str, Any]) -> bool:
    """Return whether the folder, or the Hub (offline: the cache), has the file. It is fetched with that."""
    if os.path.isdir(name):
        return os.path.isfile(os.path.join(name, hub.get("subfolder") or "", file))
    where = {key: value for key, value in hub.items() if key in _DOWNLOAD_KEYWORDS}
    try:
        huggingface_hub.hf_hub_download(name, file, **where)
    except EntryNotFoundError:  # also that it is not in the cache, when offline
        return False
    return True


def enable_checkpointing(model: Any, checkpoint_kwargs: Mapping[str, Any]) -> None:
    """Make the model recompute activations in the backward pass, and keep no key-value cache.

    Raises:
        UnsupportedError: this model cannot.
    """
    # 5.23 renamed it and warns about the old name.
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


def is_distributed_config(value: object) -> bool:
    """Return whether this is a `DistributedConfig` of transformers 5."""
    return type(value).__name__ == "DistributedConfig" and type(value).__module__.startswith("transformers.")


def offloads(model: Any) -> bool:
    """Return whether the `DistributedConfig` of a model keeps its shards in host memory."""
    return bool(getattr(getattr(model.config, "distributed_config", None), "fsdp_cpu_offload", False))


def blocks(model: Any) -> list[Any]:
    """Return the modules that a model does not want to be split: the layers that FSDP2 shards one by one."""
    names_ = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names_]
