"""LLaMA-Factory: its `ModelEngine`, and the load of its v1.

`ModelEngine` turns arguments into a loaded model that is ready for `deepspeed.initialize`. It works in the order of
LLaMA-Factory v1: process group, ds_config, processor, model configuration, model.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import fnmatch
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from torch import nn

from lowmem_load import foreign_names
from lowmem_load.config.settings import read_settings
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.load.load import Options
from lowmem_load.load.load_into import load_into
from lowmem_load.load.load_model import load_request
from lowmem_load.load.request import Request
from lowmem_load.models import active, model_class
from lowmem_load.models.active import load_lock
from lowmem_load.models.model_folder import find_folder
from lowmem_load.replaced import Handlers

T = TypeVar("T")

_ALIASES = {
    "model_name_or_path": "model",
    "flash_attn": "attn_implementation",
    "enable_activation_checkpointing": "gradient_checkpointing",
}
"""LLaMA-Factory's names for some fields of `ModelArguments`."""


@dataclass(frozen=True, slots=True)
class ModelArguments:
    """A model to load, and how to train it.

    Attributes:
        model, auto_class: as for `load_model`.
        trust_remote_code: whether code that comes with the checkpoint may run.
        attn_implementation: "eager", "sdpa", "flash_attention_2", ...; None for transformers' choice.
        bf16, fp16: the training arguments of these names; None if they are not set. See
            docs/reference/configuration.md.
        freeze: glob patterns over parameter names (`fnmatch`, case-sensitive). Matching parameters are not trained.
        gradient_checkpointing: None means True for training. Ignored if the engine is not for training.
        model_kwargs: further keywords of `from_pretrained`: revision, token, cache_dir, subfolder, num_labels, ...

    Example:
        arguments = ModelArguments("Qwen/Qwen3-8B", bf16=True, freeze=["model.embed_tokens.*"])
        engine = ModelEngine(arguments, {"config_file": "ds_z3.json"})
        print(engine.args.freeze)
    """

    model: str
    auto_class: str | type | None = None
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    bf16: bool | None = None
    fp16: bool | None = None
    freeze: list[str] = field(default_factory=list)
    gradient_checkpointing: bool | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if misplaced := sorted({"dtype", "torch_dtype", "device_map", "ds_config"}.intersection(self.model_kwargs)):
            raise ConfigError(
                f"ModelArguments.model_kwargs: remove {', '.join(misplaced)}; bf16 and dist_config choose it"
            )


@dataclass(frozen=True, slots=True)
class DistConfig:
    """How to distribute the model.

    Attributes:
        config_file: the ds_config: a dict, or the path of its JSON file.
        name: "deepspeed".

    Example:
        dist_config = DistConfig("ds_z3.json")
        engine = ModelEngine({"model": "Qwen/Qwen3-8B"}, dist_config)
        print(engine.ds_config)
    """

    config_file: dict[str, Any] | str | None = None
    name: str = "deepspeed"

    def __post_init__(self) -> None:
        if self.name != "deepspeed":
            raise ConfigError(
                f"DistConfig.name: expected 'deepspeed', got {self.name!r}; for FSDP2 call load_model with mesh="
            )


def read_arguments(model_args: Any, dist_config: Any = None) -> tuple[ModelArguments, DistConfig, dict[str, Any]]:
    """Return the arguments of `ModelEngine` as dataclasses, and the keys that belong to others.

    A given `dist_config` wins over the one in model_args.
    """
    values, folder = _values_of(model_args, "model_args")
    nested = values.pop("dist_config", None)
    if dist_config is not None:
        folder = None
    elif nested is None:
        raise ConfigError('no dist_config: pass {"config_file": "ds_z3.json"}, or write it next to the model')
    values, extra = _in_own_names(values), {}
    if nested is not None or dataclasses.is_dataclass(model_args):  # of a pipeline, or of another library
        own = {each.name for each in dataclasses.fields(ModelArguments)}
        extra = {key: values.pop(key) for key in list(values) if key not in own}
    return _made(ModelArguments, values), _dist_config(nested if dist_config is None else dist_config, folder), extra


