"""diffusers under `install`: its models are lazy until DeepSpeed or accelerate's FSDP2 takes them.

diffusers does not know ZeRO-3: its models are full ones until `deepspeed.initialize`, and scripts change them before.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from lowmem_load import foreign_names
from lowmem_load.errors import FallbackWarning, UnsupportedError, outside_level
from lowmem_load.integrations.accelerate import load_lazily, may_be_lazy, uses_fsdp2
from lowmem_load.load.load import Options
from lowmem_load.models import diffusion
from lowmem_load.models.active import IS_LOADING, active_zero3_config
from lowmem_load.models.loader import taking_calls
from lowmem_load.replaced import Handlers, holding
from lowmem_load.weights_out.rank_shards import group_of
from lowmem_load.weights_out.save import save_when_all_call


def handlers(options: Options) -> Handlers:
    """Return what loads models of diffusers."""
    load = functools.partial(load_lazily, options=options)
    return {
        foreign_names.DIFFUSERS_FROM_PRETRAINED: taking_calls(load, diffusion.DiffusersCall, _is_wanted),
        foreign_names.DIFFUSERS_SINGLE_FILE: _load_single_file,
        foreign_names.DIFFUSERS_PIPELINE: _load_pipeline,
    }


def _is_wanted(cls: type, kwargs: Mapping[str, Any]) -> bool:
    # Scripts keep what encodes images frozen, outside of any engine.
    if cls.__module__.startswith("diffusers.models.autoencoders.") or not may_be_lazy(kwargs):
        return False
    return active_zero3_config() is not None or uses_fsdp2()


def _load_pipeline(ordinary: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
    """Leave all models of a pipeline to diffusers: it runs them, and scripts load it on the main rank alone."""
    with holding(IS_LOADING, True):
        return ordinary(cls, *args, **kwargs)


def _load_single_file(ordinary: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
    if _is_wanted(cls, kwargs):
        text = (
            f"{cls.__name__}.from_single_file: lowmem_load cannot load this, so diffusers loads the full model on each "
            "rank; save it once by save_pretrained, and load that folder"
        )
        warnings.warn(text, FallbackWarning, stacklevel=outside_level())
    return ordinary(cls, *args, **kwargs)


# -- saves -------------------------------------------------------------------------------------------------------------

_TRANSLATED = ("is_main_process", "max_shard_size", "variant")
"""Arguments of `save_pretrained` that a save by all ranks follows."""


def _save_pretrained(ordinary: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Do what `ModelMixin.save_pretrained` does. Collective for a model in parts: all ranks that own some."""
    signature = inspect.signature(ordinary)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments: dict[str, Any] = {**bound.arguments}
    arguments |= arguments.pop("kwargs", {})
    model, folder = arguments.pop("self"), arguments.pop("save_directory")
    is_described = "state_dict" in vars(model)  # by `describe_save_pretrained`
    if is_described or all(group_of(parameter) is None for parameter in model.parameters()):
        ordinary(*args, **kwargs)
        return
    defaults = {key: parameter.default for key, parameter in signature.parameters.items()}
    others = {key: value for key, value in arguments.items() if key not in _TRANSLATED and value != defaults.get(key)}
    if others:
        given = ", ".join(f"{key}={value!r}" for key, value in others.items())
        raise UnsupportedError(
            f"save_pretrained: {given}: the weights of this model lie on many ranks, which write safetensors files; "
            "leave it out"
        )
    keywords = {key: arguments[key] for key in ("max_shard_size", "variant")}
    save_when_all_call("save_pretrained of a model in parts", model, folder, **keywords)


SAVE_HANDLERS: Handlers = {foreign_names.DIFFUSERS_SAVE: _save_pretrained}
