"""diffusers' models: its own loader runs on symbolic tensors, so renames, fp32 modules and classes stay its own.

Only the reading of files and the assignment of parameters are replaced. Written for diffusers 0.42.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowmem_load import foreign_names
from lowmem_load.errors import (
    CheckpointError,
    ConfigError,
    LowMemLoadError,
    ModelBuildError,
    UnsupportedError,
    error_text,
)
from lowmem_load.files.index import check_model_config, read_json
from lowmem_load.files.stand_ins import origin
from lowmem_load.foreign_names import ForeignName
from lowmem_load.models.active import quiet
from lowmem_load.models.loader import PretrainedCall, check_shards, taking_calls, tensors_in
from lowmem_load.models.model_folder import config_file, hub_keywords
from lowmem_load.replaced import Handler, replaced
from lowmem_load.symbolic.constructor import Constructor, Context

MODULE = "diffusers.models.modeling_utils"
"""Defines the class of all models."""

_LEFT = ("quantization_config", "parallel_config", "use_flashpack")
"""Keywords of `from_pretrained` by which diffusers places or converts weights by itself."""


class DiffusersCall(PretrainedCall):
    """A call of `ModelMixin.from_pretrained`."""

    def describe(self, context: Context) -> tuple[nn.Module, dict[str, Any]]:
        """See `Call`."""
        if left := [keyword for keyword in _LEFT if self.kwargs.get(keyword)]:
            raise UnsupportedError(f"{self.name}: {', '.join(left)}: diffusers itself places or converts these weights")
        if context.weights is not None:
            raise UnsupportedError(
                f"{self.name}: weights_from= is for transformers models and modules that load by names"
            )
        handlers: dict[ForeignName, Handler] = {
            **dict.fromkeys(foreign_names.DIFFUSERS_STATE_DICTS, functools.partial(_symbolic_state_dict, context)),
            foreign_names.DIFFUSERS_EMPTY_WEIGHTS: lambda *_, **__: context.constructor.building(),
            foreign_names.DIFFUSERS_SET_TENSOR: _set_tensor,
            foreign_names.DIFFUSERS_SHARD_FILES: check_shards,
            foreign_names.DIFFUSERS_LOAD: functools.partial(_load, context),
        }
        with replaced(handlers), quiet(logging.ERROR if context.is_quiet else logging.NOTSET, logs()):
            try:
                model, info = self._run({**self.kwargs, "low_cpu_mem_usage": True})
            except ValueError as error:
                # Source: diffusers 0.42 `model_loading_utils.py`
                if isinstance(error, LowMemLoadError) or "expected shape" not in str(error):
                    raise
                raise CheckpointError(f"{self.name}: {error_text(error)}") from error
        if getattr(model, "hf_quantizer", None) is not None:
            raise UnsupportedError(f"{self.name}: lowmem_load cannot load quantized weights of diffusers")
        if empty := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
            if not self.kwargs.get("low_cpu_mem_usage", True):
                raise UnsupportedError(
                    f"{self.name}: {', '.join(empty)}: with low_cpu_mem_usage=False these keep what the constructor of "
                    f"{type(model).__name__} leaves in them"
                )
            raise CheckpointError(
                f"{self.name}: no file has {', '.join(empty)} of {type(model).__name__}, and diffusers gives them no "
                "value. Correct config.json, or build the model, give these values, and call load_into with skip="
            )
        model.register_to_config(_name_or_path=self.name)
        context.note_values(model)
        return model, {key: info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}


def _symbolic_state_dict(context: Context, _: Any, checkpoint_file: Any, *__: Any, **___: Any) -> Any:
    return checkpoint_file if isinstance(checkpoint_file, dict) else tensors_in([os.fspath(checkpoint_file)], context)


def _set_tensor(_: Any, module: nn.Module, tensor_name: str, *__: Any, value: torch.Tensor, **___: Any) -> None:
    """Do what accelerate's `set_module_tensor_to_device` does with a tensor that has its dtype already."""
    owner_name, _dot, last = tensor_name.rpartition(".")
    owner = module.get_submodule(owner_name)
    parameter = dict(owner.named_parameters(recurse=False)).get(last)
    if parameter is None:
        owner.register_buffer(last, value, persistent=True)
    else:
        owner.register_parameter(last, nn.Parameter(value, requires_grad=parameter.requires_grad))


