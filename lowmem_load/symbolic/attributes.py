"""Tensors that are plain attributes of modules, or in lists, tuples and dicts that are. torch does not move them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from lowmem_load.errors import UnsupportedError, listed

EXTRA_STATE = "_extra_state"
"""Last part of the names under which checkpoints have what `get_extra_state` of a module returns."""

_OWN_STATE = frozenset(vars(nn.Module()))
"""Attributes that torch gives every module."""


def hand_over_attributes(
    loaded: Mapping[str, nn.Module], modules: Mapping[str, nn.Module], device: torch.device
) -> None:
    """Give modules the tensor attributes of the loaded ones of the same names where their own are on meta.

    Parameters of the modules stay (`nn.LSTM` has a list of its own): `Constructor.finish` gives the loaded ones.
    """
    parameters = {id(own) for module in modules.values() for own in vars(module)["_parameters"].values()}

    def lacks_value(value: Any) -> bool:
        return any(tensor.is_meta and id(tensor) not in parameters for tensor in tensors_in(value))

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta else tensor.to(device)

    for prefix in loaded.keys() & modules.keys():
        own = modules[prefix]
        for name in _own_attributes(loaded[prefix]):
            if lacks_value(vars(own).get(name)):
                setattr(own, name, replaced_in(vars(loaded[prefix])[name], move))
    lost = [
        f"{prefix}.{name}"
        for prefix, module in modules.items()
        for name in _own_attributes(module)
        if not is_computed_in_forward(module, name) and lacks_value(vars(module)[name])
    ]
    if lost:
        raise UnsupportedError(
            f"{type(loaded['']).__name__}: has no value for {listed(lost)}, tensor attributes of the model on the meta "
            "device; build the model from the configuration of the checkpoint, or set them before the load"
        )


def hand_over_extra_states(
    loaded: Mapping[str, nn.Module], modules: Mapping[str, nn.Module], device: torch.device, without: Collection[str]
) -> None:
    """Give modules the extra states of the loaded ones of the same names, but for those that are not loaded."""
    for name, module in loaded.items():
        has_state = type(module).get_extra_state is not nn.Module.get_extra_state and name in modules
        if has_state and (f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE) not in without:
            state = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), module.get_extra_state())
            modules[name].set_extra_state(state)


def tensor_attributes(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, list[torch.Tensor]]]:
    """Yield each attribute with tensors, also in lists, tuples or dicts: module, attribute, its name, the tensors."""
    for prefix, module in model.named_modules():
        for name in _own_attributes(module):
            yield module, name, f"{prefix}.{name}" if prefix else name, list(tensors_in(vars(module)[name]))


def _own_attributes(module: nn.Module) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if name not in _OWN_STATE and next(tensors_in(value), None) is not None
    ]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an attribute."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def replaced_in(value: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return an attribute with each of its tensors replaced. Lists and dicts stay the same objects."""
    if isinstance(value, torch.Tensor):
        return replace(value)
    if isinstance(value, dict):
        value.update({key: replaced_in(part, replace) for key, part in value.items()})
    elif isinstance(value, list):
        value[:] = [replaced_in(part, replace) for part in value]
    elif isinstance(value, tuple):
        parts = [replaced_in(part, replace) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def is_computed_in_forward(module: nn.Module, attribute: str) -> bool:
    """Return whether an attribute is made again before each forward, of parameters.

    Source: torch 2.13 `nn/utils/weight_norm.py`, `nn/utils/spectral_norm.py`.
    """
    return any(getattr(hook, "name", None) == attribute for hook in module._forward_pre_hooks.values())
