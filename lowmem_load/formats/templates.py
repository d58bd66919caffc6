"""Expressions as data, for files that outlive the process: JSON, and back, checked like any untrusted input.

[Note: templates] Of a model's expressions most differ in nothing but the tensors that they are made of: those of one
layer and the next. So an expression is told as a template, a list of nodes in which each names its parts by their
place before it, and the numbers of its tensors. A template is read and checked once; to make an expression of it takes
as long as to make its nodes. Where a tensor lies is not told: its number leads to the header of its file.

A node is a list: its kind, its parts, and what the parts do not say. Functions and values in memory have no place in
data, so they are told by names, if they have one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from lowmem_load.errors import CheckpointError
from lowmem_load.planning.expression import (
    Cast,
    Computed,
    Concat,
    Elementwise,
    Expression,
    Held,
    Instance,
    Permute,
    Reshape,
    Shape,
    Slice,
    Slot,
    Source,
    concat,
)

MAX_DIMS, MAX_SIZE = 64, 1 << 62
"""Of a shape."""

MAX_DEPTH = 200
"""Of an expression: what conversions make is a tenth as deep, and much that handles expressions recurses."""

Make = Callable[[Sequence[Expression]], Expression]
"""Makes a node of all nodes before it."""

Places = tuple[int, ...]
"""Of the parts of a node, among the nodes before it."""


class NotDataError(Exception):
    """An expression holds what cannot be told as data."""


class Names(Protocol):
    """How functions of `Elementwise` and values in memory are told."""

    def told_function(self, function: Any) -> Any:
        """Return JSON; None for one without a name."""

    def told_value(self, value: Held) -> Any:
        """Return JSON; None for one without a name."""

    def function(self, told: Any, num_parts: int) -> Any:
        """Return the function that was told. Raises ValueError if there is none for so many parts."""

    def value(self, told: Any) -> Held:
        """Return the value that was told. Raises ValueError if there is none."""


class Teller:
    """Tells expressions as templates.

    Args:
        names: of functions and values.
        number_of: a tensor's number; raises NotDataError for one that has none.

    Attributes:
        templates: as JSON, each a list of nodes.
    """

    def __init__(self, names: Names, number_of: Callable[[Source], int]) -> None:
        self.templates: list[list[Any]] = []
        self._names, self._number_of = names, number_of
        self._known: dict[str, int] = {}

    def told(self, expression: Expression) -> tuple[int, list[int]]:
        """Return the place of its template in `templates`, and the numbers of its tensors.

        Raises:
            NotDataError: names what cannot be told.
        """
        telling = _Telling(self._names, self._number_of)
        telling.place_of(expression)
        text = json.dumps(telling.nodes)
        if text not in self._known:
            self._known[text] = len(self.templates)
            self.templates.append(telling.nodes)
        return self._known[text], telling.numbers


class _Telling:
    """One expression as it is told. No closure, which would keep itself alive where nothing is collected."""

    def __init__(self, names: Names, number_of: Callable[[Source], int]) -> None:
        self.nodes: list[list[Any]] = []
        self.numbers: list[int] = []
        self._names, self._number_of = names, number_of
        self._places: dict[int, int] = {}

    def place_of(self, node: Expression) -> int:
        """Return the place of a node, which is told if it was not."""
        place = self._places.get(id(node))
        if place is None:
            if isinstance(node, Source):
                self.numbers.append(self._number_of(node))
            told = self._node(node)
            place = self._places[id(node)] = len(self.nodes)
            self.nodes.append(told)
        return place

    def _node(self, node: Expression) -> list[Any]:
        place_of = self.place_of
        if isinstance(node, Source | Slot):
            return [type(node).__name__, _name_of(node.dtype), list(node.shape)]
        if isinstance(node, Concat):
            return ["Concat", node.dim, *map(place_of, node.parts)]
        if isinstance(node, Slice):
            return ["Slice", place_of(node.part), list(node.starts), list(node.steps), list(node.shape)]
        if isinstance(node, Permute):
            return ["Permute", place_of(node.part), list(node.dims)]
        if isinstance(node, Reshape):
            return ["Reshape", place_of(node.part), list(node.shape)]
        if isinstance(node, Cast):
            return ["Cast", place_of(node.part), _name_of(node.dtype)]
        if isinstance(node, Instance):
            slots = list(map(place_of, node.slots))
            return ["Instance", place_of(node.pattern), slots, list(map(place_of, node.inputs))]
        if isinstance(node, Elementwise):
            function = _named(self._names.told_function(node.compute), node.operation)
            return ["Elementwise", node.operation, function, _name_of(node.dtype), *map(place_of, node.parts)]
        if isinstance(node, Held):
            return ["Held", _named(self._names.told_value(node), f"a value {node.origin}")]
        raise NotDataError(node.operation if isinstance(node, Computed) else type(node).__name__)


def _named(told: Any, what: str) -> Any:
    if told is None:
        raise NotDataError(what)
    return told


class Template:
    """A template that was read.

    Args:
        nodes: JSON, untrusted.
        names: of functions and values.

    Attributes:
        tensors: shape and dtype of each tensor that it takes.
        shape, dtype: of the expressions that are made of it.

    Raises:
        CheckpointError: it is malformed, or no operation on tensors gives such nodes.
    """

    def __init__(self, nodes: Any, names: Names) -> None:
        self.tensors: list[tuple[Shape, torch.dtype]] = []
        self._names = names
        self._samples: list[Expression] = []  # of each node, made of slots in place of tensors
        self._free: list[frozenset[int]] = []  # the slots that each node is made of, outside of instances
        self._depths: list[int] = []
        self._makes: list[Make | None] = []  # None for nodes without tensors, which all expressions share
        read: dict[str, Callable[..., tuple[Places, Make]]] = {  # no attribute: it refers to this template
            "Source": self._source,
            "Slot": self._slot,
            "Held": self._held,
            "Concat": self._concat,
            "Slice": self._slice,
            "Permute": self._permute,
            "Reshape": self._reshape,
            "Cast": self._cast,
            "Instance": self._instance,
            "Elementwise": self._elementwise,
        }
        try:
            for node in nodes:
                self._add(read, *node)
            if self._free[-1]:
                raise ValueError("a slot outside of its pattern")
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            raise CheckpointError(f"a template is malformed at node {len(self._samples)}: {error}") from error
        self.shape, self.dtype = self._samples[-1].shape, self._samples[-1].dtype

    def made(self, tensors: Sequence[Expression]) -> Expression:
        """Return the expression that has these tensors, which must be as `tensors` of the template says."""
        supply = iter(tensors)
        found: list[Expression] = []
        for sample, make in zip(self._samples, self._makes, strict=True):
            if make is None:
                found.append(sample)
            else:
                found.append(next(supply) if make is _take else make(found))
        return found[-1]

    def _add(self, read: Mapping[str, Callable[..., tuple[Places, Make]]], kind: str, *fields: Any) -> None:
        parts, make = read[kind](*fields)
        place = len(self._samples)
        self._depths.append(1 + max((self._depths[part] for part in parts), default=0))
        if self._depths[-1] > MAX_DEPTH:
            raise ValueError("an expression that is too deep")
        free = frozenset({place} if kind == "Slot" else ()).union(*(self._free[part] for part in parts))
        if kind == "Instance":
            pattern, slots, inputs = fields
            free = frozenset[int]().union(*(self._free[part] for part in inputs))
            if not self._free[pattern] <= set(slots):
                raise ValueError("a pattern with more slots than its instance")
        is_shared = make is not _take and all(self._makes[part] is None for part in parts)
        self._samples.append(Slot(*self.tensors[-1]) if make is _take else make(self._samples))
        self._free.append(free)
        self._makes.append(None if is_shared else make)

    def _part(self, place: Any) -> Expression:
        if type(place) is not int or not 0 <= place < len(self._samples):
            raise ValueError("a part that is not before its node")
        return self._samples[place]

    def _source(self, dtype: Any, shape: Any) -> tuple[Places, Make]:
        self.tensors.append((_shape(shape), _dtype(dtype)))
        return (), _take

    def _slot(self, dtype: Any, shape: Any) -> tuple[Places, Make]:
        slot = Slot(_shape(shape), _dtype(dtype))
        return (), lambda _: slot

    def _held(self, told: Any) -> tuple[Places, Make]:
        value = self._names.value(told)
        return (), lambda _: value

    def _concat(self, dim: Any, *places: Any) -> tuple[Places, Make]:
        parts = list(map(self._part, places))
        if type(dim) is not int or not 0 <= dim < len(parts[0].shape):
            raise ValueError("parts joined along a dimension that they have not")
        if len({(part.dtype, part.shape[:dim], part.shape[dim + 1 :]) for part in parts}) > 1:
            raise ValueError("parts joined that differ")
        whole = concat(parts, dim)
        _check_size(whole.shape)
        return places, lambda nodes: Concat(tuple([nodes[place] for place in places]), dim, whole.shape, whole.dtype)

    def _slice(self, place: Any, starts: Any, steps: Any, shape: Any) -> tuple[Places, Make]:
        part = self._part(place)
        first, each, sizes, dtype = _shape(starts), _shape(steps), _shape(shape), part.dtype
        for start, step, size, length in zip(first, each, sizes, part.shape, strict=True):
            if size and start + step * (size - 1) >= length:
                raise ValueError("a slice beyond its part")
        return (place,), lambda nodes: Slice(nodes[place], first, each, sizes, dtype)

    def _permute(self, place: Any, dims: Any) -> tuple[Places, Make]:
        part, order = self._part(place), _shape(dims)
        if sorted(order) != list(range(len(part.shape))):
            raise ValueError("dims that are no permutation")
        shape, dtype = tuple(part.shape[dim] for dim in order), part.dtype
        return (place,), lambda nodes: Permute(nodes[place], order, shape, dtype)

    def _reshape(self, place: Any, shape: Any) -> tuple[Places, Make]:
        part, sizes = self._part(place), _shape(shape)
        if math.prod(sizes) != math.prod(part.shape):
            raise ValueError("a shape of other elements than its part has")
        dtype = part.dtype
        return (place,), lambda nodes: Reshape(nodes[place], sizes, dtype)

    def _cast(self, place: Any, dtype_name: Any) -> tuple[Places, Make]:
        self._part(place)
        dtype = _dtype(dtype_name)
        return (place,), lambda nodes: Cast(nodes[place], dtype=dtype)

    def _instance(self, pattern: Any, slots: Any, inputs: Any) -> tuple[Places, Make]:
        self._part(pattern)
        for slot, given in zip(map(self._part, slots), map(self._part, inputs), strict=True):
            if not isinstance(slot, Slot) or (slot.shape, slot.dtype) != (given.shape, given.dtype):
                raise ValueError("a slot with something else in its place")

        if any(self._makes[slot] is not None for slot in slots):
            raise ValueError("a tensor as a slot")
        own = tuple(slot for slot in map(self._part, slots) if isinstance(slot, Slot))
        return (pattern, *inputs), lambda nodes: Instance(
            nodes[pattern], own, tuple([nodes[place] for place in inputs])
        )

    def _elementwise(self, operation: Any, told: Any, dtype_name: Any, *places: Any) -> tuple[Places, Make]:
        parts, dtype = list(map(self._part, places)), _dtype(dtype_name)
        function, shape = self._names.function(told, len(parts)), parts[0].shape
        if not isinstance(operation, str) or any(part.shape != shape for part in parts):
            raise ValueError("an operation on parts of several shapes")
        if function([torch.empty(0, dtype=part.dtype, device="cpu") for part in parts]).dtype != dtype:
            raise ValueError("an operation that gives another dtype")

        def make(nodes: Sequence[Expression]) -> Expression:
            return Elementwise(operation, function, tuple([nodes[place] for place in places]), shape, dtype)

        return places, make


def _take(_: Sequence[Expression]) -> Expression:
    """Stands for the next tensor."""
    raise TypeError("a tensor is given, not made")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError("a dtype that torch does not have")
    return found


def _shape(sizes: Any) -> Shape:
    if not isinstance(sizes, list) or not all(type(size) is int and 0 <= size <= MAX_SIZE for size in sizes):
        raise ValueError("no list of sizes")
    _check_size(sizes)
    return tuple(sizes)


def _check_size(sizes: Sequence[int]) -> None:
    if len(sizes) > MAX_DIMS or math.prod(sizes) > MAX_SIZE:
        raise ValueError("a shape that is too large")
