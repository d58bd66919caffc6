"""The arguments of `ModelEngine`: dataclasses, and how they are read from dicts, YAML files and other dataclasses."""

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

import yaml

from lowmem_load.errors import ConfigError, UnsupportedError

T = TypeVar("T", "ModelArguments", "DistConfig")

_ALIASES = {
    "model_name_or_path": "model",
    "flash_attn": "attn_implementation",
    "enable_activation_checkpointing": "gradient_checkpointing",
}
"""Names that LLaMA-Factory has for some of `ModelArguments`."""

_MODEL_CLASSES = {"llm": None, "other": "AutoModel"}
"""LLaMA-Factory's `model_class` -> auto_class. "llm" is the class that the checkpoint itself names."""

_NEAR_MISS = 0.85
"""Similarity from which a key of a pipeline file is taken for a misspelt one of ours, as difflib counts it."""

_OWN_KEYWORDS = {
    "attn_implementation": "write it beside model_kwargs",
    "auto_class": "write it beside model_kwargs",
    "revision": "write it beside model_kwargs",
    "trust_remote_code": "write it beside model_kwargs",
    "verify": "write it beside model_kwargs",
    "dtype": "the precision decides it: set bf16 and fp16, here or in the ds_config",
    "torch_dtype": "the precision decides it: set bf16 and fp16, here or in the ds_config",
    "device_map": "DeepSpeed places the parameters",
    "ds_config": "write it as dist_config.config_file",
}
"""Keywords of `load_model` that have another place than `ModelArguments.model_kwargs`, and which one."""


