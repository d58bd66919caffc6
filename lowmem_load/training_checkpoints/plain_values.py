"""Makes Python's values of a part of a pickle's tree: what a client or an lr scheduler has put into a checkpoint.

The pickle is untrusted, and nothing that it names is called: each object that is made is of a class in this module, and
what it is made of is checked first. Memory is bounded by the bytes of the file, because a short pickle can have many
sets of one long list. An object stays one object: containers, and tensors with one storage, are shared as they were.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from lowmem_load.errors import CheckpointError
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import read_whole
from lowmem_load.files.inert_pickle import (
    PARAMETER,
    TENSOR,
    Foreign,
    Global,
    OrderedNames,
    Tensor,
    is_key,
    is_shape,
    shown,
)
from lowmem_load.files.torch_zip import TorchObjects, describe_objects

MAX_DEPTH = 100
"""Containers within each other. One that contains itself has more."""

MADE_BYTES_PER_BYTE, FREE_BYTES = 16, 4 << 20
"""Bound on the memory of what is made, without elements of tensors, by the bytes of the file."""

_OVERHEAD = 600
"""Bytes that an object takes in addition to its items, with its place among those that were made."""

_CODES = {code: np.dtype(code) for code in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")}
_CODES |= {code: np.dtype(code) for code in ("c8", "c16")}
"""Dtypes of numpy's numbers as pickles spell them."""


class NeedsCodeError(Exception):
    """An object that only code of other packages can create."""


class PlainValues:
    """Makes values of the tree of one file: numbers, text, containers, tensors and devices of torch, arrays of numpy.

    `torch.Size` becomes a tuple. The executor reads the elements of tensors; without one, these are on the meta device.
    """

    def __init__(self, file: TorchObjects, executor: Executor | None) -> None:
        self._file, self._executor = file, executor
        self._room = FREE_BYTES + MADE_BYTES_PER_BYTE * file.nbytes
        self._made: dict[int, Any] = {}  # by id of the object in the tree
        self._storages: dict[int, torch.Tensor] = {}  # all bytes, by the first one's place in the file

    def value(self, saved: Any, depth: int = 0) -> Any:
        """Return the value of a part of the tree. Raise NeedsCodeError if only code of its own can create it."""
        if isinstance(saved, str | int | float | torch.dtype | None):
            return saved
        if id(saved) not in self._made:
            if depth == MAX_DEPTH:
                raise NeedsCodeError(f"containers more than {MAX_DEPTH} deep, or in themselves")
            self._take(sys.getsizeof(saved) + _OVERHEAD)
            self._made[id(saved)] = self._make(saved, depth + 1)
        return self._made[id(saved)]

    def _take(self, nbytes: int) -> None:
        self._room -= nbytes
        if self._room < 0:
            raise NeedsCodeError(f"more objects than {self._file.nbytes} bytes explain")

    def _make(self, saved: Any, depth: int) -> Any:
        match saved:
            case OrderedNames():
                ordered = OrderedDict(self._items(saved, depth))
                if saved.attributes is not None and saved.attributes.keys() != {"_metadata"}:
                    raise NeedsCodeError("an OrderedDict with attributes")
                vars(ordered).update(self.value(saved.attributes, depth) or {})
                return ordered
            case dict():
                return self._items(saved, depth)
            case list():
                return [self.value(item, depth) for item in saved]
            case tuple():
                return tuple([self.value(item, depth) for item in saved])
            case Tensor():
                return self._tensor(saved)
            case Foreign(state=None) if call := _CALLS.get(saved.name.replace("__builtin__.", "builtins.")):
                function, num_needed, kinds = call
                arguments = [self.value(argument, depth) for argument in saved.arguments]
                self._take(sum(map(sys.getsizeof, arguments)))  # also the time that it takes
                try:
                    if not num_needed <= len(arguments) <= len(kinds) or not all(map(isinstance, arguments, kinds)):
                        raise TypeError("is called with other arguments than expected")
                    made = function(*arguments)
                except (TypeError, ValueError, RuntimeError) as error:
                    raise NeedsCodeError(f"{saved.name:.200}: {error!s:.200}") from error
                self._take(sys.getsizeof(made))
                return made
        for made in (numpy_number(saved), _numpy_dtype(saved), self._array(saved, depth)):
            if made is not None:
                return made
        raise NeedsCodeError(saved.name[:200] if isinstance(saved, Foreign | Global) else shown(saved))

    def _items(self, saved: Mapping[Any, Any], depth: int) -> dict[Any, Any]:
        return {_key(self.value(key, depth)): self.value(item, depth) for key, item in saved.items()}

    def _array(self, saved: Any, depth: int) -> np.ndarray[Any, Any] | None:
        """Return an array of numpy that has numbers; None for any other object."""
        match saved:
            case Foreign(
                name="numpy.core.multiarray._reconstruct" | "numpy._core.multiarray._reconstruct",
                arguments=(Global(name="numpy.ndarray"), *_),
                state=(1, tuple(shape), dtype, bool(is_fortran), Foreign() as stored),
            ) if is_shape(shape) and (of := _numpy_dtype(dtype)) is not None:
                content = self.value(stored, depth)
                if isinstance(content, bytes) and len(content) == math.prod(shape) * of.itemsize:
                    self._take(len(content))
                    with contextlib.suppress(ValueError):  # more dims than this numpy has, or sizes next to a 0
                        return np.ndarray(shape, of, content, order="F" if is_fortran else "C").copy("K")
        return None

    def _tensor(self, saved: Tensor) -> torch.Tensor:
        if saved.kind not in (TENSOR, PARAMETER) or saved.attributes:
            raise NeedsCodeError(f"a {saved.kind:.200} with attributes, or of a class of its own")
        storage = self._file.storage(saved, "of the client state")
        if storage.start not in self._storages:
            unread = torch.empty(storage.shape, dtype=torch.uint8, device="meta")
            self._storages[storage.start] = read_whole(self._executor, storage) if self._executor else unread
        content = self._storages[storage.start].untyped_storage()
        values = torch.empty(0, dtype=saved.dtype, device=content.device)
        values.set_(content, saved.offset, saved.size, saved.strides)
        if saved.requires_grad and not (saved.dtype.is_floating_point or saved.dtype.is_complex):
            raise NeedsCodeError(f"a tensor of {saved.dtype} with a gradient")
        if saved.kind == PARAMETER:
            return torch.nn.Parameter(values, saved.requires_grad)
        return values.requires_grad_(saved.requires_grad)


