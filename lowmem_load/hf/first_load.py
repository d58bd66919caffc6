"""Something to do before the first load of a process, whoever makes it.

Part of the transformers seam, see `loader.py`. It is used while transformers is being imported, so it imports nothing
of it: what is half imported then cannot be asked for, and an error there would look like a broken transformers, which
some programs take for an absent one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

ENTRIES = ("from_pretrained", "_from_config")
"""The class methods of `PreTrainedModel` that every load goes through; `intercept.py` replaces them, too."""


def before_first_load(model_class: type, prepare: Callable[[], None]) -> None:
    """Have `prepare` called in the first load of a model, which then goes the way that `prepare` has made.

    Afterwards the class is as it was. While `prepare` raises, every load raises.

    `prepare` is called with no load going on; it may replace the class's methods.
    """
    _FirstLoad(model_class, prepare)


class _FirstLoad:
    def __init__(self, model_class: type, prepare: Callable[[], None]) -> None:
        self._model_class = model_class
        self._prepare = prepare
        self._is_prepared = False
        self._lock = threading.Lock()
        self._ordinary = {name: model_class.__dict__[name] for name in ENTRIES if name in model_class.__dict__}
        self._ours: dict[str, Any] = {name: classmethod(self._stand_in(name)) for name in self._ordinary}
        self._put(self._ours, instead_of=self._ordinary)

    def _stand_in(self, name: str) -> Callable[..., Any]:
        ordinary = self._ordinary[name].__func__

        @functools.wraps(ordinary)
        def load(cls: type, *args: Any, **kwargs: Any) -> Any:
            if self._is_prepared:  # somebody who wrapped or kept this calls it from within a load
                return ordinary(cls, *args, **kwargs)
            with self._lock:
                if not self._is_prepared:
                    self._do()
            # From the class that was replaced: `cls` may have a method of its own, which has called this one.
            return self._model_class.__dict__[name].__get__(None, cls)(*args, **kwargs)

        return load

    def _do(self) -> None:
        self._put(self._ordinary, instead_of=self._ours)
        try:
            self._prepare()
        except BaseException:
            self._put(self._ours, instead_of=self._ordinary)
            raise
        self._is_prepared = True

    def _put(self, methods: dict[str, Any], *, instead_of: dict[str, Any]) -> None:
        for name, method in methods.items():
            if self._model_class.__dict__[name] is instead_of[name]:  # else somebody wrapped it since
                setattr(self._model_class, name, method)
