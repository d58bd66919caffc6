"""Arguments of dispatched calls, without the tensors in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

_PLACE = object()
"""Stands for a tensor."""


class Template:
    """Arguments of which only the places of the tensors are kept: the tensors may be large.

    Args:
        tree: the arguments of a call: tuples, lists and dicts.
        kind: class of the tensors that are left out.
    """

    def __init__(self, tree: Any, kind: type = torch.Tensor) -> None:
        leaves, self._spec = tree_flatten(tree)
        self._leaves = [_PLACE if isinstance(leaf, kind) else leaf for leaf in leaves]

    def filled(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Return the arguments with tensors in the places, in order."""
        supply = iter(tensors)
        return tree_unflatten([next(supply) if leaf is _PLACE else leaf for leaf in self._leaves], self._spec)
