"""Adapters merged into base weights by PEFT's own code, on a few rows of a weight at a time.

[Note: merged while saving] PEFT's `merge_and_unload` runs on the model itself, but the `merge` of each layer only
records that it was called; then the model is restored. So PEFT decides what is merged, what replaces what, and what is
refused. Each recorded `merge` runs later, on a copy of its layer with other tensors. For a LoRA of a linear layer or an
embedding these are some rows of the weight, and the part of the adapter that changes these rows. Other adapters need
the full tensors: DoRA the norm of columns or rows, LoHa full products.

Written for peft 0.15 to 0.21. Part of the transformers seam, see `loader.py`.
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

FEW_ROWS = 64
"""Least number of rows that are merged together. For fewer, BLAS uses other code, which rounds differently.

MKL 2024.2 gave the same bits for 8 rows and more as for all rows.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Merge:
    """Layers whose adapters are merged into the same weights.

    Attributes:
        layers: layers of PEFT, in the order in which it merges them.
        parameters: the weights.
        by_rows: whether there is one weight, whose rows can be merged in groups.
    """

    layers: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]
    by_rows: bool

    def adapters(self) -> list[nn.Parameter]:
        """Return the parameters of the adapters."""
        bases = {id(parameter) for layer in self.layers for parameter in _base_of(layer).parameters()}
        found = {id(p): p for layer in self.layers for p in layer.parameters() if id(p) not in bases}
        return list(found.values())

    def run(self, values: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Return the weights with the adapters merged into them.

        `values` has full tensors for parameters, by `id`; those for the weights are overwritten.
        """
        copies = _Copies(values)
        for layer in self.layers:
            copied: Any = copies.of(layer)
            with torch.no_grad():
                type(layer).merge(copied, safe_merge=False)  # type: ignore[operator]
        return [copies.parameters[id(parameter)].data for parameter in self.parameters]

    def run_on_rows(self, rows: torch.Tensor, first: int, adapters: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return some rows of the weight with the adapters merged into them.

        `rows`, of shape (rows, width), are overwritten; the first is row `first` of the weight. `adapters` has the full
        parameters of the adapters, by `id`.
        """
        values = dict(adapters)
        for layer in self.layers:
            for parameter, dim in _cut_with_rows(layer):
                values[id(parameter)] = adapters[id(parameter)].narrow(dim, first, len(rows))
        (merged,) = self.run({**values, id(self.parameters[0]): rows})
        return merged


@contextlib.contextmanager
def unloaded(model: nn.Module) -> Iterator[tuple[nn.Module, list[Merge]]]:
    """Inside, a model of PEFT is its base model, as after `merge_and_unload`, but nothing is merged.

    Yields:
        The base model with its own parameters, and what is to be merged into them.

    Raises:
        ConfigError: there is nothing that PEFT could merge.
        UnsupportedError: the merge of a layer gives it other parameters.
        ValueError: PEFT refuses.
    """
    tuner: Any = _tuner_of(model)
    from peft.tuners.tuners_utils import BaseTunerLayer

    noted: list[nn.Module] = []
    before = _Before(model)
    try:
        if hasattr(tuner.model, "config"):  # PEFT may note in it that weights are no longer tied
            tuner.model.config = copy.deepcopy(tuner.model.config)
        for module in list(model.modules()):
            if isinstance(module, BaseTunerLayer):
                # Source: peft 0.21.2 `tuners/lora/layer.py`, `MultiheadAttention.unload_and_optionally_merge_module`.
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
    finally:
        before.restore()


def _tuner_of(model: nn.Module) -> nn.Module:
    peft = sys.modules.get("peft.peft_model")
    if peft is None or not isinstance(model, peft.PeftModel):
        raise ConfigError(f"merge_adapters: {type(model).__name__} is no PeftModel; make one, or leave the option out")
    tuner: nn.Module = model.base_model
    if not hasattr(tuner, "merge_and_unload"):
        raise ConfigError(f"merge_adapters: what {type(tuner).__name__} of PEFT trains cannot be merged")
    require(PEFT, {"peft.tuners.tuners_utils": ("BaseTunerLayer.merge", "BaseTunerLayer.get_base_layer")})
    return tuner


class _Before:
    """The attributes and children of modules, to be restored."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._modules = [(module, dict(vars(module)), dict(module._modules)) for module in model.modules()]

    def restore(self) -> None:
        for parameter in self._parameters:
            vars(parameter).pop("data_ptr", None)
        for module, attributes, children in self._modules:
            vars(module).clear()
            vars(module).update(attributes)
            module._modules.clear()
            module._modules.update(children)


def _together(layers: Sequence[nn.Module]) -> list[Merge]:
    """Return one merge for all layers that change the same weights."""
    merges: list[Merge] = []
    for layer in layers:
        cut = _is_by_rows(layer)
        base = _base_of(layer)
        mine = (base.weight,) if cut else tuple(base.parameters())
        others = [merge for merge in merges if {*map(id, merge.parameters)}.intersection(map(id, mine))]
        merges = [merge for merge in merges if merge not in others]
        parameters = {id(p): p for p in (*(p for merge in others for p in merge.parameters), *mine)}
        merges.append(
            Merge(
                (*(one for merge in others for one in merge.layers), layer),
                tuple(parameters.values()),
                cut and all(merge.by_rows for merge in others),
            )
        )
    return merges


def _base_of(layer: Any) -> Any:
    return layer.get_base_layer()


def _is_by_rows(layer: Any) -> bool:
    """Return whether a layer is a plain LoRA of a matrix. Before peft 0.16 the only variant is DoRA."""
    from peft.tuners.lora import layer as lora

    if type(layer) not in (lora.Linear, lora.Embedding):
        return False
    has_variant = bool(getattr(layer, "lora_variant", None)) or any(layer.use_dora.values())
    has_bias = any(getattr(layer, "lora_bias", {}).values())
    return not has_variant and not has_bias


def _cut_with_rows(layer: Any) -> list[tuple[nn.Parameter, int]]:
    """Return the parameters of adapters that are cut to merge some rows of the weight, each with the dimension.

    Source: peft 0.21.2 `tuners/lora/layer.py`, `get_delta_weight`: B @ A, transposed where the weight is.
    """
    from peft.tuners.lora import layer as lora

    if isinstance(layer, lora.Embedding):
        return [(parameter, 1) for parameter in layer.lora_embedding_A.values()]
    if layer.fan_in_fan_out:
        return [(module.weight, 1) for module in layer.lora_A.values()]
    return [(module.weight, 0) for module in layer.lora_B.values()]


class _Copies:
    """Copies of modules that have other parameters and share everything else."""

    def __init__(self, values: Mapping[int, torch.Tensor]) -> None:
        self._values = values
        self._modules: dict[int, nn.Module] = {}
        self.parameters: dict[int, nn.Parameter] = {}
        """Parameters of the copies, by the `id` of the original."""

    def of(self, module: nn.Module) -> nn.Module:
        """Return the copy of a module and its children."""
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