def _load(context: Context, ordinary: Callable[..., Any], cls: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    context.constructor.note(model)
    context.check_built(model)
    kwargs["is_parallel_loading_enabled"] = False  # other threads do not see the handlers
    return ordinary(cls, model, *args, **kwargs)


# -- calls that are handed to a handler --------------------------------------------------------------------------------


def intercepted(
    load: Callable[[DiffusersCall], tuple[nn.Module, dict[str, Any]]],
) -> contextlib.AbstractContextManager[None]:
    """Inside, `load` gets the calls of this thread, if diffusers is imported."""
    if "diffusers" not in sys.modules:
        return contextlib.nullcontext()
    return replaced({foreign_names.DIFFUSERS_FROM_PRETRAINED: taking_calls(load, DiffusersCall, lambda *_: True)})


def logs() -> Any:
    """Return diffusers' module of logging."""
    return sys.modules["diffusers.utils.logging"]


def is_model(model: nn.Module) -> bool:
    """Return whether this is a model of diffusers."""
    module: Any = sys.modules.get(MODULE)
    return module is not None and isinstance(model, module.ModelMixin)


def save_state(model: Any, folder: Path, state: Mapping[str, Any], **arguments: Any) -> None:
    """Call `save_pretrained`, which asks the model for its state dict, and have it get this one."""
    model.state_dict = lambda: state
    try:
        model.save_pretrained(folder, **arguments)
    finally:
        del model.state_dict


# -- the class that a configuration names ------------------------------------------------------------------------------


def model_class(name: str, auto_class: str | type | None, kwargs: Mapping[str, Any]) -> Any:
    """Return diffusers' class of a checkpoint; None if it is not one of diffusers' models.

    Raises ConfigError if diffusers is not installed, or lacks the class.
    """
    if isinstance(auto_class, type):
        module: Any = sys.modules.get(MODULE)
        return auto_class if module is not None and issubclass(auto_class, module.ModelMixin) else None
    if not kwargs.get("subfolder") and os.path.isfile(os.path.join(name, "model_index.json")):
        raise ConfigError(
            f"{name}: is a pipeline of diffusers; load each model to shard by itself, with subfolder=, and pass it "
            "to DiffusionPipeline.from_pretrained(folder, transformer=model), which loads the others"
        )
    file = config_file(name, kwargs) if auto_class is None else None
    config = None if file is None else read_json(file)
    if not isinstance(config, dict) or not {"_class_name", "_diffusers_version"} <= config.keys():
        return None
    assert file is not None
    check_model_config(file, least_count=-1)  # of heads in StableCascade: none
    try:
        import diffusers
        from diffusers.models.modeling_utils import ModelMixin

        cls = getattr(diffusers, str(config["_class_name"]), None)
    except (ImportError, RuntimeError) as error:  # its lazy modules make a RuntimeError of the first
        raise ConfigError(f"{file}: is of a model of diffusers, which cannot be imported: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, ModelMixin)):
        raise ConfigError(f"{file}: diffusers {diffusers.__version__} has no model class {config['_class_name']!r}")
    return cls


def skeleton(cls: Any, name: str, kwargs: Mapping[str, Any]) -> Any:
    """Return the model of a checkpoint as `from_pretrained` builds it, with its dtypes. Parameters have no memory."""
    hub = hub_keywords(kwargs, ("subfolder", "revision", "token", "cache_dir"))
    config, unused = cls.load_config(name, return_unused_kwargs=True, **hub)[:2]
    try:
        with Constructor().building():
            model = cls.from_config(config, **unused)
    except Exception as error:  # the constructor trusts the values, so a wrong one may raise anything
        raise ModelBuildError(
            f"{name}: {cls.__name__} cannot be built from its configuration: {error_text(error)}"
        ) from error
    dtype, fp32 = kwargs.get("torch_dtype"), cls._keep_in_fp32_modules or []
    kept = set(fp32 if isinstance(fp32, list) else [fp32])
    for full_name, parameter in model.named_parameters() if dtype is not None else ():
        parameter.data = parameter.data.to(dtype if kept.isdisjoint(full_name.split(".")) else torch.float32)
    model.register_to_config(_name_or_path=origin(name))
    return model.eval()
