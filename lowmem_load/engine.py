"""ModelEngine: from arguments to a loaded model that is ready for `deepspeed.initialize`.

The order matters and is that of LLaMA-Factory v1: process group, DeepSpeed configuration as transformers sees it,
processor, model configuration, model. The arguments come as dataclasses, dicts or YAML files; `read_arguments` is all
that knows about that.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import enum
import fnmatch
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import yaml

from . import hf
from .config import hidden_size_of, read_ds_config, resolve_auto, zero_stage
from .distributed import DistributedInterface
from .errors import ConfigError, RankError, UnsupportedError
from .load import load_model
from .precision import precision_of, with_precision

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
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        patterns: Any = [self.freeze] if isinstance(self.freeze, str) else self.freeze
        _check(self, "model", (str, os.PathLike), "a folder or a Hub id")
        if not os.fspath(self.model):
            raise ConfigError("ModelArguments.model: expected a folder or a Hub id, got an empty string")
        _check(self, "auto_class", (str, type, None), "a class, its name, or None")
        _check(self, "trust_remote_code", (bool,), "true or false")
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


class ModelEngine:
    """Loads a model with its processor, ready for `deepspeed.initialize(model=..., config=engine.ds_config)`.

    Every rank constructs one. Any number may be constructed one after the other: none leaves a DeepSpeed
    configuration behind for transformers to see, also not when it fails.

    Args:
        model_args: `ModelArguments`, a mapping with these names, a YAML file, or another dataclass with these fields.
            A mapping or file may be that of a whole pipeline, see `read_arguments`.
        dist_config: `DistConfig`, a mapping with these names, or a YAML file; None if model_args has it.
        is_train: True puts the model into train mode and enables gradient checkpointing; False into eval mode.

    Attributes:
        args, dist_config, is_train: the arguments, as dataclasses.
        extra: top-level keys of a pipeline file that are not the engine's.
        distributed: the `DistributedInterface`.
        precision: in which parameters are stored and DeepSpeed runs.
        ds_config: the resolved ds_config: bf16.enabled and fp16.enabled spelled out, no "auto" but in optimizer and
            scheduler, whose values the training loop knows. Yours to add to.
        hf_deepspeed_config: the `HfDeepSpeedConfig` that was active while loading. Only the engine keeps it alive;
            transformers sees it inside `deepspeed_visible`.
        processor: AutoProcessor's or AutoTokenizer's result; None if the checkpoint comes without.
        model_config: the model's configuration, `model.config`.
        model: the model; `lowmem_load.load_report(model)` says how it was loaded.

    Collective: all ranks.

    Raises:
        ConfigError: an argument or the ds_config cannot be used; a freeze pattern matches no parameter.
        CheckpointError: the model, or its processor, is there but cannot be loaded.
        UnsupportedError: the model cannot be streamed, or cannot checkpoint activations though told to.
        RankError: another rank failed; the same error is raised on every rank. (Only unusable arguments stop just the
            rank that has them, for there is no process group yet.)
    """

    def __init__(self, model_args: Any, dist_config: Any = None, is_train: bool = True) -> None:
        self.args, self.dist_config, self.extra = read_arguments(model_args, dist_config)
        self.is_train = is_train
        timeout = self.dist_config.timeout
        self.distributed = DistributedInterface(timeout=None if timeout is None else timedelta(seconds=timeout))
        with self._on_all_ranks("reading the ds_config"):
            ds_config = read_ds_config(self.dist_config.config_file)
            zero_stage(ds_config)
            self.precision = precision_of(
                ds_config, absent="auto", trainer_bf16=self.args.bf16, trainer_fp16=self.args.fp16
            )
            ds_config = with_precision(ds_config, self.precision)
        with hf.deepspeed_config(ds_config) as alive:
            self.hf_deepspeed_config: Any = alive
            with self._on_all_ranks("preparing"):
                self.ds_config = self._prepare(ds_config)
            self.model = load_model(
                self.args.model, self.ds_config, auto_class=self.args.auto_class, **self._from_pretrained_kwargs()
            )
            self.model_config = self.model.config
            with self._on_all_ranks("setting up the model"):
                self._freeze()
                self._set_mode()

    @contextlib.contextmanager
    def deepspeed_visible(self) -> Iterator[None]:
        """Make transformers see this engine's ds_config inside the block, as it did while the model was loaded.

        What in transformers gathers partitions asks for it: `generate`, `resize_token_embeddings`,
        or `from_pretrained` of a further model.
        """
        with hf.deepspeed_config(self.hf_deepspeed_config):
            yield

    def _prepare(self, ds_config: Mapping[str, Any]) -> dict[str, Any]:
        """Load the processor and the model configuration; return ds_config, resolved with the latter."""
        name, kwargs = str(self.args.model), self._from_pretrained_kwargs()
        hf.check_name(name, kwargs.get("subfolder", ""))
        self.processor = hf.load_processor(name, kwargs)
        self.model_config = hf.model_config(name, kwargs)
        resolved = resolve_auto(
            ds_config,
            world_size=self.distributed.world_size,
            hidden_size=hidden_size_of(self.model_config),
            precision=self.precision,
        )
        # A copy: what the caller adds to ds_config, such as an optimizer, is not transformers' business.
        self.hf_deepspeed_config.config.update(copy.deepcopy(resolved))
        return resolved

    def _from_pretrained_kwargs(self) -> dict[str, Any]:
        kwargs = {
            "trust_remote_code": self.args.trust_remote_code,
            "revision": self.args.revision,
            "attn_implementation": self.args.attn_implementation,
        }
        return {key: value for key, value in kwargs.items() if value is not None} | dict(self.args.model_kwargs)

    def _freeze(self) -> None:
        # Tied parameters under all of their names: each is a name that a pattern may be written for.
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        matches = {pattern: fnmatch.filter(parameters, pattern) for pattern in self.args.freeze}
        idle = [repr(pattern) for pattern, names in matches.items() if not names]
        if idle:
            raise ConfigError(
                f"freeze: {', '.join(idle)} match(es) none of the model's {len(parameters)} parameters; "
                f"their names look like {', '.join(list(parameters)[:3])}"
            )
        for name in {name for names in matches.values() for name in names}:
            parameters[name].requires_grad_(False)

    def _set_mode(self) -> None:
        self.model.train(self.is_train)
        if not self.is_train or self.args.gradient_checkpointing is False:
            return
        try:
            hf.enable_checkpointing(self.model, {"use_reentrant": False, **self.args.gradient_checkpointing_kwargs})
        except UnsupportedError as error:
            if self.args.gradient_checkpointing:  # asked for, not only the default
                raise
            if self.distributed.rank == 0:
                warnings.warn(f"{error}; it trains without", stacklevel=3)

    @contextlib.contextmanager
    def _on_all_ranks(self, step: str) -> Iterator[None]:
        """Run the block on every rank, then let all ranks go on or raise together."""
        error: Exception | None = None
        try:
            yield
        except RankError:  # already agreed on
            raise
        except Exception as caught:  # noqa: BLE001  whatever it is, all ranks must hear of it
            error = caught
        self.distributed.agree(f"{self.args.model}: {step}", error)


# -- arguments -------------------------------------------------------------------------------------------------------


def read_arguments(model_args: Any, dist_config: Any = None) -> tuple[ModelArguments, DistConfig, dict[str, Any]]:
    """Return the arguments of `ModelEngine` as dataclasses, and the keys that belong to others.

    A mapping (or the content of a YAML file) has one of three forms:

    1. Names of `ModelArguments` and nothing else.
    2. A whole pipeline's, flat, as LLaMA-Factory v1 writes it: names of `ModelArguments` beside a `dist_config` and
       the keys of others, which are returned as they are. A key that looks like a misspelt one of ours is an error.
    3. A whole pipeline's, in sections: the names are below `model_args`.

    LLaMA-Factory's `flash_attn`, `enable_activation_checkpointing` and `model_class` are understood. A relative
    `config_file` is looked for beside the YAML file that names it, then in the current directory.

    Args:
        model_args: see `ModelEngine`.
        dist_config: see `ModelEngine`; if given, it takes precedence over the one in model_args.

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
        raise UnsupportedError(f"{given.where}: quant_config: a quantized model cannot be partitioned by ZeRO-3")
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
