"""Saves of Trainer, accelerate and engines under `install`: the same files, but each rank writes what it holds.

[Note: saved afterwards] `Trainer.save_model` asks the engine for all weights on all ranks, and passes them to
`save_pretrained` on rank 0 through `_save`, which subclasses override. Here it runs unchanged, but gets a placeholder
instead of weights. Only `save_pretrained` may look at the placeholder, and records the folder and its arguments. When
`Trainer.save_model` has ended on all ranks, `save_model` writes the weights to that folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from lowmem_load.ds.hooks import consolidates_to, engine_hooked, hooked, may_gather
from lowmem_load.ds.parameters import full_numel, is_partitioned
from lowmem_load.errors import UnsupportedError
from lowmem_load.hf.merging import Merge
from lowmem_load.hf.saver import (
    LookedIntoError,
    NotGathered,
    SavedFile,
    WantedSave,
    accelerate_saves,
    default_shard_size,
    describe_accelerate_save,
    is_saved_by_itself,
    plain_saves,
    recorded,
    saves_adapters_only,
    symbolic_state,
    trainer_saves,
)
from lowmem_load.integrations import frameworks
from lowmem_load.planning.expression import Source
from lowmem_load.replaced import holding
from lowmem_load.saving.local_shards import unwrapped
from lowmem_load.saving.save import ranks_of, save_described, save_model


@contextlib.contextmanager
def saves_hooked() -> Iterator[None]:
    """Inside, saves of each library are ours from the first `deepspeed.initialize` after its import."""

    def saves_of_class(module: ModuleType) -> contextlib.AbstractContextManager[None]:
        return plain_saves(module.__name__, save_of_state, refuse_empty)

    blocks: dict[frameworks.Hook, Callable[[ModuleType], contextlib.AbstractContextManager[None]]] = {
        frameworks.ENGINE_SAVE: lambda _: engine_hooked("save_16bit_model", save_of_engine),
        frameworks.ACCELERATE_SAVE: lambda _: accelerate_saves(save_of_accelerator, state_of_accelerator),
        frameworks.TRAINER_SAVE: lambda _: trainer_saves(save_of_trainer),
        frameworks.MODEL_SAVE: saves_of_class,
        frameworks.ADAPTER_SAVE: saves_of_class,
    }
    with contextlib.ExitStack() as stack:

        def begin(_: Mapping[str, Any]) -> None:
            for hook in [hook for hook in blocks if hook.module in sys.modules]:
                stack.enter_context(frameworks.entered(hook, sys.modules[hook.module], blocks.pop(hook)))

        with hooked(begin):
            yield


_IN_STOCK: ContextVar[bool] = ContextVar("lowmem_load_in_stock", default=False)
"""Whether a stock save of Trainer is running. It asks accelerate for the state, and copes if it gets none."""

_NOTED: ContextVar[list[WantedSave] | None] = ContextVar("lowmem_load_noted_saves", default=None)
"""The calls of `save_pretrained` in the `Trainer.save_model` that is running."""


def save_of_trainer(trainer: Any, run: Callable[[], None]) -> None:
    """Do what `Trainer.save_model` does. See [Note: saved afterwards]. Collective: all ranks, as that is."""
    model, engine = unwrapped(trainer.model), getattr(trainer, "deepspeed", None)
    if engine is None or not any(map(is_partitioned, model.parameters())) or not _is_plain(trainer, model):
        with holding(_IN_STOCK, True):
            run()
        return
    ranks = ranks_of(model)
    wanted: list[WantedSave] = []
    reason = ""
    with ranks.step("Trainer.save_model") as step:
        state = NotGathered() if ranks.rank == 0 else None
        try:
            with consolidates_to(engine, state), holding(_NOTED, wanted):
                run()
        except LookedIntoError as error:
            reason = str(error)
        others = [type(save.model).__name__ for save in wanted if save.model is not model]
        if others and not reason:
            reason = f"it saves a {others[0]} that is not the trained model"
        saves = [(save.folder, save.kwargs) for save in wanted]
        try:
            json.dumps(saves)
        except TypeError as error:
            saves, reason = [], reason or f"save_pretrained has an argument that cannot be sent to other ranks: {error}"
        step.payload = reason, saves
    reason, saves = step.payloads[0]
    if reason:
        if ranks.rank == 0:
            warnings.warn(f"Trainer.save_model is left to stock ZeRO-3: {reason}", stacklevel=4)
        with holding(_IN_STOCK, True):
            run()
        return
    for folder, kwargs in saves:
        _save(WantedSave(model, folder, kwargs))


def _save(save: WantedSave) -> None:
    save_model(save.model, save.folder, **{"max_shard_size": default_shard_size(), **save.kwargs})


def _is_plain(trainer: Any, model: Any) -> bool:
    arguments = trainer.args
    quantized = getattr(model, "hf_quantizer", None) is not None and not hasattr(model, "peft_config")
    as_safetensors = getattr(arguments, "save_safetensors", True)
    return is_saved_by_itself(model) and as_safetensors and not arguments.push_to_hub and not quantized


def save_of_engine(engine: Any, given: Mapping[str, Any]) -> bool | None:
    """Do what `engine.save_16bit_model` does, whatever the ds_config allows; return None to leave it to stock."""
    model = unwrapped(engine)
    if not any(map(is_partitioned, model.parameters())):
        return None
    name, without_frozen = str(given["save_filename"]), bool(given["exclude_frozen_parameters"])
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}

    def describe(scratch: Path, sources: Mapping[int, Source]) -> tuple[list[SavedFile], list[Merge]]:
        state = symbolic_state(model, sources, None)
        kept = {key: value for key, value in state.items() if not (without_frozen and key in frozen)}
        return [recorded(scratch, kept, scratch / name, {}, is_zip=True)], []

    save_described(model, given["save_dir"], describe, {"save_filename": name, "exclude_frozen": without_frozen})
    return True


def save_of_accelerator(accelerator: Any, ordinary: Callable[..., None], given: Mapping[str, Any]) -> bool:
    """Do what `Accelerator.save_model` does, without gathering; return False to leave it to stock."""
    model, folder = unwrapped(given["model"]), given["save_directory"]
    if not any(map(is_partitioned, model.parameters())) or os.path.isfile(folder):
        return False

    def describe(scratch: Path, sources: Mapping[int, Source]) -> tuple[list[SavedFile], list[Merge]]:
        return describe_accelerate_save(ordinary, accelerator, {**given, "model": model}, scratch, sources), []

    options = {key: value for key, value in given.items() if key not in ("model", "save_directory")}
    save_described(model, folder, describe, options)
    return True


def state_of_accelerator(engine: Any) -> NotGathered | None:
    """Return a placeholder for `save_pretrained` where stock `get_state_dict` refuses; None lets the call go on."""
    model = unwrapped(engine)
    if engine is model or _IN_STOCK.get() or not any(map(is_partitioned, model.parameters())) or may_gather(engine):
        return None
    return NotGathered()


def save_of_state(save: WantedSave) -> None:
    """Do what `save_pretrained` does with the placeholder of `state_of_accelerator`. Collective: all ranks."""
    noted = _NOTED.get()
    if noted is not None:  # `save_of_trainer` saves it
        noted.append(save)
        return
    title = "save_pretrained with the state of get_state_dict, to be called on all ranks and not by the main one alone"
    with ranks_of(save.model).step(title, is_prompt=True):
        pass  # wait for all ranks
    _save(save)


def refuse_empty(model: Any) -> None:
    """Raise if `save_pretrained` would write partitioned parameters with shape [0]."""
    adapters_only = saves_adapters_only(model)
    for name, parameter in model.named_parameters():
        is_saved = parameter.requires_grad or not adapters_only
        if is_saved and parameter.numel() == 0 and is_partitioned(parameter) and full_numel(parameter):
            raise UnsupportedError(
                f"{name}: is partitioned by ZeRO-3, and save_pretrained would write it with shape [0]; call "
                "lowmem_load.save_model(model, folder) on all ranks"
            )