def _values_of(argument: Any, where: str) -> tuple[dict[str, Any], Path | None]:
    """Return the values of an argument, without those that are None, and the folder of its YAML file."""
    folder = None
    if isinstance(argument, str | os.PathLike):
        path = Path(argument).expanduser()
        folder = path.absolute().parent
        try:
            argument = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(
                f'{where}: {path}: cannot be read as YAML: {error}; for the name of a model write {{"model": ...}}'
            ) from error
    elif dataclasses.is_dataclass(argument) and not isinstance(argument, type):
        argument = {each.name: getattr(argument, each.name) for each in dataclasses.fields(argument)}
    if not isinstance(argument, Mapping):
        raise ConfigError(f"{where}: expected a dataclass, a mapping, or the path of a YAML file; got {argument!r}")
    plain = {str(key): value.value if isinstance(value, enum.Enum) else value for key, value in argument.items()}
    return {key: value for key, value in plain.items() if value is not None}, folder


def _in_own_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values under the names of `ModelArguments`. Refuse what LLaMA-Factory has, but lowmem_load does not."""
    values = {_ALIASES.get(key, key): value for key, value in values.items()}
    model_class = values.pop("model_class", "llm")
    if "quant_config" in values or model_class not in ("llm", "other"):
        raise UnsupportedError(
            f"model_class {model_class!r}: expected 'llm' or 'other', and no quant_config; auto_class names any class, "
            "and load_model takes transformers' quantization_config"
        )
    if model_class == "other":
        values.setdefault("auto_class", "AutoModel")
    if values.get("attn_implementation") == "auto":
        del values["attn_implementation"]
    if isinstance(values.get("model"), os.PathLike):
        values["model"] = os.fspath(values["model"])
    if isinstance(values.get("freeze"), str):
        values["freeze"] = [values["freeze"]]
    return values


def _dist_config(argument: Any, outer_folder: Path | None) -> DistConfig:
    values, folder = _values_of(argument, "dist_config")
    file, folder = values.get("config_file"), folder or outer_folder
    if isinstance(file, str | os.PathLike):
        values["config_file"] = os.fspath(file)
        if folder is not None:  # it is next to the YAML file that names it, else in the current folder
            near, path = folder / file, Path(file).expanduser()
            values["config_file"] = str(path if path.is_file() and not near.is_file() else near)
    return _made(DistConfig, values)


def _made(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return a dataclass of values. Raise ConfigError for a key that it lacks."""
    known = list(cls.__annotations__)
    if unknown := [key for key in values if key not in known]:
        raise ConfigError(f"{cls.__name__}: unknown key(s) {', '.join(unknown)}; known are {', '.join(known)}")
    if "model" in known and not values.get("model"):
        raise ConfigError(f"{cls.__name__}.model is missing: a folder, a Hub id or a URL")
    return cls(**values)


