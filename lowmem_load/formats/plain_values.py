"""Creates plain values from a tree of `inert_pickle`: containers, text, sets, and what numpy pickles."""

from __future__ import annotations

import collections
import contextlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from lowmem_load.errors import CheckpointError, listed
from lowmem_load.formats.inert_pickle import Foreign, Global, OrderedNames, Tensor, is_key

MAX_PLAIN_NBYTES = 1 << 30
"""Bytes of the sets and arrays that `plain` creates. In a short pickle, many of them may share one long list."""


def member(value: Any, names: Mapping[str, Any]) -> Any:
    """Return the value of an enum member, given the values by name; or `value` itself if it is no known member."""
    match value:
        case Foreign("__builtin__.getattr" | "builtins.getattr", (Global(), str(name))):
            return names.get(name, value)
        case Foreign(_, (number,)):
            return number
    return value


def shown(value: Any) -> str:
    """Return a value of a tree for a message. A container is only named: spelling it out may never end."""
    if isinstance(value, str):
        return repr(value[:80])  # many places may share one long text
    return f"{value!r:.80}" if isinstance(value, int | float | None) else f"a {type(value).__name__}"


def plain(tree: Any, where: str, tensor: Callable[[Tensor, str], torch.Tensor]) -> Any:
    """Return a part of a tree, `where` in messages, as Python objects. `tensor` reads a tensor at a place."""
    maker = _Maker(tensor)
    try:
        made = maker.make(tree, where)
    except RecursionError as error:
        raise CheckpointError(f"{where} is nested too deeply") from error
    if maker.foreign:
        raise CheckpointError(
            f"{where} holds objects that only their own code can create: {listed(maker.foreign)}; nothing was run"
        )
    return made


class _Maker:
    def __init__(self, tensor: Callable[[Tensor, str], torch.Tensor]) -> None:
        self.foreign: list[str] = []
        self._tensor, self._nbytes = tensor, 0
        self._made: dict[int, Any] = {}  # by id: the tree may hold an object many times

    def make(self, value: Any, where: str) -> Any:
        if id(value) in self._made:
            return self._made[id(value)]
        made: Any
        match value:
            case Tensor():
                made = self._tensor(value, where)
            case dict():
                kind = collections.OrderedDict if isinstance(value, OrderedNames) else dict
                made = kind((key, self.make(item, f"{where}[{shown(key)}]")) for key, item in value.items())
            case list() | tuple():
                made = type(value)(self.make(item, f"{where}[{number}]") for number, item in enumerate(value))
            case Foreign() | Global():
                made = self._object(value, where)
            case _:
                return value
        self._made[id(value)] = made
        return made

    def _object(self, value: Foreign | Global, where: str) -> Any:
        made, name = None, value.name.replace("__builtin__.", "builtins.").replace("numpy._core", "numpy.core")
        if isinstance(value, Foreign) and name in _PLAIN:
            # The arguments of numpy's _reconstruct only name the class. The state holds the array.
            arguments = None if name.endswith("._reconstruct") else self.make(value.arguments, where)
            state = self.make(value.state, where)
            with contextlib.suppress(ArithmeticError, TypeError, ValueError):  # a malformed object counts as foreign
                made = _plain_object(name, arguments, state)
        if made is None:
            self.foreign.append(f"{where} ({value.name:.200})")
        self._nbytes += sys.getsizeof(made)
        if self._nbytes > MAX_PLAIN_NBYTES:
            raise CheckpointError(f"{where}: the sets and arrays up to here take more than {MAX_PLAIN_NBYTES} bytes")
        return made


_PLAIN = {
    *("_codecs.encode", "builtins.set", "builtins.frozenset", "collections.Counter", "numpy.dtype"),
    *("numpy.core.multiarray.scalar", "numpy.core.multiarray._reconstruct"),
}
"""Functions that create plain values for which pickle protocol 2 has no opcode."""


def _plain_object(name: str, arguments: Any, state: Any) -> Any:
    match name, arguments, state:
        case "_codecs.encode", (str(text), "latin1"), None:
            return text.encode("latin1")
        case "builtins.set" | "builtins.frozenset", (list(items),), None:
            if all(isinstance(item, bytes) or is_key(item) for item in items):
                return set(items) if name == "builtins.set" else frozenset(items)
        case "collections.Counter", (dict(counts),), _:
            return collections.Counter(counts)
        case "numpy.dtype", (str(kind), *_), (_, "<" | ">" | "|" as order, *_):
            return np.dtype(order + kind) if re.fullmatch(r"[biufc]\d{1,2}", kind) else None
        case "numpy.core.multiarray.scalar", (np.dtype() as dtype, bytes(content)), None:
            (number,) = np.frombuffer(content, dtype)
            return number
        case "numpy.core.multiarray._reconstruct", _, (_, shape, np.dtype() as dtype, is_fortran, bytes(content)):
            return np.frombuffer(content, dtype).copy().reshape(shape, order="F" if is_fortran else "C")
    return None
