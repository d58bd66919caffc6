"""Models that transformers shards: by a `DistributedConfig`, or block by block.

A `from_pretrained` stops where transformers (5.13 to 5.24) would read weights: the model is built and sharded.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from lowmem_load import foreign_names
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.files.executor import Executor
from lowmem_load.files.stand_ins import is_url
from lowmem_load.foreign_names import ForeignName
from lowmem_load.models.active import random_states, transformers_models
from lowmem_load.models.loader import building_handlers, file_format
from lowmem_load.models.model_folder import HUB_KEYWORDS
from lowmem_load.models.quantizers import packed_format
from lowmem_load.models.wrappers import named_modules
from lowmem_load.replaced import Handler, Handlers, replaced
from lowmem_load.symbolic.attributes import hand_over_attributes, hand_over_extra_states
from lowmem_load.symbolic.constructor import Constructor
from lowmem_load.training_checkpoints.open_model import open_model

Fill = Callable[[nn.Module, torch.dtype, dict[str, Any]], Mapping[str, Any]]
"""Fills a skeleton, given the dtype of the load and the keywords of the constructor; returns the loading info."""

READ_KEYWORDS = (*HUB_KEYWORDS, "variant", "use_safetensors", "ignore_mismatched_sizes", "key_mapping", "weights_only")
"""Keywords of a `from_pretrained` that say which files to read, and how."""


@contextlib.contextmanager
def filled_by(fill: Fill, weights: str | None = None) -> Iterator[None]:
    """Inside, `fill` fills the skeletons that `from_pretrained` builds. transformers reads no weights.

    `weights` is the folder of a training checkpoint that has them: transformers looks for no others.
    """
    if not hasattr(PreTrainedModel, "maybe_distribute_model"):
        raise UnsupportedError(
            "this release of transformers cannot shard a model; shard it yourself and call load_into"
        )
    restore = random_states()
    is_filling = False  # the load that `fill` does is an ordinary one
    keywords: dict[str, Any] = {}

    def init_contexts(ordinary: Any, cls: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Note what transformers hands to the constructor, which that load calls again."""

        def init(ordinary: Any, model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            if type(model) is cls:
                named = dict(zip(list(inspect.signature(cls).parameters)[1:], args, strict=False)) | kwargs
                # The skeleton shards the modules that it is given, so the other model gets its own.
                keywords.update(tree_map_only(nn.Module, copy.deepcopy, named))
            ordinary(model, config, *args, **kwargs)
            if type(model) is cls and not is_filling:
                untie(model)

        return [*ordinary(cls, *args, **kwargs), replaced({foreign_names.MODEL_INIT.of(cls): init})]

    def load(
        ordinary: Any, model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        nonlocal is_filling
        if is_filling:
            return ordinary(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        if getattr(getattr(model.config, "distributed_config", None), "pp_size", 1) > 1:
            raise UnsupportedError(
                "pp_size > 1: each pipeline stage has a part of the model; load them without lowmem_load"
            )
        building.close()  # the load that fills it builds a model of its own, and draws what this constructor has drawn
        restore()
        _set_dtypes(model, load_config.dtype_plan or {})
        if load_config.hf_quantizer is not None:
            model.hf_quantizer = load_config.hf_quantizer  # as `from_pretrained` does later
        is_filling = True
        try:
            info = fill(model, load_config.dtype, keywords)
        finally:
            is_filling = False
        return _loading_info(info), None

    def finalize(ordinary: Any, model: Any, load_config: Any, loading_info: Any, *args: Any, **kwargs: Any) -> Any:
        # Nothing is left to do for the skeleton: the load that filled it has initialized, tied and reported.
        return ordinary(model, load_config, loading_info, *args, **kwargs) if is_filling else loading_info

    loading: Handlers = {foreign_names.LOAD_PRETRAINED_MODEL: load, foreign_names.FINALIZE_MODEL_LOADING: finalize}
    # For a skeleton, transformers looks at headers alone: the load that fills it finds the weights.
    headers: dict[ForeignName, Handler] = {foreign_names.LOAD_STATE_DICT: _on_meta}
    if weights is not None:
        headers[foreign_names.RESOLVE_FILES] = lambda *_, **__: ([weights], None)
    with replaced(loading), contextlib.ExitStack() as building:
        building.enter_context(replaced(building_handlers(Constructor())))
        building.enter_context(replaced({foreign_names.GET_INIT_CONTEXT: init_contexts, **headers}))
        yield


def _loading_info(info: Mapping[str, Any]) -> Any:
    """Return the loading info as transformers passes it on."""
    from transformers.utils.loading_report import LoadStateDictInfo

    keys = {name: set(info[name]) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if "skipped_pp_keys" in inspect.signature(LoadStateDictInfo).parameters:  # since pipeline stages
        keys["skipped_pp_keys"] = set()
    return LoadStateDictInfo(error_msgs=[], conversion_errors={}, **keys)


def _on_meta(_: Any, checkpoint_file: str, *__: Any, **___: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, or of a training checkpoint, on meta: a dtype "auto" may be that of the first."""
    with Executor(num_threads=1) as executor:
        if os.path.isdir(checkpoint_file) or is_url(checkpoint_file):
            expressions = {name: values.whole for name, values in open_model(checkpoint_file, executor).tensors.items()}
        else:
            file = file_format(checkpoint_file).describe(executor.sources.opened(checkpoint_file))
            is_sorted = checkpoint_file.endswith(".safetensors")  # by transformers
            names = sorted(file.names) if is_sorted else file.names
            expressions = {name: file.expression(name) for name in names}
    return {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in expressions.items()}


def untie(skeleton: nn.Module) -> None:
    """Give each place of a parameter one of its own. Which of them are one after all, the load of the model says."""
    seen: set[int] = set()
    for module in skeleton.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in seen:
                setattr(module, name, nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad))
            seen.add(id(parameter))


def ties_kept() -> contextlib.AbstractContextManager[None]:
    """Inside, `tie_weights` does not tie, by the configuration, what a load has found to differ.

    Source: accelerate 1.15 `utils/fsdp_utils.py`, `fsdp2_prepare_model`, which calls it on a loaded model.
    """

    def expand(ordinary: Any, model: Any, *args: Any, **kwargs: Any) -> dict[str, str]:
        ties = ordinary(model, *args, **kwargs).items()
        return {target: source for target, source in ties if target in model.all_tied_weights_keys}

    return replaced({foreign_names.TIED_WEIGHTS_KEYS: expand})


def hand_over(loaded: nn.Module, model: nn.Module, device: torch.device, without: Collection[str]) -> None:
    """Give a model what a load leaves in addition to parameters and buffers, on a device.

    That is how to save it as it was, its ties, how to generate, tensor attributes, and extra states `without` some.
    """
    for one, other in zip(transformers_models(loaded), transformers_models(model), strict=True):
        for name in ("_weight_conversions", "all_tied_weights_keys", "generation_config"):
            if hasattr(one, name):
                setattr(other, name, getattr(one, name))
    of_loaded, modules = dict(named_modules(loaded)), dict(named_modules(model))
    packed_format(loaded).hand_over(loaded, modules)
    hand_over_attributes(of_loaded, modules, device)
    hand_over_extra_states(of_loaded, modules, device, without)


def _set_dtypes(model: nn.Module, plan: Mapping[str, torch.dtype]) -> None:
    """Cast the parameters that transformers keeps in another dtype: its loader would do so as it reads."""
    if not plan:
        return
    from transformers.core_model_loading import build_glob_alternation

    pattern, globs, _ = build_glob_alternation(list(plan))
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            match = pattern.search(f"{prefix}.{name}")
            if match is not None and match.lastgroup is not None:
                dtype = plan[globs[match.lastgroup]]
                setattr(module, name, nn.Parameter(parameter.to(dtype), requires_grad=parameter.requires_grad))


# -- `DistributedConfig`, and the blocks of a model -------------------------------------------------------------------


def distributed_config(sizes: Mapping[str, int]) -> Any:
    """Return a `DistributedConfig` of these sizes: fsdp_size, tp_size, ..."""
    try:
        from transformers.distributed import DistributedConfig

        return DistributedConfig(**sizes)
    except ImportError as error:
        raise UnsupportedError(
            f"transformers {transformers.__version__} has no DistributedConfig; install transformers 5.13 or newer"
        ) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"DistributedConfig({dict(sizes)}): {error}") from error


def is_distributed_config(value: object) -> bool:
    """Return whether this is a `DistributedConfig` of transformers 5."""
    return type(value).__name__ == "DistributedConfig" and type(value).__module__.startswith("transformers.")


def is_kept_on_host(model: Any) -> bool:
    """Return whether the `DistributedConfig` of a model keeps its shards in host memory."""
    return bool(getattr(getattr(model.config, "distributed_config", None), "fsdp_cpu_offload", False))


def refuse_parted(model: Any) -> None:
    """Refuse a tensor-parallel plan by which some ranks would get gates only, as transformers has for Inkling."""
    config = getattr(model.config, "distributed_config", None)
    for name, style in (model.tp_plan if (getattr(config, "tp_size", None) or 1) > 1 else {}).items():
        if style == "colwise" and name.endswith(".gate_up_proj"):
            raise UnsupportedError(
                f"{name}: the plan of {type(model).__name__} shards it by 'colwise', which separates gates from "
                f"what they gate; pass DistributedConfig(..., tp_plan={{{name!r}: 'packed_colwise'}})"
            )


def blocks(model: Any) -> list[Any]:
    """Return the modules that a model does not want to be split, those inside others first, as FSDP2 shards them."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in classes][::-1]
