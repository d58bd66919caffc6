"""Arguments of dispatched calls, seen as trees: tuples, lists and dicts of tensors and constants, and nothing else.

`torch.utils._pytree` does the same for any registered class, and looks each value up in its registry: describing an
operation on 256 experts took most of its time there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with `function` of each value in its place."""
    kind = type(tree)
    if kind is tuple:
        return tuple([tree_map(function, item) for item in tree])
    if kind is list:
        return [tree_map(function, item) for item in tree]
    if kind is dict:
        return {key: tree_map(function, item) for key, item in tree.items()}
    return function(tree)


def values_of(tree: Any) -> list[Any]:
    """Return the values of the tree in order."""
    found: list[Any] = []
    tree_map(found.append, tree)
    return found


class Template:
    """A tree of which only the places of its tensors are kept: those may be large.

    Args:
        tree: the arguments of a call.
        kind: class of the tensors that will be others.
    """

    def __init__(self, tree: Any, kind: type = torch.Tensor) -> None:
        self._tree = tree_map(lambda value: _PLACE if isinstance(value, kind) else value, tree)

    def filled(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Return the tree with tensors in the places, in order."""
        supply = iter(tensors)
        return tree_map(lambda value: next(supply) if value is _PLACE else value, self._tree)


_PLACE = object()
