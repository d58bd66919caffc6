"""transformers' Trainer under `install`: see [Note: saved afterwards].

`Trainer.save_model` asks the engine for all weights on all ranks, and passes them to `save_pretrained` on rank 0
through `_save`, which subclasses override. Here it runs unchanged, but gets a placeholder. When it has ended on all
ranks, `save_model` writes the weights to the folders that `save_pretrained` was given.
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import nn

from lowmem_load import foreign_names
from lowmem_load.ds.hooks import consolidates_to
from lowmem_load.ds.parameters import is_partitioned
from lowmem_load.integrations.saves import NOTED_SAVES, LookedIntoError, NotGathered, WantedSave, write
from lowmem_load.replaced import Handlers, holding
from lowmem_load.saving.local_shards import unwrapped
from lowmem_load.saving.save import ranks_of

IN_STOCK: ContextVar[bool] = ContextVar("lowmem_load_in_stock", default=False)
"""Whether a stock save of Trainer is running. It asks accelerate for the state, and copes if it gets none."""


def save_model(ordinary: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Do what `Trainer.save_model` does. Collective: all ranks, as that is."""
    run = functools.partial(ordinary, trainer, *args, **kwargs)
    model, engine = unwrapped(trainer.model), getattr(trainer, "deepspeed", None)
    if engine is None or not any(map(is_partitioned, model.parameters())) or not _is_plain(trainer, model):
        with holding(IN_STOCK, True):
            run()
        return
    ranks = ranks_of(model)
    with ranks.step("Trainer.save_model") as step:
        state = NotGathered() if ranks.rank == 0 else None
        step.payload = _note_saves(run, model, engine, state)
    reason, saves = step.payloads[0]
    if reason:
        if ranks.rank == 0:
            warnings.warn(f"Trainer.save_model is left to stock ZeRO-3: {reason}", stacklevel=4)
        with holding(IN_STOCK, True):
            run()
        return
    for folder, keywords in saves:
        write(WantedSave(model, folder, keywords))


HANDLERS: Handlers = {foreign_names.TRAINER_SAVE: save_model}


def _note_saves(run: Callable[[], None], model: nn.Module, engine: Any, state: Any) -> tuple[str, list[Any]]:
    """Return the folders and keywords of the saves that `run` asks for; or why they are left to stock, and none."""
    wanted: list[WantedSave] = []
    try:
        with consolidates_to(engine, state), holding(NOTED_SAVES, wanted):
            run()
    except LookedIntoError as error:
        return str(error), []
    others = [type(save.model).__name__ for save in wanted if save.model is not model]
    if others:
        return f"it saves a {others[0]} that is not the trained model", []
    saves = [(save.folder, save.kwargs) for save in wanted]
    try:
        json.dumps(saves)
    except TypeError as error:
        return f"save_pretrained has an argument that cannot be sent to other ranks: {error}", []
    return "", saves


def _is_plain(trainer: Any, model: Any) -> bool:
    quantized = getattr(model, "hf_quantizer", None) is not None and not hasattr(model, "peft_config")
    as_safetensors = getattr(trainer.args, "save_safetensors", True)
    return is_saved_by_itself(model) and as_safetensors and not trainer.args.push_to_hub and not quantized


def is_saved_by_itself(model: nn.Module) -> bool:
    """Return whether Trainer calls the model's `save_pretrained`. Of any other model it writes the state dict."""
    classes = {"transformers.modeling_utils": "PreTrainedModel", "peft.peft_model": "PeftModel"}
    imported = [getattr(sys.modules[module], name) for module, name in classes.items() if module in sys.modules]
    return isinstance(model, tuple(imported))