@dataclass(frozen=True, slots=True)
class ModelArguments:
    """What to load, and how it is to be trained.

    Attributes:
        model: a local folder or a Hub id.
        auto_class: a transformers class, its name, or None for the class that the checkpoint names.
        trust_remote_code: whether code that comes with the checkpoint may run.
        revision: branch, tag or commit on the Hub.
        attn_implementation: "eager", "sdpa", "flash_attention_2", ...; None for transformers' choice.
        bf16, fp16: the training arguments of these names; None where they are not given. See docs/precision.md.
        freeze: glob patterns over parameter names (`fnmatch`, case-sensitive); what matches is not trained.
        gradient_checkpointing: None is True for training. Without effect when the engine is not for training.
        gradient_checkpointing_kwargs: for `torch.utils.checkpoint.checkpoint`; use_reentrant is False if absent.
        verify: as for `load_model`.
        model_kwargs: further keywords of `from_pretrained`: token, cache_dir, subfolder, num_labels, ...

    Raises:
        ConfigError: a value has the wrong type, or model_kwargs has a keyword with a place of its own.
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
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        patterns: Any = [self.freeze] if isinstance(self.freeze, str) else self.freeze
        _check(self, "model", (str, os.PathLike), "a folder or a Hub id")
        if not os.fspath(self.model):
            raise ConfigError("ModelArguments.model: expected a folder or a Hub id, got an empty string")
        _check(self, "auto_class", (str, type, None), "a class, its name, or None")
        for name in ("trust_remote_code", "verify"):
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
        misplaced = [f"{key} ({_OWN_KEYWORDS[key]})" for key in self.model_kwargs if key in _OWN_KEYWORDS]
        if misplaced:
            raise ConfigError(f"ModelArguments.model_kwargs: remove {', '.join(misplaced)}")


@dataclass(frozen=True, slots=True)
class DistConfig:
    """How the model is distributed.

    Attributes:
        config_file: the ds_config: a dict, or the path of its JSON file.
        name: "deepspeed"; there is no other.
        timeout: seconds that a collective may take; None for `DistributedInterface`'s default.

    Raises:
        ConfigError: a value has the wrong type, or name is another one.
    """

    config_file: Mapping[str, Any] | str | os.PathLike[str]
    name: str = "deepspeed"
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.name != "deepspeed":
            raise ConfigError(f"DistConfig.name: expected 'deepspeed', got {self.name!r}; nothing else is supported")
        _check(self, "config_file", (Mapping, str, os.PathLike), "a ds_config, or the path of its JSON file")
        _check(self, "timeout", (int, float, None), "a number of seconds")
        if self.timeout is not None and not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise ConfigError(f"DistConfig.timeout: expected a positive number of seconds, got {self.timeout!r}")


def read_arguments(model_args: Any, dist_config: Any = None) -> tuple[ModelArguments, DistConfig, dict[str, Any]]:
    """Return the arguments of `ModelEngine` as dataclasses, and the keys that belong to others.

    A mapping (or the content of a YAML file) has one of three forms:

    1. Names of `ModelArguments` and nothing else.
    2. A whole pipeline's, flat, as LLaMA-Factory v1 writes it: names of `ModelArguments` beside a `dist_config` and
       the keys of others, which are returned as they are. A key that looks like a misspelt one of ours is an error.
    3. A whole pipeline's, in sections: the names are below `model_args`.

    LLaMA-Factory's `flash_attn`, `enable_activation_checkpointing` and `model_class` are understood. A relative
    `config_file` is looked for beside the YAML file that names it, then in the current directory.

    A `dist_config` that is given takes precedence over the one in model_args.

    Raises:
        ConfigError: a file cannot be read, a name is unknown or missing, a value has the wrong type.
        UnsupportedError: quant_config or model_class asks for something that cannot be streamed.
    """
    section: Any = None
    extra: dict[str, Any] = {}
    if isinstance(model_args, ModelArguments):
        args, given = model_args, None
    else:
        given = _mapping(model_args, "model_args")
        args, section, extra = _split(given)
    if dist_config is None and section is not None and given is not None:
        return args, _dist_config(_Given(f"{given.where}: dist_config", section, given.folder)), extra
    if dist_config is None:
        raise ConfigError(
            'no dist_config: pass {"name": "deepspeed", "config_file": "ds_z3.json"} or write it beside the model'
        )
    if isinstance(dist_config, DistConfig):
        return args, dist_config, extra
    return args, _dist_config(_mapping(dist_config, "dist_config")), extra


@dataclass(frozen=True, slots=True)
class _Given:
    """What a caller passed.

    Attributes:
        where: how messages call it.
        values: a mapping, unless somebody wrote something else there.
        folder: of the YAML file it comes from.
        foreign: it was written for other readers, too: somebody else's dataclass.
    """

    where: str
    values: Any
    folder: Path | None = None
    foreign: bool = False


def _mapping(argument: Any, where: str) -> _Given:
    if isinstance(argument, Mapping):
        return _Given(where, dict(argument))
    if isinstance(argument, (str, os.PathLike)):
        return _read_yaml(os.fspath(argument), where)
    if dataclasses.is_dataclass(argument) and not isinstance(argument, type):
        values = {item.name: getattr(argument, item.name) for item in dataclasses.fields(argument)}
        return _Given(type(argument).__name__, values, foreign=True)
    raise ConfigError(
        f"{where}: cannot use a {type(argument).__name__}; pass a dataclass, a dict, or the path of a YAML file"
    )


def _read_yaml(name: str, where: str) -> _Given:
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f'{where}: {name}: no such YAML file; for the name of a model write {{"model": {name!r}}}')
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not YAML: {error}") from error
    return _Given(name, values, path.absolute().parent)


def _split(given: _Given) -> tuple[ModelArguments, Any, dict[str, Any]]:
    """Return the model arguments, the dist_config section or None, and the rest. See `read_arguments` for the forms."""
    values = _checked_mapping(given)
    section = values.pop("dist_config", None)
    if "model_args" in values:
        inner = _Given(f"{given.where}: model_args", values.pop("model_args"))
        doubled = [key for key in values if key in _known(ModelArguments)]
        if doubled:
            raise ConfigError(f"{given.where}: {', '.join(doubled)} beside model_args; write it below model_args")
        _refuse_near_misses(given.where, values)
        return _build(ModelArguments, inner.where, _translated(inner)), section, values
    pipeline = given.foreign or "dist_config" in given.values
    translated = _translated(given)
    translated.pop("dist_config", None)
    if not pipeline:
        return _build(ModelArguments, given.where, translated), section, {}
    ours = _fields(ModelArguments)
    extra = {key: value for key, value in translated.items() if key not in ours}
    _refuse_near_misses(given.where, extra)
    own = {key: value for key, value in translated.items() if key in ours}
    return _build(ModelArguments, given.where, own), section, extra


def _checked_mapping(given: _Given) -> dict[str, Any]:
    if not isinstance(given.values, Mapping):
        raise ConfigError(f"{given.where}: expected a mapping, got {given.values!r}")
    return {str(key): value.value if isinstance(value, enum.Enum) else value for key, value in given.values.items()}


def _translated(given: _Given) -> dict[str, Any]:
    """Return the values with LLaMA-Factory's names replaced by ours."""
    values = _checked_mapping(given)
    if values.pop("quant_config", None) is not None:
        raise UnsupportedError(
            f"{given.where}: quant_config: not supported here; load_model takes transformers' quantization_config"
        )
    model_class = values.pop("model_class", None)
    if model_class is not None:
        if model_class not in _MODEL_CLASSES:
            raise UnsupportedError(
                f"{given.where}: model_class {model_class!r}: expected 'llm' or 'other'; for anything else write "
                "auto_class, such as 'AutoModelForSequenceClassification'"
            )
        values.setdefault("auto_class", _MODEL_CLASSES[model_class])
    for alias, name in _ALIASES.items():
        if alias in values:
            if name in values:
                raise ConfigError(f"{given.where}: {alias} and {name} are two names of one thing; keep one")
            values[name] = values.pop(alias)
    if values.get("attn_implementation") == "auto":
        values["attn_implementation"] = None
    return values


