"""The arguments of `ModelEngine`: dataclasses, and how to read them from dicts, YAML files and other dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml

from lowmem_load.errors import ConfigError, UnsupportedError

T = TypeVar("T", "ModelArguments", "DistConfig")

_ALIASES = {
    "model_name_or_path": "model",
    "flash_attn": "attn_implementation",
    "enable_activation_checkpointing": "gradient_checkpointing",
}
"""LLaMA-Factory's names for some fields of `ModelArguments`."""

_MODEL_CLASSES = {"llm": None, "other": "AutoModel"}
"""LLaMA-Factory's `model_class` -> auto_class. "llm" is the class that the checkpoint names."""

_NEAR_MISS = 0.85
"""Similarity (of difflib) from which a key of a pipeline file counts as a misspelt field."""

_RESERVED_KEYWORDS = {
    **dict.fromkeys(
        ("attn_implementation", "auto_class", "revision", "trust_remote_code", "verify", "stream"),
        "write it beside model_kwargs",
    ),
    **dict.fromkeys(("dtype", "torch_dtype"), "set bf16 and fp16 instead, here or in the ds_config"),
    "device_map": "DeepSpeed places the parameters",
    "ds_config": "write it as dist_config.config_file",
}
"""Keywords of `load_model` that must not be in `ModelArguments.model_kwargs`, and what to do instead."""


@dataclass(frozen=True, slots=True)
class ModelArguments:
    """What to load, and how to train it.

    Attributes:
        model: a local folder, a Hub id or a URL.
        auto_class: a transformers class, its name, or None for the class that the checkpoint names.
        trust_remote_code: whether code that comes with the checkpoint may run.
        revision: branch, tag or commit on the Hub.
        attn_implementation: "eager", "sdpa", "flash_attention_2", ...; None for transformers' choice.
        bf16, fp16: the training arguments of these names; None if there are none. See docs/precision.md.
        freeze: glob patterns over parameter names (`fnmatch`, case-sensitive). Matching parameters are not trained.
        gradient_checkpointing: None means True for training. Ignored if the engine is not for training.
        gradient_checkpointing_kwargs: for `torch.utils.checkpoint.checkpoint`; use_reentrant is False if absent.
        verify, stream: as for `load_model`.
        model_kwargs: further keywords of `from_pretrained`: token, cache_dir, subfolder, num_labels, ...

    Raises:
        ConfigError: a value has the wrong type, or model_kwargs has a keyword that belongs elsewhere.
    """

    model: str | os.PathLike[str]
    auto_class: str | type | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    attn_implementation: str | None = None
    bf16: bool | None = None
    fp16: bool | None = None
    freeze: Sequence[str] = ()
    gradient_checkpointing: bool | None = None
    gradient_checkpointing_kwargs: Mapping[str, Any] = field(default_factory=dict)
    verify: bool = False
    stream: bool = False
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        patterns: Any = [self.freeze] if isinstance(self.freeze, str) else self.freeze
        _check(self, "model", (str, os.PathLike), "a folder or a Hub id")
        if not os.fspath(self.model):
            raise ConfigError("ModelArguments.model: expected a folder or a Hub id, got an empty string")
        _check(self, "auto_class", (str, type, None), "a class, its name, or None")
        for name in ("trust_remote_code", "verify", "stream"):
            _check(self, name, (bool,), "true or false")
        for name in ("revision", "attn_implementation"):
            _check(self, name, (str, None), "a string")
        for name in ("bf16", "fp16", "gradient_checkpointing"):
            _check(self, name, (bool, None), "true or false, or nothing")
        for name in ("gradient_checkpointing_kwargs", "model_kwargs"):
            _check(self, name, (Mapping,), "a mapping of keywords")
        if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ConfigError(f"ModelArguments.freeze: expected a list of glob patterns, got {self.freeze!r}")
        object.__setattr__(self, "model", os.fspath(self.model))
        object.__setattr__(self, "freeze", tuple(patterns))
        misplaced = [f"{key} ({_RESERVED_KEYWORDS[key]})" for key in self.model_kwargs if key in _RESERVED_KEYWORDS]
        if misplaced:
            raise ConfigError(f"ModelArguments.model_kwargs: remove {', '.join(misplaced)}")


PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Dtypes by the names that `DistConfig.mixed_precision` takes."""


@dataclass(frozen=True, slots=True)
class DistConfig:
    """How to distribute the model.

    Attributes:
        config_file: the ds_config: a dict, or the path of its JSON file. None with fsdp2.
        name: "deepspeed" or "fsdp2".
        timeout: seconds that a collective may take; None for `DistributedInterface`'s default.
        mixed_precision: with fsdp2, the dtype of forward and backward: "bf16", "fp16" or "fp32". Parameters are stored
            in fp32.
        reshard_after_forward: with fsdp2, as `fully_shard` has it.
        offload_params: with fsdp2, whether parameters stay in host memory between steps.
        pin_memory: with fsdp2, whether that memory is pinned.

    Raises:
        ConfigError: a value has the wrong type, name is another backend, or a value belongs to the other backend.
    """

    config_file: Mapping[str, Any] | str | os.PathLike[str] | None = None
    name: str = "deepspeed"
    timeout: float | None = None
    mixed_precision: str = "bf16"
    reshard_after_forward: bool = True
    offload_params: bool = False
    pin_memory: bool = True

    def __post_init__(self) -> None:
        if self.name not in ("deepspeed", "fsdp2"):
            raise ConfigError(f"DistConfig.name: expected 'deepspeed' or 'fsdp2', got {self.name!r}")
        if self.name == "deepspeed":
            _check(self, "config_file", (Mapping, str, os.PathLike), "a ds_config, or the path of its JSON file")
        elif self.config_file is not None:
            raise ConfigError("DistConfig.config_file: a ds_config belongs to deepspeed; drop it, or name deepspeed")
        if self.mixed_precision not in PRECISIONS:
            raise ConfigError(
                f"DistConfig.mixed_precision: expected one of {', '.join(PRECISIONS)}, got {self.mixed_precision!r}"
            )
        for name in ("reshard_after_forward", "offload_params", "pin_memory"):
            _check(self, name, (bool,), "true or false")
        _check(self, "timeout", (int, float, None), "a number of seconds")
        if self.timeout is not None and not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise ConfigError(f"DistConfig.timeout: expected a positive number of seconds, got {self.timeout!r}")


def read_arguments(model_args: Any, dist_config: Any = None) -> tuple[ModelArguments, DistConfig, dict[str, Any]]:
    """Return the arguments of `ModelEngine` as dataclasses, and the keys that belong to others.

    For the forms that they have see docs/model_engine.md. A given `dist_config` wins over the one in model_args.

    Raises:
        ConfigError: a file cannot be read, a name is unknown or missing, a value has the wrong type.
        UnsupportedError: quant_config or model_class asks for something that cannot be streamed.
    """
    section: _Section | None = None
    extra: dict[str, Any] = {}
    if isinstance(model_args, ModelArguments):
        args = model_args
    else:
        args, section, extra = _split(_read(model_args, "model_args"))
    if isinstance(dist_config, DistConfig):
        return args, dist_config, extra
    if dist_config is not None:
        section = _read(dist_config, "dist_config")
    if section is None:
        raise ConfigError(
            'no dist_config: pass {"name": "deepspeed", "config_file": "ds_z3.json"} or write it beside the model'
        )
    return args, _dist_config(section), extra


@dataclass(frozen=True, slots=True)
class _Section:
    where: str  # their name in messages
    values: Mapping[str, Any]
    folder: Path | None = None  # of the YAML file that they come from
    is_foreign: bool = False  # from another library's dataclass, so other readers have fields in it too


def _read(argument: Any, where: str) -> _Section:
    if isinstance(argument, Mapping):
        return _Section(where, _plain(argument, where))
    if isinstance(argument, (str, os.PathLike)):
        return _read_yaml(os.fspath(argument), where)
    if dataclasses.is_dataclass(argument) and not isinstance(argument, type):
        where = type(argument).__name__
        values = {item.name: getattr(argument, item.name) for item in dataclasses.fields(argument)}
        return _Section(where, _plain(values, where), is_foreign=True)
    raise ConfigError(
        f"{where}: cannot use a {type(argument).__name__}; pass a dataclass, a dict, or the path of a YAML file"
    )


def _read_yaml(name: str, where: str) -> _Section:
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f'{where}: {name}: no such YAML file; for the name of a model write {{"model": {name!r}}}')
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not YAML: {error}") from error
    return _Section(name, _plain(values, name), path.absolute().parent)


def _plain(values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: expected a mapping, got {values!r}")
    return {str(key): value.value if isinstance(value, enum.Enum) else value for key, value in values.items()}


def _split(section: _Section) -> tuple[ModelArguments, _Section | None, dict[str, Any]]:
    values = _translate(section)
    dist_values = values.pop("dist_config", None)
    extra: dict[str, Any] = {}
    if section.is_foreign or "dist_config" in section.values:
        extra = {key: value for key, value in values.items() if key not in _fields(ModelArguments)}
        for key in extra:
            if near := difflib.get_close_matches(key, _known(ModelArguments), n=1, cutoff=_NEAR_MISS):
                raise ConfigError(f"{section.where}: unknown key {key}; did you mean {near[0]}?")
    own = {key: value for key, value in values.items() if key not in extra}
    where = f"{section.where}: dist_config"
    dist_config = None if dist_values is None else _Section(where, _plain(dist_values, where), section.folder)
    return _build(ModelArguments, section.where, own), dist_config, extra


def _translate(section: _Section) -> dict[str, Any]:
    values = dict(section.values)
    if values.pop("quant_config", None) is not None:
        raise UnsupportedError(
            f"{section.where}: quant_config: not supported here; load_model takes transformers' quantization_config"
        )
    model_class = values.pop("model_class", None)
    if model_class is not None:
        if model_class not in _MODEL_CLASSES:
            raise UnsupportedError(
                f"{section.where}: model_class {model_class!r}: expected 'llm' or 'other'; for anything else write "
                "auto_class, such as 'AutoModelForSequenceClassification'"
            )
        values.setdefault("auto_class", _MODEL_CLASSES[model_class])
    for alias, name in _ALIASES.items():
        if alias in values:
            if name in values:
                raise ConfigError(f"{section.where}: {alias} and {name} are two names of one thing; keep one")
            values[name] = values.pop(alias)
    if values.get("attn_implementation") == "auto":
        values["attn_implementation"] = None
    return values


def _dist_config(section: _Section) -> DistConfig:
    values = dict(section.values)
    if "zero_optimization" in values:
        raise ConfigError(f'{section.where}: this is a ds_config itself; pass {{"config_file": it}}')
    if values.get("name") not in (None, "deepspeed", "fsdp2"):  # report the backend, not the keys that only it knows
        values = {"name": values["name"]}
    elif isinstance(values.get("config_file"), (str, os.PathLike)):
        values["config_file"] = _locate(os.fspath(values["config_file"]), section.folder)
    return _build(DistConfig, section.where, values)


def _locate(name: str, folder: Path | None) -> str:
    """Return the path of a ds_config file: beside the YAML file that names it, else in the current directory."""
    if name.lstrip().startswith("{"):  # JSON text
        return name
    path = Path(name).expanduser()
    beside = path if folder is None else folder / path
    return str(path if path.is_file() and not beside.is_file() else beside)


def _known(cls: type[ModelArguments | DistConfig]) -> list[str]:
    return [*_fields(cls), *_ALIASES, "model_class", "dist_config"] if cls is ModelArguments else _fields(cls)


def _fields(cls: type[ModelArguments | DistConfig]) -> list[str]:
    return [item.name for item in dataclasses.fields(cls)]


def _build(cls: type[T], where: str, values: Mapping[str, Any]) -> T:
    """Return the dataclass; a null counts as absent."""
    names = _fields(cls)
    unknown = [key for key in values if key not in names]
    if unknown:
        raise ConfigError(f"{where}: unknown key(s) {', '.join(unknown)}; known are {', '.join(_known(cls))}")
    if values.get(names[0]) is None and values.get("name", "deepspeed") == "deepspeed":
        raise ConfigError(f"{where}: {names[0]} is missing")
    return cls(**{key: value for key, value in values.items() if value is not None})


def _check(owner: Any, name: str, types: tuple[type | None, ...], expected: str) -> None:
    """Raise unless the field has one of the types. A bool is not a number here."""
    value: object = getattr(owner, name)
    wanted = tuple(type(None) if item is None else item for item in types)
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise ConfigError(f"{type(owner).__name__}.{name}: expected {expected}, got {value!r}")
