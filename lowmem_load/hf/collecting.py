"""How transformers collects the tensors of a checkpoint while a model is described. Part of the transformers seam.

transformers' loader deep-copies a converter for each tensor and uses one copy for each target. Threads make the tensors
of all targets at a time. Here an unused copy is handed out again, and a tensor is made when it is converted. The jobs
that make tensors and the keys that sort their names take less memory.

DeepSeek-V3 in fp8 has 92,000 tensors. Rank 517 of 1024 takes 7 CPU seconds and 65 MiB to describe and plan it. Without
the first change it takes twice the time; without the second 280 MiB, without small jobs 94, without shared keys 137.

Source: transformers 5.0 to 5.23 `core_model_loading.py`, `convert_and_load_state_dict_in_model` (which has `deepcopy`
from `copy`) and `WeightTransform.materialize_tensors`. 4.x has no such module.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from lowmem_load.hf.replaced import Handler, Replacement

MODULE = "transformers.core_model_loading"


def described_collecting() -> list[Replacement]:
    """Return the replacements with which transformers copies converters once for each target and uses no threads."""
    loading: Any = importlib.import_module(MODULE) if importlib.util.find_spec(MODULE) else None
    replacements: list[Replacement] = []
    if hasattr(loading, "deepcopy") and hasattr(loading, "WeightConverter"):
        replacements.append((loading, "deepcopy", _once_for_each_use(loading)))
    if hasattr(loading, "spawn_materialize") and hasattr(loading, "_materialize_copy"):
        replacements.append((loading, "spawn_materialize", _without_threads(loading)))
    if hasattr(loading, "dot_natural_key") and _sorts_by_parts(loading.dot_natural_key):
        replacements.append((loading, "dot_natural_key", _shared_key()))
    return replacements


def _once_for_each_use(loading: Any) -> Handler:
    """Return a `deepcopy` that hands out the latest copy of a converter again as long as that has collected nothing."""
    latest: dict[int, tuple[Any, Any]] = {}

    def deepcopy(ordinary: Callable[..., Any], value: Any, *args: Any) -> Any:
        if args or not isinstance(value, loading.WeightConverter):
            return ordinary(value, *args)
        original, copied = latest.get(id(value), (None, None))
        if original is not value or copied.collected_tensors:
            copied = ordinary(value)
            latest[id(value)] = value, copied
        return copied

    return deepcopy


class _Job:
    """Makes a tensor when transformers asks for it. A closure, as transformers makes, takes three times the memory."""

    __slots__ = ("_copy", "_device", "_dtype", "_tensor")

    def __init__(self, copy: Callable[..., Any], tensor: Any, device: Any, dtype: Any) -> None:
        self._copy, self._tensor, self._device, self._dtype = copy, tensor, device, dtype

    def __call__(self) -> Any:
        return self._copy(self._tensor, self._device, self._dtype)


def _without_threads(loading: Any) -> Handler:
    """Return a `spawn_materialize` that makes a `_Job`; a tensor that is also sharded goes to transformers' own."""

    def spawn(ordinary: Handler, pool: Any, tensor: Any, device: Any = None, dtype: Any = None, **others: Any) -> Any:
        if others.get("sharding_op") is not None or not others.keys() <= {"sharding_op", "tensor_idx"}:
            return ordinary(pool, tensor, device, dtype, **others)
        return _Job(loading._materialize_copy, tensor, device, dtype)

    return spawn


def _sorts_by_parts(key: Callable[[str], list[Any]]) -> bool:
    parts = ("layers", "12", "w_3")
    return key(".".join(parts)) == [key(part)[0] for part in parts]


def _shared_key() -> Handler:
    """Return a `dot_natural_key` whose keys share what they have of equal parts of names."""

    @functools.cache
    def key_of(ordinary: Callable[[str], list[Any]], part: str) -> Any:
        return ordinary(part)[0]

    return lambda ordinary, name: tuple(key_of(ordinary, part) for part in name.split("."))