def read_plain(path: str, *, with_elements: bool = True) -> Any:
    """Return the content of a torch file, in host memory; without elements, tensors are on the meta device.

    Raises CheckpointError if it is malformed, or has objects that only their own code can create.
    """
    with Executor() as executor:
        file = describe_objects(executor.sources.opened(path))
        try:
            return PlainValues(file, executor if with_elements else None).value(file.tree)
        except NeedsCodeError as error:
            raise CheckpointError(f"{path}: has objects that only their own code can create: {error}") from error


def _numpy_dtype(saved: Any) -> np.dtype[Any] | None:
    """Return a dtype of numpy, of numbers in this machine's order of bytes; None for any other object."""
    match saved:
        case Foreign(name="numpy.dtype", arguments=(str(code), *_), state=(3, "<" | "|", None, None, None, -1, -1, 0)):
            return _CODES.get(code)
    return None


def numpy_number(saved: Any) -> Any:
    """Return a number of numpy; None for any other object of the tree."""
    match saved:
        case Foreign(
            name="numpy.core.multiarray.scalar" | "numpy._core.multiarray.scalar",
            arguments=(dtype, Foreign(name="_codecs.encode", arguments=(str(text), "latin1"))),
        ) if (of := _numpy_dtype(dtype)) is not None and len(text) == of.itemsize:
            return np.frombuffer(text.encode("latin1", "replace"), of)[0]
    return None


def _key(value: Any) -> Any:
    """Return what may be hashed: other values may take for ever, or overflow the stack."""
    if not is_key(value) and not isinstance(value, float | bytes | np.bool_ | np.integer | np.floating | None):
        raise NeedsCodeError(f"{shown(value)} as a key, or in a set")
    return value


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError(f"{encoding:.80} instead of latin1")
    return text.encode("latin1")


_CALLS: Mapping[str, tuple[Callable[..., Any], int, tuple[type, ...]]] = {
    "builtins.bytes": (bytes, 0, ()),
    "_codecs.encode": (_latin1, 2, (str, str)),
    "builtins.bytearray": (bytearray, 0, (bytes,)),
    "builtins.set": (lambda items: set(map(_key, items)), 1, (list,)),
    "collections.Counter": (Counter, 1, (dict,)),
    "builtins.complex": (complex, 2, (float, float)),
    "torch.device": (torch.device, 1, (str, int)),
}
"""Functions that pickles call, how many arguments they need, and the types of all that they may be given."""
