"""How transformers collects the tensors of a checkpoint while a model is described. Part of the transformers seam.

Its loader makes a deep copy of a converter for every tensor and keeps the first of each target's; threads materialize
the tensors. Where nothing is read, that is most of what describing a large model costs, and the tensors of all targets
are there at a time. So a copy that was dropped is handed out again, and tensors are made when they are converted. What
the loader keeps of each tensor until then, and to sort their names, is kept in less memory: of a hundred thousand
tensors it took 130 MiB.

Source: transformers 5.0 to 5.23 `core_model_loading.py`, `convert_and_load_state_dict_in_model` (which has two of the
names from `copy` and `concurrent.futures`) and `WeightTransform.materialize_tensors`. 4.x has no such module.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lowmem_load.hf.replaced import replaced

MODULE = "transformers.core_model_loading"


@contextlib.contextmanager
def described_collecting() -> Iterator[None]:
    """Inside, converters are copied once for each target, nothing is done in threads."""
    loading = importlib.import_module(MODULE) if importlib.util.find_spec(MODULE) else None
    with contextlib.ExitStack() as stack:
        if hasattr(loading, "deepcopy") and hasattr(loading, "WeightConverter"):
            stack.enter_context(replaced(loading, "deepcopy", _once_for_each_use(loading)))
        if hasattr(loading, "ThreadPoolExecutor"):
            stack.enter_context(replaced(loading, "ThreadPoolExecutor", _Deferring))
        if hasattr(loading, "spawn_materialize") and hasattr(loading, "_materialize_copy"):
            stack.enter_context(replaced(loading, "spawn_materialize", _spawned_small(loading)))
        if loading is not None and hasattr(loading, "dot_natural_key"):
            stack.enter_context(replaced(loading, "dot_natural_key", _shared_key(loading.dot_natural_key)))
        yield


def _once_for_each_use(loading: Any) -> Callable[[Any], Any]:
    """Return a `deepcopy` that hands out the latest copy of a converter again as long as that has collected nothing."""
    ordinary = loading.deepcopy
    latest: dict[int, tuple[Any, Any]] = {}

    def deepcopy(value: Any, *args: Any) -> Any:
        if args or not isinstance(value, loading.WeightConverter):
            return ordinary(value, *args)
        original, copied = latest.get(id(value), (None, None))
        if original is not value or copied.collected_tensors:
            copied = ordinary(value)
            latest[id(value)] = value, copied
        return copied

    return deepcopy


class _Deferring:
    """Stands in for an executor: gives a job back, which the loader calls where it is not given a future."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, job: Callable[[], Any]) -> Callable[[], Any]:
        return job

    def shutdown(self, **_: Any) -> None:
        pass


class _Job:
    """A tensor that is made when it is asked for: what a closure of transformers' does, in an eighth of its memory."""

    __slots__ = ("_copy", "_tensor")

    def __init__(self, tensor: Any, copy: Callable[[Any], Any]) -> None:
        self._tensor, self._copy = tensor, copy

    def __call__(self) -> Any:
        return self._copy(self._tensor)


def _spawned_small(loading: Any) -> Callable[..., Any]:
    """Return a `spawn_materialize` that makes small jobs; those that shard, too, are made as ever."""
    ordinary = loading.spawn_materialize

    @functools.cache
    def copying(device: Any, dtype: Any) -> Callable[[Any], Any]:
        return lambda tensor: loading._materialize_copy(tensor, device, dtype)

    def spawn(pool: Any, tensor: Any, device: Any = None, dtype: Any = None, **others: Any) -> Any:
        if others.get("sharding_op") is not None or not others.keys() <= {"sharding_op", "tensor_idx"}:
            return ordinary(pool, tensor, device, dtype, **others)
        return _Job(tensor, copying(device, dtype))

    return spawn


def _shared_key(ordinary: Callable[[str], list[Any]]) -> Callable[[str], Sequence[Any]]:
    """Return a `dot_natural_key` whose keys share what they have of equal parts of names."""
    parts = ("layers", "12", "w_3")
    if ordinary(".".join(parts)) != [ordinary(part)[0] for part in parts]:  # a release that sorts by something else
        return ordinary

    @functools.cache
    def key_of(part: str) -> Any:
        return ordinary(part)[0]

    return lambda name: tuple(map(key_of, name.split(".")))
