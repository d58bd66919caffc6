"""What the outcome of transformers' conversion depends on, as a digest. Part of the transformers seam, see `loader.py`.

[Note: the key] The conversion is a function of its arguments: a model on meta, the tensors of the files, the mapping of
names, dtypes, a quantizer. All of these are told here, and besides the code that runs: transformers' as it is in
memory, where others may have replaced it, and by their files the modules of the model, the quantizer and the
operations. What is equal for all ranks of all worlds, and nothing else: no paths, no ranks. A model of which something
cannot be told is loaded as ever, and not kept.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import transformers
from torch import nn

from lowmem_load.formats.format import CheckpointFile
from lowmem_load.formats.kept import digest_of_file
from lowmem_load.formats.templates import NotDataError
from lowmem_load.hf.names import HUB_KEYWORDS, config_text

_LIBRARIES = ("accelerate", "bitsandbytes", "compressed_tensors", "kernels", "peft", "safetensors")
"""Those that may convert, or be asked by what converts."""

_ELSEWHERE = ("config", "state_dict", "output_loading_info", *HUB_KEYWORDS)
"""Keywords that say where things come from, or are told otherwise."""

_MAX_DEPTH = 12
"""Of objects in objects."""


def key_of(
    model: nn.Module,
    load_config: Any,
    files: Sequence[CheckpointFile],
    tensors: str,
    keywords: Mapping[str, Any],
    *,
    is_cut_up: bool,
    module: ModuleType,
) -> bytes:
    """Return a digest of all that a conversion depends on; see [Note: the key].

    Args:
        model: as it is before it.
        load_config: transformers' settings of it.
        files: of the checkpoint.
        tensors: a digest of which tensors transformers has of which file, in its order.
        keywords: of `from_pretrained`.
        is_cut_up: see `Call.describe`.
        module: transformers' code of it.

    Raises:
        NotDataError: names what cannot be told.
    """
    quantizer = load_config.hf_quantizer
    tell = functools.partial(told, quantizer=quantizer)
    kinds = {kind for each in model.modules() for kind in type(each).__mro__}
    kinds |= {kind for each in _operations(load_config.weight_mapping) for kind in type(each).__mro__}
    kinds |= set(type(quantizer).__mro__)
    depends_on = {
        "versions": [sys.version, torch.__version__, transformers.__version__],
        "libraries": [f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES if name in sys.modules],
        "lowmem_load": _own_code(),
        "conversion": [_code(value, module) for _, value in sorted(vars(module).items())],
        "modules": sorted(set(_modules_of(kinds))),
        "model": [
            f"{type(model).__module__}.{type(model).__qualname__}",
            tell(getattr(model, "base_model_prefix", "")),
        ],
        "config": config_text(model.config) if hasattr(model, "config") else "",
        "default dtype": str(torch.get_default_dtype()),
        "keywords": [[name, tell(value)] for name, value in sorted(keywords.items()) if name not in _ELSEWHERE],
        "cut up": is_cut_up,
        "quantizer": _quantizer(quantizer),
        "mapping": tell(load_config.weight_mapping),
        "settings": [
            *(load_config.ignore_mismatched_sizes, load_config.weights_only, str(load_config.dtype)),
            tell(getattr(load_config, "dtype_plan", None)),
        ],
        "parameters": [_told_tensor(*each) for each in model.named_parameters(remove_duplicate=False)],
        "buffers": [_told_tensor(*each) for each in model.named_buffers(remove_duplicate=False)],
        "state": list(model.state_dict()),
        "files": [[os.path.basename(file.path), file.nbytes, file.digest] for file in files],
        "tensors": tensors,
    }
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).digest()


def told(value: Any, depth: int = 0, *, quantizer: Any = None) -> Any:
    """Return a value as JSON, equal for equal ones in every process.

    Args:
        value: a setting, or an object of such.
        depth: of objects that it was found in.
        quantizer: told elsewhere, and only named here.

    Raises:
        NotDataError: names what cannot be told.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if value is quantizer:
        return "the quantizer"
    if depth > _MAX_DEPTH:
        raise NotDataError(f"{type(value).__name__}: objects in objects")
    deeper = functools.partial(told, depth=depth + 1, quantizer=quantizer)
    if isinstance(value, Mapping):
        return ["mapping", sorted(([deeper(key), deeper(item)] for key, item in value.items()), key=json.dumps)]
    if isinstance(value, set | frozenset):
        return ["set", sorted(map(deeper, value), key=json.dumps)]
    if isinstance(value, tuple | list):
        return [type(value).__name__, *map(deeper, value)]
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(getattr(value, "pattern", None), str):  # compiled, or to be compiled when it is used
        return ["pattern", value.pattern, value.flags]
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, FunctionType):
        if value.__closure__:
            raise NotDataError(f"a closure, {value.__qualname__}")
        defaults = [deeper(value.__defaults__), deeper(value.__kwdefaults__)]
        return [value.__module__, value.__qualname__, _code_object(value.__code__), *defaults]
    if isinstance(value, MethodType | functools.partial | torch.Tensor):  # whose attributes do not say what they hold
        raise NotDataError(f"a {type(value).__name__}")
    if hasattr(value, "to_dict"):
        return [deeper(type(value)), deeper(value.to_dict())]
    return [deeper(type(value)), deeper(dict(_attributes(value)))]


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a plain object holds; one that is written in C cannot be told."""
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    if not slots and not hasattr(value, "__dict__"):
        raise NotDataError(type(value).__name__)
    yield from ((name, getattr(value, name)) for name in slots if hasattr(value, name))
    yield from getattr(value, "__dict__", {}).items()


def _slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def _quantizer(quantizer: Any) -> Any:
    if quantizer is None:
        return None
    plain = {name: value for name, value in vars(quantizer).items() if name != "quantization_config"}
    plain = {
        name: value for name, value in plain.items() if value is None or isinstance(value, bool | int | str | list)
    }
    return [told(type(quantizer)), told(quantizer.quantization_config), told(plain)]


def _operations(mapping: Iterable[Any] | None) -> Iterator[Any]:
    for conversion in mapping or ():
        yield conversion
        yield from getattr(conversion, "operations", ())


def _told_tensor(name: str, tensor: torch.Tensor) -> str:
    return f"{name} {type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)}"


def _modules_of(kinds: Iterable[type]) -> Iterator[tuple[str, str]]:
    """Yield name and digest of the modules that classes come from, but for torch's and Python's own."""
    for name in {kind.__module__ for kind in kinds}:
        if name.partition(".")[0] in ("torch", *sys.stdlib_module_names):
            continue
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None:
            raise NotDataError(f"the module {name}, which comes from no file")
        yield name, digest_of_file(file)


@functools.cache
def _own_code() -> str:
    """Return a digest of this package's files."""
    folder = Path(__file__).parents[1]
    files = sorted(folder.rglob("*.py"))
    return hashlib.sha256("".join(map(digest_of_file, map(str, files))).encode()).hexdigest()


def _code(value: Any, module: ModuleType) -> Any:
    """Return what a function, or the methods of a class, of a module do: what is in memory, not in its file."""
    if isinstance(value, FunctionType):
        return [value.__module__, value.__qualname__, _code_object(value.__code__)]
    if isinstance(value, type) and value.__module__ == module.__name__:
        return [value.__qualname__, [_code(each, module) for _, each in sorted(vars(value).items())]]
    if isinstance(value, classmethod | staticmethod):
        return _code(value.__func__, module)
    return None


def _code_object(code: CodeType) -> Any:
    constants = [_code_object(each) if isinstance(each, CodeType) else _constant(each) for each in code.co_consts]
    return [code.co_code.hex(), code.co_names, constants]


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
