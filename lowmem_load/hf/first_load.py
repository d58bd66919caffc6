"""Something to do before the first load of a process.

Part of the transformers seam, see `loader.py`. It is used while transformers is being imported, so it imports nothing
of it: a half imported transformers would raise an error that some programs take for an absent one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

ENTRIES = ("from_pretrained", "_from_config")
"""The class methods of `PreTrainedModel` that every load goes through. `intercept.py` replaces them too."""


def before_first_load(model_class: type, prepare: Callable[[], None]) -> None:
    """Have `prepare` called in the first load of a model, which then begins anew.

    `prepare` may replace the methods of the class. It must not load a model. While it raises, every load raises.
    """
    lock = threading.Lock()
    is_prepared = threading.Event()

    def stand_in(name: str, ordinary: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(ordinary)
        def load(cls: type, *args: Any, **kwargs: Any) -> Any:
            if is_prepared.is_set():
                return ordinary(cls, *args, **kwargs)
            with lock:
                if not is_prepared.is_set():
                    prepare()
                    is_prepared.set()
            # From `model_class`: `cls` may have a method of its own, which has called this one.
            return vars(model_class)[name].__get__(None, cls)(*args, **kwargs)

        return load

    for name in ENTRIES:
        if name in vars(model_class):
            setattr(model_class, name, classmethod(stand_in(name, vars(model_class)[name].__func__)))
