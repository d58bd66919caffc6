"""The variable that switches lowmem_load on, and acting right after a module is imported.

Every Python process of a job imports this: it imports next to nothing.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing's own would import typing
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

SWITCH = "LOWMEM_LOAD_INSTALL"
"""The variable: OFF, ON, or STRICT and NO_DOWNLOAD with a comma, for `install(strict=True, download=False)`."""

OFF, ON, STRICT, NO_DOWNLOAD, STREAM = "0", "1", "strict", "no-download", "stream"  # the last as in 0.3


def keywords_of_run() -> dict[str, Any]:
    """Return the keywords of `install` that the variable gives."""
    text = os.environ.get(SWITCH) or OFF
    known = {ON: {}, STRICT: {"strict": True}, NO_DOWNLOAD: {"download": False}, STREAM: {"stream": True}}
    words = text.split(",") if text != OFF else []
    if not known.keys() >= {*words}:
        from lowmem_load.errors import LowMemLoadError

        raise LowMemLoadError(
            f"{SWITCH} is {text!r}; expected {ON}, {STRICT}, {NO_DOWNLOAD}, or {OFF} to leave lowmem_load off"
        )
    return {key: value for word in words for key, value in known[word].items()}


def after_import(name: str, act: Callable[[ModuleType], object]) -> Callable[[], None]:
    """Call `act` with a module once the import system has executed it. Return what calls this off."""
    if name in sys.modules:
        act(sys.modules[name])
        return lambda: None
    finder = Finder(name, act)
    sys.meta_path.insert(0, finder)
    return finder.leave


class Finder:
    """Finds a module as the finders behind it do, and acts after it was executed: `find_spec` alone loads nothing."""

    def __init__(self, awaited: str, act: Callable[[ModuleType], object]) -> None:
        self._awaited, self._act = awaited, act

    def leave(self) -> None:
        """Await nothing any more."""
        if sys.meta_path and self in sys.meta_path:  # None when Python ends
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if name != self._awaited:
            return None
        # Python itself asks the finders in front. One of them may be like this one, and would ask it again.
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(name, path, target) for finder in behind)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._act_after(spec.loader)
        return spec

    def _act_after(self, loader: object) -> None:
        """Replace `exec_module` of this object only: inspect and importlib.resources look at its class.

        The loader of a zip archive is that of all its modules, of which the awaited one may import others.
        """
        execute = loader.exec_module  # type: ignore[attr-defined]  # importlib.abc.Loader declares it for some only

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ != self._awaited:
                return
            vars(loader).pop("exec_module", None)  # another finder may have awaited the same module
            if self in sys.meta_path:  # else nobody waits any more
                self.leave()
                self._act(module)

        loader.exec_module = exec_module  # type: ignore[attr-defined]
