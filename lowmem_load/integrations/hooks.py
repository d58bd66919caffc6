"""Blocks that are entered once a program imports a framework, if its release has the names that they replace.

These names are private, and any release may move them. An import of a user must work all the same, so what a block
needs and a release lacks is one warning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib.machinery import PathFinder
from types import ModuleType

from lowmem_load.foreign_names import ForeignName
from lowmem_load.integrations.imports import after_import
from lowmem_load.replaced import Handlers, replaced, usable_names, warn_of_loss, warn_of_missing

Block = Callable[[Sequence[ForeignName]], AbstractContextManager[object]]
"""Makes a context manager, given those of its names that the release has."""


def replaced_once_imported(names: Collection[ForeignName], handlers: Callable[[], Handlers]) -> ExitStack:
    """Return a block: inside, handlers are called in place of names once their module is imported, for all threads.

    `handlers` is called then. Names that it has no handler for are needed, but not replaced.
    """

    def replace(usable: Sequence[ForeignName]) -> AbstractContextManager[None]:
        made = handlers()
        return replaced({name: made[name] for name in usable if name in made}, everywhere=True)

    stack = ExitStack()
    for module in dict.fromkeys(name.module for name in names):
        stack.enter_context(entered_once_imported([name for name in names if name.module == module], replace))
    return stack


def entered_once_imported(names: Sequence[ForeignName], block: Block) -> ExitStack:
    """Return a block: inside, `block` is entered once the module of the names is imported.

    The absence of the module is noticed when its package is imported.
    """
    stack, module = ExitStack(), names[0].module
    stack.callback(after_import(module, lambda _: enter_if_usable(stack, names, block)))
    package = module.partition(".")[0]
    if package != module:
        stack.callback(after_import(package, lambda imported: _check_module(names, imported)))
    return stack


def enter_if_usable(stack: ExitStack, names: Sequence[ForeignName], block: Block) -> None:
    """Enter a block if an imported module has names that it needs. Warn of those that are missing."""
    usable = usable_names(names)
    if usable:
        try:
            stack.enter_context(block(usable))
        except ImportError as error:  # of what the block needs; an IncompatibleVersionError is one
            warn_of_loss(f"{error}. So {names[0].loss}")


def _check_module(names: Sequence[ForeignName], package: ModuleType) -> None:
    """Warn if the module is no file of its package, which has just been imported. Imports nothing."""
    path, parts = getattr(package, "__path__", []), names[0].module.split(".")
    for depth in range(2, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            warn_of_missing(names)
            return
        path = spec.submodule_search_locations or []
