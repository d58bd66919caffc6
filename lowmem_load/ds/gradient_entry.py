"""Makes the tensors that enter a module need a gradient, whatever structure of arguments they are in.

[Note: the same graph on all ranks] Parameters of a ZeRO-3 module are gathered in the backward pass only if gradients
pass through it. Through frozen layers they pass only if the input needs a gradient. In partial ZeRO-3 that depends on
the encoders that ran on this rank. So every tensor that enters the partitioned part is made to need a gradient, at
whichever module it enters: a model may call a submodule of a chosen module directly. Recomputation in the backward pass
must treat the same modules alike, so the modules that were entered are remembered.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator, Mapping, MutableMapping
from itertools import zip_longest
from typing import Any

import torch
from torch import nn


class _NeedsGradient(torch.autograd.Function):
    """Returns a copy of a tensor that needs a gradient, and drops the gradient. `anchor` is a scalar that needs one."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:  # noqa: ARG004
        return None, None


def arguments_with_gradient(
    anchor: torch.Tensor, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a module's forward with tensors that need a gradient; see `with_gradient`."""
    named = zip_longest(args, _positional_names(module, len(args)), fillvalue="")
    return tuple(with_gradient(anchor, value, name) for value, name in named), with_gradient(anchor, kwargs)


def with_gradient(anchor: torch.Tensor, value: Any, name: str = "") -> Any:
    """Return `value` with every floating-point tensor in it made to need a gradient.

    `name` is that of the argument. Masks and positions stay as they are: they depend on no parameter, and attention
    kernels want them without a gradient.
    """
    if "mask" in name or "position" in name:
        return value
    if isinstance(value, torch.Tensor):
        lacks = value.is_floating_point() and not value.requires_grad
        return _NeedsGradient.apply(anchor, value) if lacks else value
    if isinstance(value, MutableMapping):  # a copy keeps its class: ModelOutput, BatchFeature
        mapping = copy.copy(value)
        for key, item in value.items():
            mapping[key] = with_gradient(anchor, item, str(key))
        return mapping
    if type(value) in (list, tuple):
        return type(value)(with_gradient(anchor, item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{key: with_gradient(anchor, getattr(value, key), key) for key in names})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = zip(value._fields, value, strict=True)
        return type(value)(*(with_gradient(anchor, item, key) for key, item in items))
    return value


def _positional_names(module: nn.Module, count: int) -> list[str]:
    """Return the names of the first `count` parameters of `forward`; fewer if it takes *args."""
    if not count:
        return []
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # not written in Python
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in positional][:count]


def entry_modules(chosen: Mapping[str, nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules through which tensors enter the chosen part: the items of containers, which run no forward."""
    for module in chosen.values():
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield from entry_modules(dict(module.named_children()))
        else:
            yield module
