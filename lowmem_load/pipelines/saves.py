"""Trainer's saves under `install`: as they are, but each rank writes what it holds.

[Note: saved afterwards] `Trainer.save_model` asks the engine for all weights on all ranks, and hands them to
`save_pretrained` on rank 0, by way of `_save`, which subclasses override. So it runs as it is, with something in place
of the weights that only `save_pretrained` may look at, and that notes where they are to go. When it has ended, on all
ranks, they are written there by `save_model`.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from lowmem_load.ds.consolidation import consolidates_to
from lowmem_load.ds.parameters import is_partitioned
from lowmem_load.hf.trainer_saves import (
    LookedIntoError,
    NotGathered,
    WantedSave,
    default_shard_size,
    is_saved_by_itself,
    noted_saves,
    trainer_saves,
)
from lowmem_load.integrity.model import unwrapped
from lowmem_load.saving.save import ranks_of, save_model


class LedSaves(contextlib.ExitStack):
    """Leads `Trainer.save_model` here from the first `deepspeed.initialize` of a Trainer on, until it is closed.

    Not before, since Trainer takes seconds to import, and most scripts that make an engine without it never need it.
    """

    _has_begun = False

    def begin(self, _: Mapping[str, Any]) -> None:
        """Look at a call of `deepspeed.initialize`."""
        if not self._has_begun and "transformers.trainer" in sys.modules:
            self._has_begun = True
            self.enter_context(trainer_saves(save_of_trainer))


def save_of_trainer(trainer: Any, run: Callable[[], None]) -> None:
    """Do what `Trainer.save_model` does. See [Note: saved afterwards]. Collective: all ranks, as that is.

    Left as it is: models without partitions, `.bin` files, quantized models, models of neither transformers nor PEFT,
    and saves that end in a push to the Hub; with a warning, those in which code looks into the weights or saves another
    model.

    Raises:
        RankError: another rank failed.
    """
    model, engine = unwrapped(trainer.model), getattr(trainer, "deepspeed", None)
    if engine is None or not any(map(is_partitioned, model.parameters())) or not _is_plain(trainer, model):
        run()
        return
    ranks = ranks_of(model)
    wanted: list[WantedSave] = []
    reason = ""
    with ranks.agreed("Trainer.save_model"):
        state = NotGathered() if ranks.rank == 0 else None
        try:
            with consolidates_to(engine, state), noted_saves() as wanted:
                run()
        except LookedIntoError as error:
            reason = str(error)
        others = [type(save.model).__name__ for save in wanted if save.model is not model]
        if others and not reason:
            reason = f"a {others[0]} is saved that is not the model which is trained"
    reason = ranks.broadcast_object(reason)
    if reason:
        if ranks.rank == 0:
            warnings.warn(f"Trainer.save_model is left to stock ZeRO-3: {reason}", stacklevel=4)
        run()
        return
    for folder, kwargs in ranks.broadcast_object([(save.folder, save.kwargs) for save in wanted]):
        save_model(model, folder, **{"max_shard_size": default_shard_size(), **kwargs})


def _is_plain(trainer: Any, model: Any) -> bool:
    arguments = trainer.args
    quantized = getattr(model, "hf_quantizer", None) is not None and not hasattr(model, "peft_config")
    as_safetensors = getattr(arguments, "save_safetensors", True)
    return is_saved_by_itself(model) and as_safetensors and not arguments.push_to_hub and not quantized
