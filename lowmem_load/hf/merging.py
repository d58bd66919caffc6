"""Adapters merged into base weights by PEFT's own code, one layer at a time.

PEFT's `merge_and_unload` runs, but each layer's `merge` is only recorded. It runs later, on a copy of the layer that
has the gathered weights. Written for peft 0.15 to 0.21.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowmem_load.contract import PEFT, require
from lowmem_load.errors import ConfigError, UnsupportedError


@dataclass(frozen=True, slots=True, eq=False)
class Merge:
    """Layers of PEFT, in its order, whose adapters are merged into the same parameters."""

    layers: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]

    def adapters(self) -> list[nn.Parameter]:
        """Return the parameters of the adapters."""
        bases = {id(parameter) for parameter in self.parameters}
        found = {id(p): p for layer in self.layers for p in layer.parameters() if id(p) not in bases}
        return list(found.values())

    def run(self) -> list[torch.Tensor]:
        """Return the merged parameters, as new tensors. All parameters must be gathered."""
        values = {id(parameter): parameter.detach().clone() for parameter in self.parameters}
        device = self.parameters[0].device  # adapters may be on another one, such as the host
        copies = _Copies(values | {id(adapter): adapter.detach().to(device) for adapter in self.adapters()})
        for layer in self.layers:
            copied: Any = copies.of(layer)
            with torch.no_grad():
                type(layer).merge(copied, safe_merge=False)  # type: ignore[operator]
        return [copies.parameters[id(parameter)].data for parameter in self.parameters]


@contextlib.contextmanager
def unloaded(model: nn.Module) -> Iterator[tuple[nn.Module, list[Merge]]]:
    """Inside, a model of PEFT is its base model, as after `merge_and_unload`, but nothing is merged."""
    tuner: Any = _tuner_of(model)
    from peft.tuners.tuners_utils import BaseTunerLayer

    noted: list[nn.Module] = []
    with _restored(model):
        if hasattr(tuner.model, "config"):  # PEFT may note in it that weights are no longer tied
            tuner.model.config = copy.deepcopy(tuner.model.config)
        for module in list(model.modules()):
            if isinstance(module, BaseTunerLayer):
                if type(module).__name__ == "MultiheadAttention":
                    raise UnsupportedError(
                        "merge_adapters: a LoRA on torch.nn.MultiheadAttention gets new parameters when it is merged; "
                        "merge it in a process that has the whole model"
                    )
                vars(module)["merge"] = lambda *_, layer=module, **__: noted.append(layer)
        for parameter in model.parameters():  # PEFT finds ties by memory, which partitioned parameters lack
            vars(parameter)["data_ptr"] = functools.partial(id, parameter)
        base = tuner.merge_and_unload()
        for parameter in model.parameters():
            vars(parameter).pop("data_ptr", None)
        yield base, _together(noted)


def _tuner_of(model: nn.Module) -> nn.Module:
    peft = sys.modules.get("peft.peft_model")
    if peft is None or not isinstance(model, peft.PeftModel):
        raise ConfigError(f"merge_adapters: {type(model).__name__} is no PeftModel; make one, or leave the option out")
    tuner: nn.Module = model.base_model
    if not hasattr(tuner, "merge_and_unload"):
        raise ConfigError(f"merge_adapters: what {type(tuner).__name__} of PEFT trains cannot be merged")
    require(PEFT, {"peft.tuners.tuners_utils": ("BaseTunerLayer.merge", "BaseTunerLayer.get_base_layer")})
    return tuner


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    parameters = list(model.parameters())
    modules = [(module, dict(vars(module)), dict(module._modules)) for module in model.modules()]
    try:
        yield
    finally:
        for parameter in parameters:
            vars(parameter).pop("data_ptr", None)
        for module, attributes, children in modules:
            vars(module).clear()
            vars(module).update(attributes)
            module._modules.clear()
            module._modules.update(children)


def _together(layers: Sequence[Any]) -> list[Merge]:
    merges: list[Merge] = []
    for layer in layers:
        mine = list(layer.get_base_layer().parameters())
        others = [merge for merge in merges if {*map(id, merge.parameters)}.intersection(map(id, mine))]
        merges = [merge for merge in merges if merge not in others]
        parameters = {id(p): p for p in (*(p for merge in others for p in merge.parameters), *mine)}
        merges.append(Merge((*(one for merge in others for one in merge.layers), layer), tuple(parameters.values())))
    return merges


class _Copies:
    """Copies of modules that have other parameters, by the `id` of the original, and share everything else."""

    def __init__(self, values: Mapping[int, torch.Tensor]) -> None:
        self._values = values
        self._modules: dict[int, nn.Module] = {}
        self.parameters: dict[int, nn.Parameter] = {}

    def of(self, module: nn.Module) -> nn.Module:
        if id(module) not in self._modules:
            made: Any = type(module).__new__(type(module))
            vars(made).update(vars(module))
            self._modules[id(module)] = made
            for name in ("merged_adapters", "_caches"):  # PEFT writes into them while merging
                if name in vars(made):
                    vars(made)[name] = copy.copy(vars(made)[name])
            vars(made)["_parameters"] = {name: self._parameter(p) for name, p in module._parameters.items()}
            vars(made)["_modules"] = {name: child and self.of(child) for name, child in module._modules.items()}
        return self._modules[id(module)]

    def _parameter(self, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None:
            return None
        if id(parameter) not in self.parameters:
            value = self._values.get(id(parameter), parameter.data)
            self.parameters[id(parameter)] = nn.Parameter(value, requires_grad=False)
        return self.parameters[id(parameter)]
