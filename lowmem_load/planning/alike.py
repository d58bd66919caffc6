"""Parameters whose plans differ in nothing but which tensors are read: of those, one is planned. Pure.

The layers of a model are alike, so that what is asked of all its parameters needs the plans of some dozens of them.
Where in which file a tensor lies has no part in how it is cut into reads.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lowmem_load.planning.expression import (
    Computed,
    Concat,
    Elementwise,
    Expression,
    Held,
    Instance,
    Permute,
    Pick,
    Slice,
    Slot,
    Source,
    children,
)


@dataclass(frozen=True, slots=True)
class Likeness:
    """A parameter that was not planned.

    Attributes:
        names: all names of it.
        like: the first name of the parameter that was planned.
        tensors: what stands in that plan, and what this parameter has in its place.
    """

    names: tuple[str, ...]
    like: str
    tensors: Mapping[Source, Source]


class Alike:
    """Knows the parameters of one plan, and finds those that are like an earlier one.

    Attributes:
        found: those, in the order of the model.
    """

    def __init__(self) -> None:
        self.found: list[Likeness] = []
        # The expressions, too: the keys have ids of what is in them.
        self._planned: dict[Hashable, tuple[str, list[Source], Expression]] = {}

    def leaves_out(self, names: Sequence[str], expression: Expression, layout: Hashable) -> bool:
        """Return whether a parameter is like one that this was asked of before; if so, it is noted.

        Args:
            names: all names of the parameter.
            expression: what it is made of.
            layout: what a rank holds of it, and how.
        """
        key, sources = _likeness(expression)
        first, others, _ = self._planned.setdefault((layout, key), (names[0], sources, expression))
        if first == names[0]:
            return False
        self.found.append(Likeness(tuple(names), first, dict(zip(others, sources, strict=True))))
        return True


def _likeness(expression: Expression) -> tuple[Hashable, list[Source]]:
    """Return what is equal for expressions that differ in their sources alone, and the distinct sources in order.

    Nodes come in the order of a walk, and each says how many follow it; one that comes again is a number.
    """
    key: list[Hashable] = []
    seen: dict[int, int] = {}
    sources: dict[Source, int] = {}
    stack = [expression]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            key.append(seen[id(node)])
            continue
        seen[id(node)] = len(seen)
        if isinstance(node, Source):
            key.append((node.shape, node.dtype, sources.setdefault(node, len(sources))))
            continue
        key.append(_kind(node))
        stack.extend(node.inputs if isinstance(node, Instance) else children(node))
    return tuple(key), list(sources)


def _kind(node: Expression) -> tuple[str, tuple[int, ...], torch.dtype, Hashable]:
    """Return what a node is by itself; of an instance its pattern, which it shares with others, is not walked."""
    detail: Hashable = None
    if isinstance(node, Held | Slot):
        detail = id(node)
    elif isinstance(node, Instance):
        detail = id(node.pattern)
    elif isinstance(node, Computed):
        detail = node.operation, len(node.inputs)
    elif isinstance(node, Elementwise):
        detail = node.operation, len(node.parts)
    elif isinstance(node, Concat):
        detail = node.dim, len(node.parts)
    elif isinstance(node, Slice):
        detail = node.starts, node.steps
    elif isinstance(node, Pick):
        detail = node.bases, node.coefficients
    elif isinstance(node, Permute):
        detail = node.dims
    return type(node).__name__, node.shape, node.dtype, detail
