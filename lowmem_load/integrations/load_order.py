"""Under `lowmem-load run`: says that a model is loaded whole because it comes before the arguments, before it reads."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from lowmem_load import foreign_names
from lowmem_load.distributed.environment import FOREIGN_SIZES
from lowmem_load.errors import ConfigError
from lowmem_load.hf import load_lock
from lowmem_load.hf.active import asked_for_deepspeed
from lowmem_load.replaced import holding, replaced

_telling = contextlib.ExitStack()  # until the process ends

_IS_INSIDE: ContextVar[bool] = ContextVar("lowmem_load_is_inside", default=False)
"""Whether an ordinary load runs. Loads that the model's own code makes are part of it."""


def tell_early_loads(say: Callable[[str], object], *, strict: bool) -> None:
    """Call `say` with a line before each load that comes too early; with `strict`, have the load raise ConfigError.

    Call it before `install`, which then takes what it streams, and leaves the other loads.
    """

    def load(ordinary: Callable[..., Any], cls: Any, /, *args: Any, **kwargs: Any) -> Any:
        is_part = load_lock.is_loading() or _IS_INSIDE.get()
        if not is_part and kwargs.get("device_map") is None and _num_ranks() > 1 and not _has_arguments():
            text = (
                f"{cls.__name__} is loaded whole on every rank: nothing has asked for ZeRO-3 or FSDP2 yet. First make "
                "TrainingArguments(...), Accelerator(...) or HfDeepSpeedConfig(...), keep it in a variable, then call "
                "from_pretrained"
            )
            if strict:
                raise ConfigError(f"{text}; or run without --strict, if it is meant to be whole")
            say(text)
        with holding(_IS_INSIDE, True):
            return ordinary(cls, *args, **kwargs)

    loads = dict.fromkeys((foreign_names.FROM_PRETRAINED, foreign_names.FROM_CONFIG), load)
    _telling.enter_context(replaced(loads, everywhere=True))


def _has_arguments() -> bool:
    """Return whether this process has something that says how it trains: by ZeRO-3, FSDP2 or neither."""
    state: Any = sys.modules.get("accelerate.state")
    if asked_for_deepspeed() or (state is not None and state.AcceleratorState._shared_state):  # noqa: SLF001
        return True
    module: Any = sys.modules.get("transformers.training_args")
    return module is not None and any(issubclass(type(one), module.TrainingArguments) for one in gc.get_objects())


def _num_ranks() -> int:
    """Return the number of ranks that a launcher has started."""
    sizes = [os.environ.get(name, "") for name in ("WORLD_SIZE", *FOREIGN_SIZES)]
    return max(int(size) if size.isdigit() else 1 for size in sizes)
