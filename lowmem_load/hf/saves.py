"""Hands the saves of Trainer, accelerate and scripts to handlers. Public names only."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

from lowmem_load.errors import UnsupportedError
from lowmem_load.hf.replaced import replaced
from lowmem_load.hf.saver import OURS, SavedFile, recorded, symbolic_state
from lowmem_load.planning.expression import Source

SAVING_CLASSES = {"transformers.modeling_utils": "PreTrainedModel", "peft.peft_model": "PeftModel"}
"""Classes whose `save_pretrained` is replaced, by their modules."""


class LookedIntoError(UnsupportedError):
    """Code looked into a `NotGathered`."""


class NotGathered(dict[str, Any]):
    """Stands for a state dict whose weights are not gathered. It can be passed on, but not looked into."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise LookedIntoError(
            "this code looks into the weights of a state dict, and lowmem_load does not gather them; hand it to "
            "save_pretrained on all ranks, or call lowmem_load.install(saves=False)"
        )

    __getitem__ = __iter__ = __len__ = __contains__ = __bool__ = _refuse
    items = keys = values = get = pop = copy = _refuse  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class WantedSave:
    """A call of `save_pretrained` with a `NotGathered`; its keywords are without those in `OURS`."""

    model: nn.Module
    folder: str
    kwargs: dict[str, Any]


def is_saved_by_itself(model: nn.Module) -> bool:
    """Return whether Trainer calls the model's `save_pretrained`. Of any other model it writes the state dict."""
    imported = [(sys.modules[module], name) for module, name in SAVING_CLASSES.items() if module in sys.modules]
    return isinstance(model, tuple(getattr(module, name) for module, name in imported))


def default_shard_size() -> int | str:
    """Return the default size of shards in `save_pretrained`, which depends on the release."""
    size: int | str = inspect.signature(PreTrainedModel.save_pretrained).parameters["max_shard_size"].default
    return size


@contextlib.contextmanager
def trainer_saves(handler: Callable[[Any, Callable[[], None]], None]) -> Iterator[None]:
    """Inside, `handler` gets each trainer that saves, and what its own `save_model` would do. Imports Trainer."""
    from transformers import Trainer

    def save_model(ordinary: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        handler(self, functools.partial(ordinary, self, *args, **kwargs))

    with replaced((Trainer, "save_model", save_model), everywhere=True):
        yield


@contextlib.contextmanager
def plain_saves(
    module: str, on_state: Callable[[WantedSave], None], check: Callable[[nn.Module], None]
) -> Iterator[None]:
    """Inside, `on_state` gets each `save_pretrained` with a `NotGathered`, and `check` the model of one without."""
    cls = getattr(sys.modules[module], SAVING_CLASSES[module])
    signature = inspect.signature(cls.save_pretrained)

    def save_pretrained(ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        state = given.get("state_dict")
        if isinstance(state, NotGathered):
            if not given.get("safe_serialization", True):
                raise UnsupportedError("safe_serialization=False: the weights are not gathered; leave it out")
            others = {key: value for key, value in given.items() if key not in (*OURS, "self", "save_directory")}
            return on_state(WantedSave(given["self"], str(given["save_directory"]), others))
        if state is None and given.get("is_main_process", True):  # else nothing is written
            check(given["self"])
        return ordinary(*args, **kwargs)

    with replaced((cls, "save_pretrained", save_pretrained), everywhere=True):
        yield


def saves_adapters_only(model: nn.Module) -> bool:
    """Return whether `save_pretrained` of a model writes only adapters."""
    return hasattr(model, "get_base_model") or bool(getattr(model, "_hf_peft_config_loaded", False))


def describe_save(
    save: Callable[..., None], accelerator: Any, given: Mapping[str, Any], scratch: Path, tensors: Mapping[int, Source]
) -> list[SavedFile]:
    """Return the files of weights that `Accelerator.save_model` would write; write all its other files to `scratch`."""
    files: list[SavedFile] = []
    state = OrderedDict(symbolic_state(given["model"], tensors, None))

    def write(_: Any, __: Any, weights: Mapping[str, Any], path: str, safe_serialization: bool = False) -> None:
        metadata = {"format": "pt"} if safe_serialization else {}
        files.append(recorded(scratch, weights, path, metadata, is_zip=not safe_serialization))

    kind = type(accelerator)
    with replaced((kind, "get_state_dict", lambda *_, **__: state), (kind, "save", write)):
        save(**{**given, "save_directory": str(scratch)})
    return files


@contextlib.contextmanager
def accelerate_saves(
    on_save: Callable[[Any, Callable[..., None], Mapping[str, Any]], bool], on_state: Callable[[Any], Any]
) -> Iterator[None]:
    """Inside, calls of `Accelerator.save_model` and `get_state_dict` go to these first. Imports accelerate.

    `on_save` gets the accelerator, its own `save_model` and the arguments, and returns whether it has saved. `on_state`
    gets the model, and returns None if accelerate is to make the state.
    """
    from accelerate import Accelerator

    signature = inspect.signature(Accelerator.save_model)

    def save_model(ordinary: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        given.pop("self")
        if not on_save(self, functools.partial(ordinary, self), given):
            ordinary(self, *args, **kwargs)

    def get_state_dict(ordinary: Callable[..., Any], self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = on_state(model)
        return ordinary(self, model, *args, **kwargs) if state is None else state

    with replaced(
        (Accelerator, "save_model", save_model), (Accelerator, "get_state_dict", get_state_dict), everywhere=True
    ):
        yield
