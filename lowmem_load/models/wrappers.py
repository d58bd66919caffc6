"""Modules that others put around a module: the names of a checkpoint do not have them.

They are known by their classes. A word in a name tells nothing: anybody may call a child `base_layer`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from lowmem_load.errors import CheckpointError, listed
from lowmem_load.planning.proof import prove_names
from lowmem_load.symbolic.attributes import EXTRA_STATE
from lowmem_load.training_checkpoints.names import OF_ACTIVATIONS

_WRAPPERS = {
    "_orig_mod": ("torch._dynamo", "OptimizedModule"),
    OF_ACTIVATIONS: ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"),
    "base_layer": ("peft.tuners.tuners_utils", "BaseTunerLayer"),
    "original_module": ("peft.utils.other", "AuxiliaryTrainingWrapper"),
}
"""The module and the class of wrappers, by the key under which they keep what they wrap."""


def wrapped_key(module: nn.Module) -> str | None:
    """Return the key of the child that a module only wraps; None if the module is not a wrapper."""
    children = vars(module)["_modules"]
    for key, (place, name) in _WRAPPERS.items():
        # A class that nobody has imported wraps nothing.
        if children.get(key) is not None and isinstance(module, getattr(sys.modules.get(place), name, ())):
            return key
    return None


def plain_name(model: nn.Module, name: str) -> str:
    """Return the name that a checkpoint gives a tensor or module, given that in the model, with or without wrappers."""
    plain: list[str] = []
    module: nn.Module | None = model
    for part in name.split("."):
        while module is not None and (inner := wrapped_key(module)) is not None and part not in _keys(module):
            module = vars(module)["_modules"][inner]  # the name has been stripped of it
        if module is None or part != wrapped_key(module):
            plain.append(part)
        module = None if module is None else vars(module)["_modules"].get(part)
    return ".".join(plain)


def _keys(module: nn.Module) -> set[str]:
    own = vars(module)
    return {*own["_modules"], *own["_parameters"], *own["_buffers"]}


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules by their plain names, in each place; a wrapper first, so a dict has what it wraps."""
    yield from ((plain.removesuffix("."), module) for _, plain, module in _walk(model))


def plain_class(module: nn.Module) -> type:
    """Return the class that a module had before FSDP2's `fully_shard` gave it one of its own."""
    return next(cls for cls in type(module).__mro__ if "FSDPModule" not in (base.__name__ for base in cls.__mro__))


def extra_states(model: nn.Module, keys: Collection[str] = _WRAPPERS) -> dict[str, nn.Module]:
    """Return the modules that take an extra state, by the names that checkpoints give these.

    `keys` are those of the wrappers that the names do not have. Default: of all.
    """
    return {
        plain + EXTRA_STATE: module
        for _, plain, module in _walk(model, keys)
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }


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

    Raises CheckpointError if two of them have one name without the wrappers.
    """
    found: list[NamedTensor] = []
    full_names: dict[tuple[str, int], str] = {}
    for full, plain, module in _walk(model):
        own = vars(module)
        for tensors, is_parameter in ((own["_parameters"], True), (own["_buffers"], False)):
            for key, tensor in tensors.items():
                if tensor is not None:
                    is_persistent = key not in own["_non_persistent_buffers_set"]
                    found.append(NamedTensor(plain + key, tensor, tensors, key, is_parameter, is_persistent))
                    full_names.setdefault((plain + key, id(tensor)), full + key)
    prove_names(type(model).__name__, (), {full: name for (name, _), full in full_names.items()})
    return found


def copied(module: nn.Module, copies: dict[int, Any], tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy, without FSDP2, of a module and those below; it shares all but tensors. `copies` has them by id."""
    if id(module) not in copies:
        made: Any = object.__new__(plain_class(module))
        copies[id(module)], attributes = made, vars(made)
        attributes.update(vars(module))
        for kind in ("_parameters", "_buffers"):
            own = attributes[kind].items()
            attributes[kind] = {key: None if value is None else tensor(value) for key, value in own}
        attributes["_modules"] = {
            key: None if child is None else copied(child, copies, tensor)
            for key, child in attributes["_modules"].items()
        }
    return copies[id(module)]


def refuse_differences(where: str, problems: Mapping[str, Iterable[str]], advice: str) -> None:
    """Raise one CheckpointError that lists the tensors that do not match, by what is wrong with them."""
    if texts := [f"{kind}: {listed(sorted(names), 50)}" for kind, names in problems.items() if names]:
        raise CheckpointError(f"{where}. {'; '.join(texts)}. {advice}")


def _walk(
    module: nn.Module, keys: Collection[str] = _WRAPPERS, full: str = "", plain: str = ""
) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield the modules, each with what the names of its tensors begin with, and with that without wrappers' keys."""
    yield full, plain, module
    inner = wrapped_key(module)
    for key, child in vars(module)["_modules"].items():
        if child is not None:
            is_left_out = key == inner and key in keys
            yield from _walk(child, keys, f"{full}{key}.", plain if is_left_out else f"{plain}{key}.")
