"""Calls of `save_pretrained` that scripts make themselves, looked at. Public names of transformers and PEFT only."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lowmem_load.errors import UnsupportedError
from lowmem_load.hf.replaced import replaced
from lowmem_load.hf.saver import OURS
from lowmem_load.hf.trainer_saves import NotGathered

PlainSave = Callable[[nn.Module, str, dict[str, Any]], None]
"""Gets the model, the folder and further keywords of a call with a `NotGathered`."""


SAVING_CLASSES = {"transformers.modeling_utils": "PreTrainedModel", "peft.peft_model": "PeftModel"}
"""Class whose `save_pretrained` is looked at, by the module that has it."""


@contextlib.contextmanager
def plain_saves(module: str, on_state: PlainSave, check: Callable[[nn.Module], None]) -> Iterator[None]:
    """Inside, `save_pretrained` hands calls with a `NotGathered` on, and checks the models of those without a state."""
    cls = getattr(sys.modules[module], SAVING_CLASSES[module])
    signature = inspect.signature(cls.save_pretrained)

    def save_pretrained(ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        given = {**bound.pop("kwargs", {}), **bound}
        model, folder = given.pop("self"), str(given.pop("save_directory"))
        state = given.get("state_dict")
        if isinstance(state, NotGathered):
            if not given.get("safe_serialization", True):
                raise UnsupportedError("safe_serialization=False: the weights are not gathered; leave it out")
            return on_state(model, folder, {key: value for key, value in given.items() if key not in OURS})
        if state is None and given.get("is_main_process", True):  # else nothing is written
            check(model)
        return ordinary(*args, **kwargs)

    with replaced((cls, "save_pretrained", save_pretrained), everywhere=True):
        yield


def saves_adapters_only(model: nn.Module) -> bool:
    """Return whether `save_pretrained` of a model writes adapters and none of the base model.

    Source: transformers 4.51 to 5.23 `modeling_utils.py`, `save_pretrained`.
    """
    return hasattr(model, "get_base_model") or bool(getattr(model, "_hf_peft_config_loaded", False))