class ModelEngine:
    """Loads a model with its processor, ready for `deepspeed.initialize(model=..., config=engine.ds_config)`.

    Every rank constructs one. A process may construct several, one after the other. None leaves a DeepSpeed
    configuration visible to transformers, even if it fails.

    Args:
        model_args: `ModelArguments`, a mapping with these names, a YAML file, or another dataclass with these fields.
            A mapping or file may be that of a pipeline; see docs/howto/other_frameworks.md.
        dist_config: `DistConfig`, a mapping with these names, or a YAML file; None if model_args has it.
        is_train: True selects train mode and gradient checkpointing, False eval mode.

    Attributes:
        args, dist_config, is_train: the arguments, as dataclasses.
        extra: top-level keys of a pipeline file that are not the engine's.
        distributed: the `DistributedInterface`.
        precision: the dtype of the stored parameters and of DeepSpeed.
        ds_config: the resolved ds_config. It states bf16.enabled and fp16.enabled, and has "auto" only in optimizer and
            scheduler, whose values the training loop knows. You may add to it.
        hf_deepspeed_config: the `HfDeepSpeedConfig` that was active while loading. Only the engine keeps it alive.
            transformers sees it inside `deepspeed_visible`.
        processor: what AutoProcessor or AutoTokenizer returns; None if the checkpoint has neither.
        model_config: `model.config`.
        model: the model; `lowmem_load.get_load_report(model)` says how it was loaded.

    Raises:
        ConfigError: an argument or the ds_config cannot be used; a freeze pattern does not match a parameter.
        CheckpointError: the model or its processor exists but cannot be loaded.
        UnsupportedError: lowmem_load cannot load the model, or cannot checkpoint activations as asked.
        RankError: another rank failed; every rank raises the same error. (Unusable arguments stop only their own rank,
            because the process group is made after they are read.)

    Example:
        engine = ModelEngine({"model": "Qwen/Qwen3-8B", "bf16": True}, {"config_file": "ds_z3.json"})
        ds_engine, *_ = deepspeed.initialize(model=engine.model, config=engine.ds_config)
        print(engine.precision, engine.processor)
    """

    def __init__(self, model_args: Any, dist_config: Any = None, is_train: bool = True) -> None:
        self.args, self.dist_config, self.extra = read_arguments(model_args, dist_config)
        self.is_train = is_train
        self.distributed = DistributedInterface()
        with self.distributed.step("preparing", name=self.args.model) as step:
            attention = self.args.attn_implementation
            own = {} if attention is None else {"attn_implementation": attention}
            kwargs = {"trust_remote_code": self.args.trust_remote_code, **own, **self.args.model_kwargs}
            name, kwargs = find_folder(self.args.model, kwargs)
            settings = read_settings(
                self.dist_config.config_file,
                world_size=self.distributed.world_size,
                trainer_bf16=self.args.bf16,
                trainer_fp16=self.args.fp16,
            )
            step.digest = settings.compared
            self.processor = model_class.load_processor(name, kwargs)
            settings = settings.for_model(model_class.model_config(name, kwargs))
        self.precision = settings.dtype
        self.ds_config: dict[str, Any] = copy.deepcopy(dict(settings.ds_config))
        request = Request(name, self.args.auto_class, "auto", kwargs, settings, settings.compared)
        # transformers gets a copy: it must not see what the caller adds to ds_config, such as an optimizer.
        with load_lock(), active.deepspeed_config(settings.ds_config) as self.hf_deepspeed_config:
            self.model = load_request(lambda: request, self.distributed, Options())
        self.model_config = self.model.config
        with self.distributed.step("setting up the model", name=self.args.model):
            self._freeze()
            self._set_mode()

    def deepspeed_visible(self) -> contextlib.AbstractContextManager[Any]:
        """Make transformers see this engine's ds_config inside the block, as it did during the load.

        `from_pretrained` of another model needs it.
        """
        return active.deepspeed_config(self.hf_deepspeed_config)

    def _freeze(self) -> None:
        # A pattern may name a tied parameter by any of its names.
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        matches = {pattern: fnmatch.filter(parameters, pattern) for pattern in self.args.freeze}
        unmatched = [repr(pattern) for pattern, matching in matches.items() if not matching]
        if unmatched:
            raise ConfigError(
                f"freeze: {', '.join(unmatched)} match(es) none of the model's {len(parameters)} parameters; "
                f"their names look like {', '.join(list(parameters)[:3])}"
            )
        for name in {name for matching in matches.values() for name in matching}:
            parameters[name].requires_grad_(False)

    def _set_mode(self) -> None:
        self.model.train(self.is_train)
        if not self.is_train or self.args.gradient_checkpointing is False:
            return
        try:
            model_class.enable_checkpointing(self.model, {"use_reentrant": False})
        except UnsupportedError as error:
            if self.args.gradient_checkpointing:  # the user asked for it
                raise
            if self.distributed.rank == 0:
                warnings.warn(f"{error}; it trains without", stacklevel=3)


def load_handlers(options: Options) -> Handlers:
    """Return what fills as `load_into` does.

    Source: LLaMA-Factory 0.9.5 `v1/plugins/trainer_plugins/distributed/fsdp2.py`, `FSDP2Engine.materialize_and_load`.
    """

    def load(_: Any, __: Any, model: nn.Module, hf_model_path: str) -> None:
        report = load_into(model, hf_model_path, download=not options.stream, share_reads=options.share_reads)
        if options.on_load is not None:
            options.on_load(report)

    return {foreign_names.LLAMAFACTORY_LOAD: load}
