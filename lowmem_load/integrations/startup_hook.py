"""Waits, from the start of an interpreter, for transformers: what is done then is `hf/first_load.py`'s.

Runs in every Python process of a job, most of which never load a model. So it imports next to nothing, and takes its
finder out of `sys.meta_path` as soon as that has served.
"""

from __future__ import annotations

import os
import sys

from lowmem_load.integrations.startup_environment import OFF, SWITCH

TYPE_CHECKING = False  # typing's own would import typing
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

AWAITED = "transformers.modeling_utils"
"""Where `PreTrainedModel` is defined. Without this module no model can be loaded; tokenizers do not need it."""


def watch() -> None:
    """Have lowmem_load installed before the first model is loaded, unless the environment says no.

    Calling it again does nothing.
    """
    if os.environ.get(SWITCH) not in ("", OFF) and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds `AWAITED` where the finders behind it do, and acts when that module has been executed.

    Finding alone does not count: `importlib.util.find_spec` asks finders too, and loads nothing.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if name != AWAITED:
            return None
        # Those before it are asked by Python itself, and may be such as this one, which would ask it again.
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(name, path, target) for finder in behind)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._act_after(spec.loader)
        return spec

    def _act_after(self, loader: object) -> None:
        """Replace `exec_module` on this one object: its class stays what inspect and importlib.resources expect."""
        execute = loader.exec_module  # type: ignore[attr-defined]  # importlib.abc.Loader declares it for some only

        def exec_module(module: ModuleType) -> None:
            execute(module)
            del loader.exec_module  # type: ignore[attr-defined]
            sys.meta_path.remove(self)

            from lowmem_load.hf.first_load import before_first_load
            from lowmem_load.integrations.switch_on import switch_on

            before_first_load(module.PreTrainedModel, switch_on)

        loader.exec_module = exec_module  # type: ignore[attr-defined]
