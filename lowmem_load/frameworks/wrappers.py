"""Modules that others put around a module: the names of a checkpoint do not have them.

They are known by their classes. A word in a name tells nothing: anybody may call a child `base_layer`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from lowmem_load.planning.proof import prove_names

_WRAPPERS = {
    "_orig_mod": (("torch._dynamo", "OptimizedModule"),),
    "_checkpoint_wrapped_module": (
        ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"),
    ),
    "base_layer": (("peft.tuners.tuners_utils", "BaseTunerLayer"),),
    "original_module": (
        ("peft.utils.other", "AuxiliaryTrainingWrapper"),
        ("peft.utils.other", "ModulesToSaveWrapper"),  # before peft 0.16 of no common class
    ),
}
"""The module and the class of wrappers, by the key under which they hold what they wrap."""


def wrapped_key(module: nn.Module) -> str | None:
    """Return the key of the child that a module only wraps; None if the module is not a wrapper."""
    children = vars(module)["_modules"]
    for key, classes in _WRAPPERS.items():
        if children.get(key) is None:
            continue
        known = (getattr(sys.modules.get(place), name, None) for place, name in classes)
        if isinstance(module, tuple(cls for cls in known if cls is not None)):
            return key
    return None


def plain_name(model: nn.Module, name: str) -> str:
    """Return the name that a checkpoint gives a tensor or module, given that in the model, with or without wrappers."""
    plain: list[str] = []
    module: nn.Module | None = model
    for part in name.split("."):
        inner = None if module is None else wrapped_key(module)
        while module is not None and inner is not None and part not in _keys(module):
            module = vars(module)["_modules"][inner]  # the name has been stripped of it
            inner = None if module is None else wrapped_key(module)
        if part != inner:
            plain.append(part)
        module = None if module is None else vars(module)["_modules"].get(part)
    return ".".join(plain)


def _keys(module: nn.Module) -> set[str]:
    own = vars(module)
    return {*own["_modules"], *own["_parameters"], *own["_buffers"]}


def plain_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by their plain names: what is wrapped, not its wrapper."""
    return {plain: module for _, plain, module in walk(model)}


class NamedTensor(NamedTuple):
    """A parameter or buffer in one of its places: `tensors[key]` of a module. Its name has no wrappers."""

    name: str
    tensor: torch.Tensor
    tensors: dict[str, Any]
    key: str
    is_parameter: bool
    is_persistent: bool


def named_tensors(model: nn.Module) -> list[NamedTensor]:
    """Return the parameters and buffers, a tied one under each of its names, in the order of the modules.

    Raises:
        CheckpointError: two of them have one name without the wrappers.
    """
    found: list[NamedTensor] = []
    full_names: dict[tuple[str, int], str] = {}
    for full, plain, module in walk(model):
        own = vars(module)
        for tensors, is_parameter in ((own["_parameters"], True), (own["_buffers"], False)):
            for key, tensor in tensors.items():
                if tensor is not None:
                    is_persistent = key not in own["_non_persistent_buffers_set"]
                    found.append(NamedTensor(_below(plain, key), tensor, tensors, key, is_parameter, is_persistent))
                    full_names.setdefault((found[-1].name, id(tensor)), _below(full, key))
    prove_names(type(model).__name__, (), {full: name for (name, _), full in full_names.items()})
    return found


def walk(module: nn.Module, full: str = "", plain: str = "") -> Iterator[tuple[str, str, nn.Module]]:
    """Yield the modules, a shared one in each place, with their names in the model and their plain names."""
    yield full, plain, module
    inner = wrapped_key(module)
    for key, child in vars(module)["_modules"].items():
        if child is not None:
            yield from walk(child, _below(full, key), plain if key == inner else _below(plain, key))


def _below(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
