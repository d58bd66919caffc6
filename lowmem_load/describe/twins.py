"""What a call returns on meta tensors: shapes, strides and dtypes. Asked of torch once for each kind of call.

Experts have equal shapes, so that tens of thousands of calls are of some dozens of kinds; torch's kernels for meta
tensors are written in Python for the most part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lowmem_load.describe.arguments import tree_map

MAX_KINDS = 4096
"""Of calls that are remembered at a time: far more than any model has."""

Kind = tuple[Any, ...]


class Twins:
    """Meta tensors: of tensors in files and of the results of calls. They are shared, so nobody may write into them."""

    def __init__(self) -> None:
        self._known: dict[Kind, Any] = {}

    def of(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous one."""
        kind = (shape, dtype)
        found: torch.Tensor | None = self._known.get(kind)
        if found is None:
            found = torch.empty(shape, dtype=dtype, device="meta")
            if type(found) is torch.Tensor and found.dtype == dtype:  # else somebody has replaced torch.empty for now
                self._remember(kind, found)
        return found

    def of_call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what a call gives on meta tensors; in whatever error it ends there."""
        named = {name: value for name, value in kwargs.items() if name != "device"}
        kind = (func, *map(_kind, args), *((name, _kind(value)) for name, value in named.items()))
        found = self._known.get(kind)
        if found is None:
            found = self._remember(kind, func(*tree_map(_twin, args), **tree_map(_twin, named)))
        return found

    def _remember(self, kind: Kind, found: Any) -> Any:
        if len(self._known) >= MAX_KINDS:
            self._known.clear()
        self._known[kind] = found
        return found


def _kind(value: Any) -> Any:
    """Return what a call on meta tensors sees of an argument. 1, 1.0 and True are equal, and not the same."""
    if isinstance(value, torch.Tensor):
        twin = getattr(value, "twin", value)
        return twin.shape, twin.stride(), twin.dtype
    if isinstance(value, tuple | list):
        return tuple([_kind(item) for item in value])
    return type(value), value


def _twin(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    twin: torch.Tensor | None = getattr(value, "twin", None)
    return value.to("meta") if twin is None else twin
