"""Trainer's saves, led elsewhere. Public names of transformers and PEFT only."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

from lowmem_load.errors import UnsupportedError
from lowmem_load.hf.replaced import Handler, replaced
from lowmem_load.hf.saver import OURS

TrainerSave = Callable[[Any, Callable[[], None]], None]
"""Gets the trainer, and what its own `save_model` would do."""


class LookedIntoError(UnsupportedError):
    """Code of a trainer needs the weights themselves."""


class NotGathered(dict[str, Any]):
    """Stands for a state dict whose weights stay where they are: it may be handed on, but not looked into."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise LookedIntoError(
            "this code looks into the weights of a state dict, and lowmem_load does not gather them; hand it to "
            "save_pretrained on all ranks, or call lowmem_load.install(saves=False)"
        )

    __getitem__ = __iter__ = __len__ = __contains__ = __bool__ = _refuse
    items = keys = values = get = pop = copy = _refuse  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class WantedSave:
    """A call of `save_pretrained` with a `NotGathered`.

    Attributes:
        model: whose.
        folder: where it is to go.
        kwargs: further keywords, but for those that are decided by who saves.
    """

    model: nn.Module
    folder: str
    kwargs: dict[str, Any]


@contextlib.contextmanager
def noted_saves() -> Iterator[list[WantedSave]]:
    """Inside, `save_pretrained` with a `NotGathered` writes nothing; each such call is in the list that is yielded."""
    wanted: list[WantedSave] = []

    def noting(signature: inspect.Signature) -> Handler:
        def save(ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs).arguments
            given = {**bound.pop("kwargs", {}), **bound}
            if not isinstance(given.get("state_dict"), NotGathered):
                return ordinary(*args, **kwargs)
            model, folder = given.pop("self"), str(given.pop("save_directory"))
            wanted.append(WantedSave(model, folder, {k: v for k, v in given.items() if k not in OURS}))
            return None

        return save

    with replaced(*((cls, "save_pretrained", noting(inspect.signature(cls.save_pretrained))) for cls in _classes())):
        yield wanted


def is_saved_by_itself(model: nn.Module) -> bool:
    """Return whether Trainer calls the model's `save_pretrained`; it writes the state dict of any other one itself.

    Source: transformers 5.23 `trainer.py`, `Trainer._save`.
    """
    return isinstance(model, _classes())


def _classes() -> tuple[type, ...]:
    peft = sys.modules.get("peft.peft_model")
    return (PreTrainedModel,) if peft is None else (PreTrainedModel, peft.PeftModel)


def default_shard_size() -> int | str:
    """Return how large shards are where a call of `save_pretrained` does not say: it depends on the release."""
    size: int | str = inspect.signature(PreTrainedModel.save_pretrained).parameters["max_shard_size"].default
    return size


@contextlib.contextmanager
def trainer_saves(handler: TrainerSave) -> Iterator[None]:
    """Inside, `Trainer.save_model` is handed to `handler`. Imports Trainer."""
    from transformers import Trainer

    def save_model(ordinary: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        handler(self, functools.partial(ordinary, self, *args, **kwargs))

    with replaced((Trainer, "save_model", save_model), everywhere=True):
        yield
