"""DeepSpeed under `install`: `deepspeed.initialize`, the engine's `load_checkpoint`, and saves that would gather.

[Note: saved afterwards] Trainer and scripts with accelerate ask for all weights on all ranks, and pass them to
`save_pretrained` on rank 0 (Trainer through `_save`, which subclasses override). Here they get a placeholder, which
only `save_pretrained` may look at, and `save_model` writes the same files, each rank what it owns: for Trainer when its
own save has ended on all ranks.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NoReturn, TypeAlias

import torch
from torch import nn

from lowmem_load import foreign_names
from lowmem_load.config.ds_config import given_ds_configs
from lowmem_load.config.settings import Settings, read_settings
from lowmem_load.engines.engine_states import is_plain_zero3
from lowmem_load.engines.hooks import asked_first, consolidates_to, is_shell
from lowmem_load.engines.parameters import full_numel, is_partitioned
from lowmem_load.errors import ConfigError, LoadOrderWarning, UnsupportedError, outside_level
from lowmem_load.load.load import REPORT_ATTRIBUTE
from lowmem_load.load.load_model import fallback_of
from lowmem_load.models.active import transformers_models
from lowmem_load.models.saver import OURS, default_shard_size
from lowmem_load.replaced import Handlers, holding
from lowmem_load.resume.load_checkpoint import load_checkpoint
from lowmem_load.text import size
from lowmem_load.training_checkpoints.zero_checkpoint import saved_by
from lowmem_load.weights_out.folder import refuse_url
from lowmem_load.weights_out.rank_shards import ranks_of, unwrapped
from lowmem_load.weights_out.save import save_model, save_when_all_call


def _before_engine(arguments: Mapping[str, Any]) -> None:
    """Do what `deepspeed.initialize` needs done to its model, and warn of one that was loaded too early."""
    model = arguments.get("model")
    if not isinstance(model, nn.Module):
        return
    try:
        settings = read_settings(next(iter(given_ds_configs(arguments)), None), world_size=1)
    except ConfigError:  # there is none, or DeepSpeed is about to report it
        return
    _cast_adapters(model, settings)
    if settings.stage == 3 and not is_shell(model):
        _check_load_order(model)


def _cast_adapters(model: nn.Module, settings: Settings) -> None:
    """Cast what was added to a loaded model of 4-bit weights, as DeepSpeed's engine does if nothing is partitioned."""
    reports = [getattr(inner, REPORT_ATTRIBUTE, None) for inner in transformers_models(model)]
    is_packed = any(report is not None and report.num_quantized for report in reports)
    if not is_packed or settings.dtype is torch.float32:
        return
    for parameter in model.parameters():
        if parameter.is_floating_point() and not is_partitioned(parameter):
            parameter.data = parameter.data.to(settings.dtype)


def _check_load_order(model: nn.Module) -> None:
    """Warn for each transformers model that `deepspeed.initialize` partitions only now."""
    for inner in transformers_models(model):  # with any partition, it was loaded under ZeRO-3, and added to since
        parameters = list(inner.parameters())
        if parameters and not any(map(is_partitioned, parameters)) and not fallback_of(inner):
            nbytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
            warnings.warn(
                f"{type(inner).__name__} was loaded before ZeRO-3 was configured, so every rank has the full model "
                f"({size(nbytes)}), and ZeRO-3 partitions it only now. Create TrainingArguments(deepspeed=...), "
                "Accelerator(deepspeed_plugin=...) or HfDeepSpeedConfig(...) first, keep it in a variable, and then "
                "call from_pretrained",
                LoadOrderWarning,
                stacklevel=outside_level(),
            )


