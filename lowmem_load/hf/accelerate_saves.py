"""What accelerate saves: `Accelerator.save_model` and `get_state_dict`, by their public names."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lowmem_load.hf.replaced import replaced
from lowmem_load.hf.saver import SavedFile, recorded, symbolic_state
from lowmem_load.planning.expression import Source

Saves = Callable[[Any, Callable[..., None], Mapping[str, Any]], bool]
"""Gets an accelerator, what its own `save_model` would do, and its arguments by name; returns whether it has saved."""

States = Callable[[Any], Any]
"""Gets the model of `get_state_dict`; returns the state, or None to let the call go on."""


def describe_save(
    save: Callable[..., None], accelerator: Any, given: Mapping[str, Any], scratch: Path, tensors: Mapping[int, Source]
) -> list[SavedFile]:
    """Return the files of weights that `Accelerator.save_model` would write; write all its other files to `scratch`.

    It runs as it is, but for what it asks of the accelerator: the state dict, and to write a file.

    `given` are its arguments by name, `scratch` is an empty folder of this rank's own. `tensors` has what stands for
    each parameter and buffer of the model, by `id`.

    Source: accelerate 1.4 to 1.15 `accelerator.py`, `save_model`.
    """
    files: list[SavedFile] = []
    state = OrderedDict(symbolic_state(given["model"], tensors, None))

    def write(weights: Mapping[str, Any], path: str, safe_serialization: bool = False) -> None:
        metadata = {"format": "pt"} if safe_serialization else {}
        files.append(recorded(scratch, weights, path, metadata, is_zip=not safe_serialization))

    own = {"get_state_dict": lambda *_, **__: state, "save": write}
    vars(accelerator).update(own)
    try:
        save(**{**given, "save_directory": str(scratch)})
    finally:
        for name in own:
            del vars(accelerator)[name]
    return files


@contextlib.contextmanager
def accelerate_saves(on_save: Saves, on_state: States) -> Iterator[None]:
    """Inside, `Accelerator.save_model` and `get_state_dict` are handed to these first. Imports accelerate."""
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
