"""Reads pickles that hold any objects, as a tree of plain values: what is none of them is named and never made.

Checkpoints of training jobs hold dicts, numbers and tensors, and among them objects of DeepSpeed's or the user's own.
In the tree these are `Foreign`: the name of the class or function that the pickle would call, and what it would be
given. See [Note: inert unpickling] in `inert_pickle.py`.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lowmem_load.errors import CheckpointError, listed
from lowmem_load.formats.inert_pickle import Dialect, described
from lowmem_load.formats.pickled_tensor import CALLS, Global, OrderedNames, Tensor, is_key


@dataclass(eq=False, slots=True)
class Foreign:
    """An object that is not made: what the pickle would call, with which arguments, and the state that it would get."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


def objects(pickled: bytes, path: str) -> Any:
    """Return the tree that a pickle describes: dicts, lists, tuples, numbers, text, dtypes, `Tensor`s and `Foreign`s.

    Raises:
        CheckpointError: the pickle is malformed.
    """
    return described(pickled, path, _AnyObject())


class _AnyObject(Dialect):
    opcodes = frozenset({"NEWOBJ"})

    def unknown(self, name: str, path: str) -> Any:  # noqa: ARG002
        return Global(name)

    def result(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        if not isinstance(function, Global):
            raise TypeError(f"a {type(function).__name__} is called")
        if function.name == "torch._tensor._rebuild_from_type_v2":  # of a tensor that somebody has given attributes
            function, _, arguments, state = arguments
            made = super().result(function, arguments)
            return replace(made, attributes=state) if isinstance(made, Tensor) and isinstance(state, dict) else made
        return super().result(function, arguments) if function.name in CALLS else Foreign(function.name, arguments)

    def set_attributes(self, owner: Any, attributes: Any) -> None:
        if isinstance(owner, Foreign):
            owner.state = attributes
        else:
            super().set_attributes(owner, attributes)

    def drops_items(self, owner: Any) -> bool:
        return isinstance(owner, Foreign)


def member(value: Any, names: Mapping[str, Any]) -> Any:
    """Return the value of an enumeration's member, or `value` where it is none that is known.

    Python 3.11.2, of Debian 12, pickles it as `getattr` of the class and its name; 3.11.7 and others as the class
    called with its value (`enum.py`, `__reduce_ex__`).

    Args:
        value: of a tree.
        names: values of the members by name.
    """
    match value:
        case Foreign("__builtin__.getattr" | "builtins.getattr", (Global(), str(name))):
            return names.get(name, value)
        case Foreign(_, (number,)):
            return number
    return value


def shown(value: Any) -> str:
    """Return a value of a tree for a message. Of a container all that it holds would be spelled, which may not end."""
    if isinstance(value, str):
        return repr(value[:80])  # one long text may be in many places
    return f"{value!r:.80}" if isinstance(value, int | float | None) else f"a {type(value).__name__}"


def plain(tree: Any, where: str, tensor: Callable[[Tensor, str], torch.Tensor]) -> Any:
    """Return a part of a tree as Python objects: numbers, text, containers, tensors, numpy's numbers and arrays.

    Args:
        tree: the part.
        where: what it is, for messages: "client_state".
        tensor: reads a tensor; is told where in the tree it is.

    Raises:
        CheckpointError: it holds objects of other classes; names where and which.
    """
    making = _Plain(tensor)
    try:
        made = making(tree, where)
    except RecursionError as error:
        raise CheckpointError(f"{where} is nested too deeply") from error
    if making.foreign:
        raise CheckpointError(
            f"{where} holds objects that only their own code can make: {listed(making.foreign)}; nothing was run"
        )
    return made


class _Plain:
    """Makes Python objects of a tree, each once; notes what cannot be made."""

    def __init__(self, tensor: Callable[[Tensor, str], torch.Tensor]) -> None:
        self.foreign: list[str] = []
        self._tensor = tensor
        self._made: dict[int, Any] = {}  # a pickle may hold one object many times

    def __call__(self, value: Any, where: str) -> Any:
        if not isinstance(value, dict | list | tuple | Tensor | Foreign | Global):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self._make(value, where)
        return self._made[id(value)]

    def _make(self, value: Any, where: str) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, dict):
            made = {key: self(item, f"{where}[{shown(key)}]") for key, item in value.items()}
            return collections.OrderedDict(made) if isinstance(value, OrderedNames) else made
        if isinstance(value, list | tuple):
            return type(value)(self(item, f"{where}[{number}]") for number, item in enumerate(value))
        name = value.name.replace("__builtin__.", "builtins.").replace("numpy._core", "numpy.core")
        make = _MAKERS.get(name) if isinstance(value, Foreign) else None
        try:
            if make is not None:
                # A numpy array is rebuilt from its state alone; its arguments name its class.
                arguments = () if make is _numpy_array else self(value.arguments, where)
                return make(arguments, self(value.state, where))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(f"{where} is a malformed {name:.80}: {error}") from error
        self.foreign.append(f"{where} ({value.name:.200})")
        return None


# -- what can be made of plain arguments -----------------------------------------------------------------------------


def _numpy_dtype(arguments: tuple[Any, ...], state: Any) -> np.dtype[Any]:
    if not re.fullmatch(r"[biufc]\d{1,2}", arguments[0]):
        raise ValueError(f"dtype {arguments[0]!r}")
    made: np.dtype[Any] = np.dtype((">" if state is not None and state[1] == ">" else "<") + arguments[0])
    return made


def _numpy_number(arguments: tuple[Any, ...], _: Any) -> Any:
    dtype, content = arguments
    (number,) = np.frombuffer(content, dtype)
    return number


def _numpy_array(_: tuple[Any, ...], state: Any) -> np.ndarray[Any, Any]:
    _, shape, dtype, is_fortran, content = state
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"{len(content)} bytes for shape {shape}")
    made: np.ndarray[Any, Any] = np.frombuffer(content, dtype).copy().reshape(shape, order="F" if is_fortran else "C")
    return made


def _encoded(arguments: tuple[Any, ...], _: Any) -> bytes:
    text, encoding = arguments
    if encoding != "latin1":
        raise ValueError(f"encoding {encoding!r}")
    return bytes(text.encode("latin1"))


def _set_of(kind: Callable[[Iterable[Any]], Any]) -> Callable[[tuple[Any, ...], Any], Any]:
    def make(arguments: tuple[Any, ...], _: Any) -> Any:
        items = arguments[0] if arguments else []
        if not all(isinstance(item, str | bytes) or is_key(item) for item in items):
            raise ValueError("a set of something else than text and numbers")
        return kind(items)

    return make


def _counter(arguments: tuple[Any, ...], _: Any) -> collections.Counter[Any]:
    return collections.Counter(*arguments)  # of a dict, whose keys were checked


_MAKERS: Mapping[str, Callable[[tuple[Any, ...], Any], Any]] = {
    "_codecs.encode": _encoded,
    "builtins.set": _set_of(set),
    "builtins.frozenset": _set_of(frozenset),
    "collections.Counter": _counter,
    "numpy.dtype": _numpy_dtype,
    "numpy.core.multiarray.scalar": _numpy_number,
    "numpy.core.multiarray._reconstruct": _numpy_array,
}
"""By name, as pickle protocol 2 spells it: values that are plain, but for which a pickle has no opcode."""