def _load_checkpoint(arguments: dict[str, Any]) -> tuple[str | None, dict[str, Any]] | None:
    """Load a checkpoint that another number of ranks saved, in place of `engine.load_checkpoint`; else return None."""
    engine, is_custom = arguments.pop("self"), arguments.pop("custom_load_fn", None) is not None
    is_known = not is_custom and arguments.keys() <= inspect.signature(load_checkpoint).parameters.keys()
    if not is_known or not is_plain_zero3(engine) or engine.load_universal_checkpoint():
        return None
    ranks = ranks_of(unwrapped(engine))
    # Ranks may see only the files of their own node. All must take the same way.
    with ranks.step("finding the checkpoint") as step:
        step.payload = saved_by(arguments["load_dir"], arguments.get("tag"))
    saved_for = set(step.payloads)
    if len(saved_for) > 1 or saved_for <= {None, ranks.world_size}:
        return None
    return load_checkpoint(engine, **arguments)


# -- saves -------------------------------------------------------------------------------------------------------------


class LookedIntoError(UnsupportedError):
    """Code read or changed a `NotGathered`."""


class NotGathered(dict[str, Any]):
    """Stands for a state dict whose weights are not gathered. It can be passed on, but neither read nor changed."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise LookedIntoError(
            "this code looks into the weights of a state dict, or changes it, and lowmem_load does not gather them; "
            "pass it to save_pretrained on all ranks, or call lowmem_load.install(saves=False)"
        )

    __getitem__ = __iter__ = __reversed__ = __len__ = __contains__ = __bool__ = __eq__ = __ne__ = _refuse
    __setitem__ = __delitem__ = __or__ = __ror__ = __ior__ = _refuse
    items = keys = values = get = copy = pop = popitem = setdefault = update = clear = fromkeys = _refuse


WantedSave: TypeAlias = "tuple[nn.Module, str, dict[str, Any]]"
"""A call of `save_pretrained` with a `NotGathered`: model, folder, and keywords of `save_model`."""

NOTED_SAVES: ContextVar[list[WantedSave] | None] = ContextVar("lowmem_load_noted_saves", default=None)
"""The calls of `save_pretrained` in the `Trainer.save_model` that is running, which saves them itself."""

IN_TRAINER: ContextVar[bool] = ContextVar("lowmem_load_in_trainer", default=False)
"""Whether Trainer saves by itself. It asks accelerate for the state, and copes if it gets none."""


def save_pretrained(ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Do what `save_pretrained` of a model or an adapter does. With a `NotGathered`: collective, all ranks."""
    arguments = inspect.signature(ordinary).bind(*args, **kwargs).arguments
    arguments |= arguments.pop("kwargs", {})
    model, state = args[0], arguments.get("state_dict")
    if not isinstance(state, NotGathered):
        if state is None and arguments.get("is_main_process", True):  # else nothing is written
            refuse_empty(model)
        return ordinary(*args, **kwargs)
    wrong = [f"{key}=True" for key in ("push_to_hub", "distributed_checkpoint") if arguments.get(key)]
    wrong += [] if arguments.get("safe_serialization", True) else ["safe_serialization=False"]
    if wrong:
        raise UnsupportedError(
            f"{', '.join(wrong)}: the weights are not gathered; leave it out (`hf upload` uploads the saved folder)"
        )
    others = {key: value for key, value in arguments.items() if key not in (*OURS, "self", "save_directory")}
    keywords = {"max_shard_size": default_shard_size(), **others}
    folder = str(arguments["save_directory"])
    if (noted := NOTED_SAVES.get()) is not None:
        noted.append((model, folder, keywords))
    else:
        save_when_all_call("save_pretrained with the state of get_state_dict", model, folder, **keywords)
    return None


def refuse_empty(model: Any) -> None:
    """Raise if `save_pretrained` would write partitioned parameters with shape [0]."""
    adapters_only = hasattr(model, "get_base_model") or bool(getattr(model, "_hf_peft_config_loaded", False))
    for name, parameter in model.named_parameters():
        is_saved = parameter.requires_grad or not adapters_only
        if is_saved and parameter.numel() == 0 and is_partitioned(parameter) and full_numel(parameter):
            raise UnsupportedError(
                f"{name}: is partitioned by ZeRO-3, and save_pretrained would write it with shape [0]; call "
                "lowmem_load.save_model(model, folder) on all ranks"
            )


# -- Trainer -----------------------------------------------------------------------------------------------------------