def _refuse_near_misses(where: str, keys: Mapping[str, Any]) -> None:
    for key in keys:
        near = difflib.get_close_matches(key, _known(ModelArguments), n=1, cutoff=_NEAR_MISS)
        if near:
            raise ConfigError(f"{where}: unknown key {key}; did you mean {near[0]}?")


def _dist_config(given: _Given) -> DistConfig:
    values = _checked_mapping(given)
    if "dist_config" in values:  # a pipeline's
        values = _checked_mapping(_Given(f"{given.where}: dist_config", values["dist_config"]))
    if "zero_optimization" in values:
        raise ConfigError(f'{given.where}: this is a ds_config itself; pass {{"config_file": it}}')
    # Before unknown keys: those of another backend are not the mistake.
    if values.get("name", "deepspeed") == "deepspeed" and isinstance(values.get("config_file"), (str, os.PathLike)):
        values["config_file"] = _found(os.fspath(values["config_file"]), given)
    elif values.get("name", "deepspeed") != "deepspeed":
        values = {"name": values["name"], "config_file": ""}
    return _build(DistConfig, given.where, values)


def _found(name: str, given: _Given) -> str:
    """Return where the ds_config file lies; `read_ds_config` takes strings that are no paths, too."""
    path = Path(name).expanduser()
    folders = [Path.cwd()] if given.folder is None else [given.folder, Path.cwd()]
    if not name.lstrip().startswith("{"):
        for folder in folders:
            if (folder / path).is_file():
                return str(folder / path)
        if path.suffix:
            places = [str(path.parent)] if path.is_absolute() else [str(folder) for folder in folders]
            raise ConfigError(f"{given.where}: config_file {name}: no such file in {' or '.join(places)}")
    return name


def _known(cls: type[ModelArguments | DistConfig]) -> list[str]:
    """Return every key that is understood where this dataclass is written."""
    names = _fields(cls)
    return [*names, *_ALIASES, "model_class", "model_args", "dist_config"] if cls is ModelArguments else names


def _fields(cls: type[ModelArguments | DistConfig]) -> list[str]:
    return [item.name for item in dataclasses.fields(cls)]


def _build(cls: type[T], where: str, values: Mapping[str, Any]) -> T:
    """Return the dataclass; a null counts as absent."""
    names = _fields(cls)
    unknown = [key for key in values if key not in names]
    if unknown:
        raise ConfigError(f"{where}: unknown key(s) {', '.join(unknown)}; known are {', '.join(_known(cls))}")
    if values.get(names[0]) is None:  # the only field without a default, in both dataclasses
        raise ConfigError(f"{where}: {names[0]} is missing")
    return cls(**{key: value for key, value in values.items() if value is not None})


def _check(owner: Any, name: str, types: tuple[type | None, ...], expected: str) -> None:
    """Raise unless the field is of one of the types; a bool is no number here, and None is none unless listed."""
    value: object = getattr(owner, name)
    wanted = tuple(type(None) if item is None else item for item in types)
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise ConfigError(f"{type(owner).__name__}.{name}: expected {expected}, got {value!r}")
