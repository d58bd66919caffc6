"""How transformers collects the tensors of a checkpoint while a model is described. Part of the transformers seam.

Its loader makes a deep copy of a converter for every tensor and keeps the first of each target's; threads materialize
the tensors. Where nothing is read, that is most of what describing a large model costs, and the tensors of all targets
are there at a time. So a copy that was dropped is handed out again, and tensors are made when they are converted.

Source: transformers 5.0 to 5.23 `core_model_loading.py`, `convert_and_load_state_dict_in_model` (which has both names
from `copy` and `concurrent.futures`) and `WeightTransform.materialize_tensors`. 4.x has no such module.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from lowmem_load.hf.replaced import replaced

MODULE = "transformers.core_model_loading"


@contextlib.contextmanager
def described_collecting() -> Iterator[None]:
    """Inside, converters are copied once for each target, and nothing is done in threads."""
    loading = importlib.import_module(MODULE) if importlib.util.find_spec(MODULE) else None
    with contextlib.ExitStack() as stack:
        if hasattr(loading, "deepcopy") and hasattr(loading, "WeightConverter"):
            stack.enter_context(replaced(loading, "deepcopy", _once_for_each_use(loading)))
        if hasattr(loading, "ThreadPoolExecutor"):
            stack.enter_context(replaced(loading, "ThreadPoolExecutor", _Deferring))
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