def save_trained(ordinary: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Do what `Trainer.save_model` does; see [Note: saved afterwards]. Collective: all ranks, as that is."""
    run = functools.partial(ordinary, trainer, *args, **kwargs)
    model, engine = unwrapped(trainer.model), getattr(trainer, "deepspeed", None)
    is_quantized = getattr(model, "hf_quantizer", None) is not None and not hasattr(model, "peft_config")
    is_plain = is_saved_by_itself(model) and not trainer.args.push_to_hub and not is_quantized
    if engine is None or not any(map(is_partitioned, model.parameters())) or not is_plain:
        with holding(IN_TRAINER, True):
            run()
        return
    ranks = ranks_of(model)
    output = kwargs.get("output_dir", next(iter(args), None)) or trainer.args.output_dir
    with ranks.step("Trainer.save_model") as step:
        refuse_url(output)  # Trainer would make a local folder of it, for the tokenizer and its arguments
        if ranks.rank and trainer.args.should_save:
            raise ConfigError(
                "TrainingArguments.save_on_each_node: the weights lie on all ranks, which write them to one folder; "
                "leave it out, and choose an output_dir that all nodes share"
            )
        state = NotGathered() if ranks.rank == 0 else None
        step.payload = _note_saves(run, model, engine, state)
        if (reason := step.payload[0]) and ranks.rank == 0:  # here, because a filter may make the warning an error
            text = f"Trainer.save_model gathers the weights, as without lowmem_load: {reason}"
            warnings.warn(text, stacklevel=outside_level())
    reason, saves = step.payloads[0]
    if reason:
        with holding(IN_TRAINER, True):
            run()
        return
    for folder, keywords in saves:
        save_model(model, folder, **keywords)


def _note_saves(run: Callable[[], None], model: nn.Module, engine: Any, state: Any) -> tuple[str, list[Any]]:
    """Return the folders and keywords of the saves that `run` asks for; or why Trainer has to gather, and none."""
    wanted: list[WantedSave] = []
    try:
        with consolidates_to(engine, state), holding(NOTED_SAVES, wanted):
            run()
    except LookedIntoError as error:
        return str(error), []
    others = [type(saved).__name__ for saved, _, _ in wanted if saved is not model]
    if others:
        return f"it saves a {others[0]} that is not the trained model", []
    saves = [(folder, keywords) for _, folder, keywords in wanted]
    try:
        json.dumps(saves)
    except TypeError as error:
        return f"save_pretrained has an argument that cannot be sent to other ranks: {error}", []
    return "", saves


def is_saved_by_itself(model: nn.Module) -> bool:
    """Return whether Trainer calls the model's `save_pretrained`. It writes the state dict of any other model."""
    classes = {"transformers.modeling_utils": "PreTrainedModel", "peft.peft_model": "PeftModel"}
    imported = [getattr(sys.modules[module], name) for module, name in classes.items() if module in sys.modules]
    return isinstance(model, tuple(imported))


# -- accelerate --------------------------------------------------------------------------------------------------------


def get_state_dict(ordinary: Callable[..., Any], accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a placeholder for `save_pretrained` where `Accelerator.get_state_dict` refuses.

    `model` has accelerate's name for it: callers may pass it by that.
    """
    inner = unwrapped(model)
    is_left = inner is model or IN_TRAINER.get() or not any(map(is_partitioned, inner.parameters()))
    if is_left or model.zero_gather_16bit_weights_on_model_save():  # by its ds_config, or by `consolidates_to`
        return ordinary(accelerator, model, *args, **kwargs)
    return NotGathered()


HANDLERS: Handlers = {
    foreign_names.INITIALIZE: asked_first(foreign_names.INITIALIZE, _before_engine),
    foreign_names.LOAD_CHECKPOINT: asked_first(foreign_names.LOAD_CHECKPOINT, _load_checkpoint),
    foreign_names.GET_STATE_DICT: get_state_dict,
    foreign_names.MODEL_SAVE: save_pretrained,
    foreign_names.ADAPTER_SAVE: save_pretrained,
    foreign_names.TRAINER_SAVE: save_trained,
}
