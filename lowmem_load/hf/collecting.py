"""How transformers reads and collects the tensors of a checkpoint while a model is described.

Files give symbolic tensors, and nothing of them is read. Source: transformers 5.0 to 5.24 `core_model_loading.py`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers.modeling_utils as modeling_utils

from lowmem_load.formats.format import CheckpointFile
from lowmem_load.formats.safetensors import CODES, Safetensors
from lowmem_load.replaced import Handler, Replacement
from lowmem_load.symbolic.context import Context
from lowmem_load.symbolic.initialise import ReadNow
from lowmem_load.symbolic.tensor import SymbolicTensor

MODULE = "transformers.core_model_loading"


class SymbolicFile:
    """Stands for what `safetensors.safe_open` returns."""

    def __init__(self, file: CheckpointFile, read_now: ReadNow) -> None:
        self._file, self._read_now = file, read_now

    def __enter__(self) -> SymbolicFile:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._file.names)

    def metadata(self) -> Mapping[str, str] | None:
        """Return the strings in the header, such as the format."""
        return self._file.metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a symbolic tensor."""
        return SymbolicTensor(self._file.expression(name), self._read_now)

    def get_slice(self, name: str) -> _SymbolicSlice:
        """Return a tensor that may be indexed before it is made."""
        return _SymbolicSlice(self, name)


class _SymbolicSlice:
    __slots__ = ("_file", "_name")

    def __init__(self, file: SymbolicFile, name: str) -> None:
        self._file, self._name = file, name  # not looked up yet: torch may lack the dtype of a tensor that nobody uses

    def get_shape(self) -> list[int]:
        return list(self[...].shape)

    def get_dtype(self) -> str:
        return CODES[self[...].dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = self._file.get_tensor(self._name)
        return tensor if index is Ellipsis else tensor[index]


def symbolic_files(context: Context) -> list[Replacement]:
    """Return the replacements with which transformers finds symbolic tensors in the files of a checkpoint."""

    def symbolic_open(_: Any, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> SymbolicFile:
        return SymbolicFile(context.file(os.fspath(path), Safetensors()), context.read_now)

    def symbolic_state_dict(
        ordinary: Callable[..., Any], path: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        if os.fspath(path).endswith(".safetensors"):
            return dict(ordinary(path, *args, **kwargs))  # through symbolic_open
        from lowmem_load.formats.torch_zip import TorchZip

        file = context.file(os.fspath(path), TorchZip())
        nodes = {name: file.expression(name) for name in file.names}
        tensors = {id(node): SymbolicTensor(node, context.read_now) for node in nodes.values()}
        return {name: tensors[id(node)].detach() for name, node in nodes.items()}  # tied names share a value

    replacements: list[Replacement] = [
        (modeling_utils, "safe_open", symbolic_open),
        (modeling_utils, "load_state_dict", symbolic_state_dict),
    ]
    if hasattr(modeling_utils, "_is_on_hf_mount"):  # 5.9 on: on such mounts it reads full files to avoid mmap
        replacements.append((modeling_utils, "_is_on_hf_mount", lambda *_: False))
    if hasattr(modeling_utils, "load_shard_files_with_threadpool"):  # 4.53 to 4.57
        replacements.append((modeling_utils, "load_shard_files_with_threadpool", _one_after_the_other))
    return replacements


def _one_after_the_other(_: Any, shards: Sequence[Any]) -> tuple[list[str], Any]:
    """Read shards in this thread, even if HF_ENABLE_PARALLEL_LOADING is set: others do not see the replacements."""
    found = [modeling_utils.load_shard_file(shard) for shard in shards]
    return [message for messages, _ in found for message in messages], found[-1][1]


def described_collecting() -> list[Replacement]:
    """Return the replacements that save time and memory in large models.

    Rank 517 of 1024 plans DeepSeek-V3 in fp8 in 7 CPU seconds and 65 MiB. With transformers' copies of converters that
    takes twice the time, with its threads 280 MiB, with its keys 137.
    """
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


class _Job:  # transformers' closure takes three times the memory
    __slots__ = ("_copy", "_device", "_dtype", "_tensor")

    def __init__(self, copy: Callable[..., Any], tensor: Any, device: Any, dtype: Any) -> None:
        self._copy, self._tensor, self._device, self._dtype = copy, tensor, device, dtype

    def __call__(self) -> Any:
        return self._copy(self._tensor, self._device, self._dtype)


def _without_threads(loading: Any) -> Handler:
    def spawn(ordinary: Handler, pool: Any, tensor: Any, device: Any = None, dtype: Any = None, **others: Any) -> Any:
        if others.get("sharding_op") is not None or not others.keys() <= {"sharding_op", "tensor_idx"}:
            return ordinary(pool, tensor, device, dtype, **others)
        return _Job(loading._materialize_copy, tensor, device, dtype)

    return spawn


def _sorts_by_parts(key: Callable[[str], list[Any]]) -> bool:
    parts = ("layers", "12", "w_3")
    return key(".".join(parts)) == [key(part)[0] for part in parts]


def _shared_key() -> Handler:
    @functools.cache
    def key_of(ordinary: Callable[[str], list[Any]], part: str) -> Any:
        return ordinary(part)[0]

    return lambda ordinary, name: tuple(key_of(ordinary, part) for part in name.split("."))
