"""The class and the configuration of a model that a name stands for, and its processor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedModel

from lowmem_load.errors import CheckpointError, ConfigError, UnsupportedError, error_text
from lowmem_load.files.index import base_of_adapter, check_model_config
from lowmem_load.models.model_folder import (
    adapter_config_file,
    check_config,
    check_name,
    config_file,
    find_file,
    find_folder,
    hub_keywords,
    what_is_there,
)


def model_config(name: str, kwargs: Mapping[str, Any], config_class: Any = None) -> Any:
    """Return the transformers configuration that `from_pretrained(name, **kwargs)` will use.

    `config_class` is the one of the model's class; None: the one that is registered for the checkpoint's `model_type`.
    """
    config = kwargs.get("config")
    if config is not None and not isinstance(config, str | os.PathLike):
        return config
    where, hub, file = name if config is None else os.fspath(config), hub_keywords(kwargs), None
    if config is None:
        check_name(name, kwargs.get("subfolder") or "")
    try:
        adapter = adapter_config_file(name, hub) if config is None else None
        if adapter is not None:
            where, hub = find_folder(base_of_adapter(adapter), {})
        file = config_file(where, hub)
        if file is not None:
            check_model_config(file)
        check_config(where, hub.get("subfolder") or "")
        # Without trust_remote_code transformers would ask at the keyboard, and wait.
        return (config_class or AutoConfig).from_pretrained(where, **{"trust_remote_code": False, **hub})
    except CheckpointError:
        raise
    except Exception as error:  # transformers trusts the values, so a wrong one may raise anything
        if file is None and not os.path.exists(where):
            raise CheckpointError(what_is_there(where, "", error)) from error
        raise CheckpointError(f"{file or where}: no usable model configuration: {error_text(error)}") from error


def model_class(auto_class: str | type | None, config: Any, *, trust_remote_code: bool) -> Any:
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


def _class_named(name: str, where: str) -> Any:
    cls = getattr(transformers, name, None)
    if not (isinstance(cls, type) and (issubclass(cls, PreTrainedModel) or name.startswith("AutoModel"))):
        raise ConfigError(
            f"{where}: transformers {transformers.__version__} has no model class {name!r}; "
            "pass a class, or trust_remote_code=True for code that comes with the checkpoint"
        )
    return cls


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
        if any(find_file(name, file, hub) for file in files):
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
