"""Operations on each element by itself: what expressions compute by. Those of a short list can be told as data."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from lowmem_load.describe.arguments import Template

aten = torch.ops.aten

_TOLD = {str(each): each for each in (aten.mul.Tensor, aten.sub.Tensor, aten.exp2.default)}
"""What dequantizing fp8 weights takes, by the name that torch prints: these and no others are made of data."""

_MAX_KNOWN = 1024
_KNOWN: dict[str, Pointwise] = {}
"""Those that were told, by what was: equal ones are one object, as a plan counts them. They hold no tensors."""


class Pointwise:
    """A call of an operation, with the same range of each of its tensors in their places.

    Args:
        func: the operation.
        call: its arguments, (args, kwargs).
        casts: dtypes that each tensor is cast to first, in order.
    """

    __slots__ = ("_call", "_casts", "_func")

    def __init__(self, func: Any, call: Template, casts: Sequence[Sequence[torch.dtype]]) -> None:
        self._func, self._call, self._casts = func, call, casts

    def __call__(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the range of the result."""
        args, kwargs = self._call.filled(map(_cast, values, self._casts))
        result: torch.Tensor = self._func(*args, **kwargs)
        return result

    def told(self) -> list[Any] | None:
        """Return what `pointwise_of` makes an equal one of, as JSON; None for one that is not in its list.

        The name, then the arguments: a number, or for a tensor the names of the dtypes to which it is cast.
        """
        args, kwargs = self._call.filled([str(dtype).removeprefix("torch.") for dtype in each] for each in self._casts)
        name = str(self._func)
        is_told = _TOLD.get(name) is self._func and not kwargs and all(map(_is_argument, args))
        return [name, *args] if is_told else None


def pointwise(func: Any, call: Template, casts: Sequence[Sequence[torch.dtype]]) -> Pointwise:
    """Return an operation with its arguments, as of `Pointwise`; one that can be told is always the same object."""
    made = Pointwise(func, call, casts)
    told = made.told()
    return made if told is None else _known(told, made)


def pointwise_of(told: Any, num_tensors: int) -> Pointwise:
    """Return the operation that was told; it takes that many tensors.

    Raises:
        ValueError: there is none.
    """
    if not isinstance(told, list) or not told or not isinstance(told[0], str) or told[0] not in _TOLD:
        raise ValueError("an operation that is not in the list")
    name, *args = told
    casts = [
        [getattr(torch, dtype) for dtype in each] for each in args if isinstance(each, list) and _is_argument(each)
    ]
    if not all(map(_is_argument, args)) or len(casts) != num_tensors:
        raise ValueError(f"{name} with other arguments than {num_tensors} tensors and numbers")
    stand_in = torch.empty(0, device="meta")
    tree: Any = (tuple(stand_in if isinstance(each, list) else each for each in args), {})
    return _known(told, Pointwise(_TOLD[name], Template(tree), casts))


def _cast(value: torch.Tensor, dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    for dtype in dtypes:
        value = value.to(dtype)
    return value


def _known(told: list[Any], made: Pointwise) -> Pointwise:
    if len(_KNOWN) >= _MAX_KNOWN:
        _KNOWN.clear()
    return _KNOWN.setdefault(json.dumps(told), made)


def _is_argument(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(name, str) and isinstance(getattr(torch, name, None), torch.dtype) for name in value)
    return type(value) in (int, float) and math.isfinite(value)
