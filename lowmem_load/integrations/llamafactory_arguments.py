"""The arguments of `ModelEngine`: dataclasses, and how to read them from dicts, YAML files and other dataclasses."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import torch
import yaml

from lowmem_load.errors import ConfigError, UnsupportedError

_ALIASES = {
    "model_name_or_path": "model",
    "flash_attn": "attn_implementation",
    "enable_activation_checkpointing": "gradient_checkpointing",
}
"""LLaMA-Factory's names for some fields of `ModelArguments`."""

_MODEL_CLASSES = {"llm": None, "other": "AutoModel"}
"""LLaMA-Factory's `model_class` -> auto_class. "llm" is the class that the checkpoint names."""

_MISPLACED = {
    **dict.fromkeys(("dtype", "torch_dtype"), "set bf16 and fp16, here or in the ds_config"),
    "device_map": "DeepSpeed places the parameters",
    "ds_config": "write it as dist_config.config_file",
}
"""Keywords of `load_model` that must not be in `ModelArguments.model_kwargs`, and what to do instead."""


def _check_types(arguments: Any, types: Mapping[str, tuple[type, ...]]) -> None:
    """Raise ConfigError unless each field has one of its types. A bool is not a number here."""
    for name, kinds in types.items():
        value: object = getattr(arguments, name)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ConfigError(f"{type(arguments).__name__}.{name}: expected {expected}, got {value!r}")


@dataclass(frozen=True, slots=True)
class ModelArguments:
    """What to load, and how to train it.

    Attributes:
        model: a local folder, a Hub id or a URL.
        auto_class: a transformers class, its name, or None for the class that the checkpoint names.
        trust_remote_code: whether code that comes with the checkpoint may run.
        revision: branch, tag or commit on the Hub.
        attn_implementation: "eager", "sdpa", "flash_attention_2", ...; None for transformers' choice.
        bf16, fp16: the training arguments of these names; None if there are none. See docs/reference/configuration.md.
        freeze: glob patterns over parameter names (`fnmatch`, case-sensitive). Matching parameters are not trained.
        gradient_checkpointing: None means True for training. Ignored if the engine is not for training.
        gradient_checkpointing_kwargs: for `torch.utils.checkpoint.checkpoint`; use_reentrant is False if absent.
        stream: as for `load_model`.
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
    stream: bool = False
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        types: dict[str, tuple[type, ...]] = {
            "model": (str, os.PathLike),
            "auto_class": (str, type, NoneType),
            "freeze": (str, Sequence),
            **dict.fromkeys(("trust_remote_code", "stream"), (bool,)),
            **dict.fromkeys(("revision", "attn_implementation"), (str, NoneType)),
            **dict.fromkeys(("bf16", "fp16", "gradient_checkpointing"), (bool, NoneType)),
            **dict.fromkeys(("gradient_checkpointing_kwargs", "model_kwargs"), (Mapping,)),
        }
        _check_types(self, types)
        if not os.fspath(self.model):
            raise ConfigError("ModelArguments.model: expected a folder or a Hub id, got an empty string")
        patterns = (self.freeze,) if isinstance(self.freeze, str) else tuple(self.freeze)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise ConfigError(f"ModelArguments.freeze: expected a list of glob patterns, got {self.freeze!r}")
        object.__setattr__(self, "model", os.fspath(self.model))
        object.__setattr__(self, "freeze", patterns)
        elsewhere = {**dict.fromkeys(_fields(ModelArguments), "write it beside model_kwargs"), **_MISPLACED}
        misplaced = [f"{key} ({elsewhere[key]})" for key in self.model_kwargs if key in elsewhere]
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
        is_deepspeed = self.name == "deepspeed"
        types: dict[str, tuple[type, ...]] = {
            "config_file": (Mapping, str, os.PathLike) if is_deepspeed else (NoneType,),  # fsdp2 has no ds_config
            "timeout": (int, float, NoneType),
            **dict.fromkeys(("reshard_after_forward", "offload_params", "pin_memory"), (bool,)),
        }
        _check_types(self, types)
        if self.mixed_precision not in PRECISIONS:
            raise ConfigError(
                f"DistConfig.mixed_precision: expected one of {', '.join(PRECISIONS)}, got {self.mixed_precision!r}"
            )
        if self.timeout is not None and not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise ConfigError(f"DistConfig.timeout: expected a positive number of seconds, got {self.timeout!r}")


def read_arguments(model_args: Any, dist_config: Any = None) -> tuple[ModelArguments, DistConfig, dict[str, Any]]:
    """Return the arguments of `ModelEngine` as dataclasses, and the keys that belong to others.

    `ModelEngine` lists their forms. A given `dist_config` wins over the one in model_args.

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
    values: dict[str, Any]
    folder: Path | None = None  # of the YAML file that they come from
    is_shared: bool = False  # whether other readers have keys in it


def _read(argument: Any, where: str) -> _Section:
    folder, is_foreign = None, False
    if isinstance(argument, (str, os.PathLike)):
        path = Path(argument).expanduser()
        where, argument, folder = str(argument), _read_yaml(path, where), path.absolute().parent
    elif dataclasses.is_dataclass(argument) and not isinstance(argument, type):  # another library's
        where, is_foreign = type(argument).__name__, True
        argument = {item.name: getattr(argument, item.name) for item in dataclasses.fields(argument)}
    if not isinstance(argument, Mapping):
        raise ConfigError(f"{where}: expected a dataclass, a mapping, or the path of a YAML file; got {argument!r}")
    values = {str(key): value.value if isinstance(value, enum.Enum) else value for key, value in argument.items()}
    return _Section(where, values, folder, is_foreign or "dist_config" in values)


def _read_yaml(path: Path, where: str) -> Any:
    if not path.is_file():
        raise ConfigError(
            f'{where}: {path}: no such YAML file; for the name of a model write {{"model": {str(path)!r}}}'
        )
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error


def _split(section: _Section) -> tuple[ModelArguments, _Section | None, dict[str, Any]]:
    """Return the engine's own arguments, those of `dist_config`, and what belongs to others."""
    values, dist_config, extra = _in_own_names(section), None, {}
    if (dist_values := values.pop("dist_config", None)) is not None:
        dist_config = dataclasses.replace(_read(dist_values, f"{section.where}: dist_config"), folder=section.folder)
    if section.is_shared:
        extra = {key: values.pop(key) for key in list(values) if key not in _fields(ModelArguments)}
    if values.get("model") is None:
        raise ConfigError(f"{section.where}: model is missing")
    return ModelArguments(**_known(ModelArguments, section.where, values)), dist_config, extra


def _in_own_names(section: _Section) -> dict[str, Any]:
    """Return values under the names of `ModelArguments`. Refuse what LLaMA-Factory has, and cannot be streamed."""
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
    file = values.get("config_file")
    if isinstance(file, (str, os.PathLike)) and section.folder is not None:
        # Beside the YAML file that names it, else in the current folder.
        beside, path = section.folder / file, Path(file).expanduser()
        values["config_file"] = str(path if path.is_file() and not beside.is_file() else beside)
    return DistConfig(**_known(DistConfig, section.where, values))


def _known(cls: type, where: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values for a dataclass; a null counts as absent. Raise ConfigError for a key that it does not have."""
    names = _fields(cls)
    if unknown := [key for key in values if key not in names]:
        raise ConfigError(f"{where}: unknown key(s) {', '.join(unknown)}; known are {', '.join(names)}")
    return {key: value for key, value in values.items() if value is not None}


def _fields(cls: type) -> list[str]:
    return [item.name for item in dataclasses.fields(cls)]
