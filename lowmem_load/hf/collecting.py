"""How transformers reads and collects the tensors of a checkpoint while a model is described.

Files give symbolic tensors, and nothing of them is read. Source: transformers 5.6 to 5.24 `core_model_loading.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lowmem_load import foreign_names
from lowmem_load.formats.format import CheckpointFile
from lowmem_load.formats.safetensors import CODES, Safetensors
from lowmem_load.replaced import Handler, Handlers
from lowmem_load.symbolic.attributes import EXTRA_STATE
from lowmem_load.symbolic.context import Context
from lowmem_load.symbolic.initialise import ReadNow
from lowmem_load.symbolic.tensor import SymbolicTensor


class SymbolicFile:
    """Stands for what `safetensors.safe_open` returns."""

    def __init__(self, file: CheckpointFile, read_now: ReadNow) -> None:
        self._file, self._read_now = file, read_now

    def __enter__(self) -> SymbolicFile:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted as those of `safe_open`: dtype "auto" is that of the first."""
        return sorted(self._file.names)

    def metadata(self) -> Mapping[str, str] | None:
        """Return the strings in the header, such as the format."""
        return self._file.metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a symbolic tensor; a real one for an extra state."""
        return for_loader(name, SymbolicTensor(self._file.expression(name), self._read_now))

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


def for_loader(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a symbolic tensor, but the values of an extra state: the code of its module may do anything with them."""
    if name.rpartition(".")[2] == EXTRA_STATE and isinstance(tensor, SymbolicTensor):
        return tensor.read_now(tensor.expression, "set_extra_state")
    return tensor


def symbolic_files(context: Context) -> Handlers:
    """Return the handlers by which transformers finds symbolic tensors in the files of a checkpoint."""

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
        return {
            name: for_loader(name, tensors[id(node)].detach()) for name, node in nodes.items()
        }  # ties are one value

    return {
        foreign_names.SAFE_OPEN: symbolic_open,
        foreign_names.LOAD_STATE_DICT: symbolic_state_dict,
        foreign_names.IS_ON_HF_MOUNT: lambda *_: False,  # on such mounts it reads full files to avoid mmap
    }


def collecting_handlers() -> Handlers:
    """Return what saves time and memory in large models.

    Rank 517 of 1024 plans DeepSeek-V3 in fp8 in 7 CPU seconds and 65 MiB. With transformers' copies of converters that
    takes twice the time, and with its threads 280 MiB.
    """
    import transformers.core_model_loading as loading

    return {
        foreign_names.DEEPCOPY: _copy_once_for_each_use(getattr(loading, "WeightConverter", ())),
        foreign_names.SPAWN_MATERIALIZE: _materialize_without_threads(getattr(loading, "_materialize_copy", None)),
    }


def _copy_once_for_each_use(converter: Any) -> Handler:
    latest: dict[int, tuple[Any, Any]] = {}

    def deepcopy(ordinary: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not isinstance(value, converter):
            return ordinary(value, *args, **kwargs)
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


def _materialize_without_threads(copy: Any) -> Handler:
    def spawn(
        ordinary: Handler, pool: Any, tensor: Any, device: Any = None, dtype: Any = None, *rest: Any, **others: Any
    ) -> Any:
        is_plain = not rest and others.get("sharding_op") is None and others.keys() <= {"sharding_op", "tensor_idx"}
        if copy is None or not is_plain:
            return ordinary(pool, tensor, device, dtype, *rest, **others)
        return _Job(copy, tensor, device, dtype)

    return spawn
