"""What the pickle of a torch file says about tensors: descriptions, and the calls that it makes of them.

Nothing here is ever looked up by a name that a pickle gives but in these tables. See [Note: inert unpickling] in
`inert_pickle.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lowmem_load.planning.expression import Shape

MAX_DIMS = 64
"""Dims of a tensor, the limit of numpy; a pickle may name one long tuple many times at no cost to itself."""

STORAGE_DTYPES: Mapping[str, torch.dtype] = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.storage.UntypedStorage": torch.uint8,
}
"""The legacy storage types. Newer dtypes (float8, uint16, ...) have an UntypedStorage and are named beside it."""

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype): dtype
    for dtype in (
        *STORAGE_DTYPES.values(),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        *((torch.float8_e8m0fnu,) if hasattr(torch, "float8_e8m0fnu") else ()),  # from torch 2.7 on
        *(torch.uint16, torch.uint32, torch.uint64),
    )
}


@dataclass(frozen=True, slots=True)
class Global:
    """The dotted name of a function or class; never the thing itself. See [Note: inert unpickling]."""

    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """A persistent id: the entry `data/<key>` holds `numel` elements of `dtype`."""

    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A view of a storage; offset and strides are in elements of `dtype`; attributes that somebody has given it."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    size: Shape
    strides: Shape
    attributes: Mapping[str, Any] = field(default_factory=dict, compare=False)


class OrderedNames(dict[Any, Any]):
    """Stands in for `collections.OrderedDict`, which alone can be given attributes."""

    def __init__(self) -> None:
        super().__init__()


def is_size(value: object) -> bool:
    """Return whether it may be a number of elements."""
    return type(value) is int and 0 <= value < 1 << 60


def is_key(value: object) -> bool:
    """Return whether a dict may have this key: of larger integers any number can have one hash."""
    return isinstance(value, str) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 63)


def _shape(value: object) -> Shape:
    if not isinstance(value, tuple) or len(value) > MAX_DIMS or not all(is_size(size) for size in value):
        raise TypeError(f"sizes or strides are not a tuple of at most {MAX_DIMS} sizes")
    return value


# Each takes a bounded number of arguments: one long tuple can be passed many times at no cost to the pickle.


def _tensor(
    storage: Any, offset: Any, size: Any, strides: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> Tensor:
    """Stand in for `torch._utils._rebuild_tensor_v2`."""
    dtype = getattr(storage, "dtype", None)
    return _tensor_of_dtype(storage, offset, size, strides, requires_grad, hooks, dtype, metadata)


def _tensor_of_dtype(
    storage: Any,
    offset: Any,
    size: Any,
    strides: Any,
    requires_grad: Any,
    _hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> Tensor:
    """Stand in for `torch._utils._rebuild_tensor_v3`."""
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype) or not is_size(offset):
        raise TypeError("a tensor without storage, dtype or offset")
    _check_flag(requires_grad)
    if metadata:
        raise ValueError("a tensor is saved as lazily conjugated or negated; call resolve_conj().resolve_neg() on it")
    if len(_shape(size)) != len(_shape(strides)):
        raise ValueError(f"a tensor has {len(size)} sizes and {len(strides)} strides")
    return Tensor(storage, dtype, offset, size, strides)


def _parameter(data: Any, requires_grad: Any, _hooks: Any) -> Any:
    """Stand in for `torch._utils._rebuild_parameter`: only the tensor matters."""
    _check_flag(requires_grad)
    return data


def _parameter_with_state(data: Any, requires_grad: Any, hooks: Any, _state: Any) -> Any:
    """Stand in for `torch._utils._rebuild_parameter_with_state`: only the tensor matters."""
    return _parameter(data, requires_grad, hooks)


def _check_flag(requires_grad: object) -> None:
    if not isinstance(requires_grad, bool):
        raise TypeError("a tensor whose requires_grad is neither true nor false")


def _device(_type: Any, _index: Any = None) -> None:
    """Stand in for `torch.device`: where a tensor was does not matter."""


CALLS: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": OrderedNames,
    "torch.Size": _shape,
    "torch.device": _device,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter_with_state,
}
