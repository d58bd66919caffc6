"""What only PEFT's own code knows: what its names mean, and how an adapter is merged.

PEFT's `merge_and_unload` runs on a copy of the modules, and each layer's `merge` is only recorded. It runs later, on a
copy of the layer that has the gathered weights. Written for peft 0.18 to 0.21.
"""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from lowmem_load.errors import CheckpointError, ConfigError, ModelBuildError, UnsupportedError, error_text, listed
from lowmem_load.foreign_names import PEFT, require
from lowmem_load.models.wrappers import copied


@dataclass(frozen=True, slots=True, eq=False)
class Merge:
    """Layers of PEFT, in its order, whose adapters are merged into the same parameters."""

    layers: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]

    def adapters(self) -> list[nn.Parameter]:
        """Return the parameters of the adapters."""
        bases = {id(parameter) for parameter in self.parameters}
        adapters = {id(p): p for layer in self.layers for p in layer.parameters() if id(p) not in bases}
        return list(adapters.values())

    def run(self, values: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Return the merged parameters, given the full value of each and of each adapter, by `id`, which may change."""
        parameters = {key: nn.Parameter(value, requires_grad=False) for key, value in values.items()}
        copies: dict[int, Any] = {}
        for layer in self.layers:
            with torch.no_grad():
                type(layer).merge(_copied(layer, copies, parameters), safe_merge=False)  # type: ignore[operator]
        return [parameters[id(parameter)].data for parameter in self.parameters]


def unloaded(model: nn.Module) -> tuple[nn.Module, list[Merge]]:
    """Return the base model of a model of PEFT, a copy that shares the unmerged parameters, and the merges to do."""
    peft = sys.modules.get("peft.peft_model")
    if peft is None or not isinstance(model, peft.PeftModel):
        raise ConfigError(f"merge_adapters: {type(model).__name__} is not a PeftModel; make one, or drop the option")
    if not hasattr(model.base_model, "merge_and_unload"):
        raise ConfigError(f"merge_adapters: what {type(model.base_model).__name__} of PEFT trains cannot be merged")
    require(PEFT, {"peft.tuners.tuners_utils": ("BaseTunerLayer.merge", "BaseTunerLayer.get_base_layer")})
    from peft.tuners.tuners_utils import BaseTunerLayer

    merged: list[nn.Module] = []
    copies: dict[int, Any] = {}
    tuner = _copied(model, copies, {}).base_model
    if hasattr(tuner.model, "config"):  # PEFT may note in it that weights are no longer tied
        tuner.model.config = copy.deepcopy(tuner.model.config)
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            if type(module).__name__ == "MultiheadAttention":
                raise UnsupportedError(
                    "merge_adapters: a LoRA on torch.nn.MultiheadAttention gets new parameters when it is merged; "
                    "merge it in a process that has the full model"
                )
            vars(copies[id(module)])["merge"] = lambda *_, layer=module, **__: merged.append(layer)
    parameters = list(model.parameters())
    for parameter in parameters:  # PEFT finds ties by memory, which partitioned parameters lack
        vars(parameter)["data_ptr"] = functools.partial(id, parameter)
    try:
        return tuner.merge_and_unload(), _together(merged)
    finally:
        for parameter in parameters:
            del vars(parameter)["data_ptr"]


class PeftNames(NamedTuple):
    """What the names in the state dict of a model of PEFT mean.

    Attributes:
        base: for each name of a tensor of the base model, its name and shape there.
        adapter: for each name under which PEFT saves a tensor of the adapter, its name in the state dict.
        left_out: names of tensors of the adapter that are tied to one of these.
    """

    base: dict[str, tuple[str, tuple[int, ...]]]
    adapter: dict[str, str]
    left_out: list[str]


def names_in(base: nn.Module, folder: str, adapter: str, shapes: Mapping[str, tuple[int, ...]]) -> PeftNames:
    """Return what the names of tensors, given with their shapes, mean in the state dict of a model of PEFT.

    `base` is that model without PEFT, on meta, which is changed. `folder` has the configuration of the adapter, which
    the state dict calls `adapter`. Raises CheckpointError if the tensors are of another model or adapter.
    """
    import peft

    places: dict[tuple[int, str], list[str]] = {}
    for name, module, last in _places(base):
        places.setdefault((id(module), last), []).append(name)
    try:
        with warnings.catch_warnings(), torch.device("meta"):  # PEFT would make values of any rank that the file says
            warnings.simplefilter("ignore")  # of names and places of the base
            config: Any = peft.PeftConfig.from_pretrained(folder)
            origin = config.base_model_name_or_path
            config.megatron_config = None  # PEFT would import the module that the file names
            if isinstance(getattr(config, "init_lora_weights", None), str):  # would need the values of the base
                config.init_lora_weights = True
            model = peft.get_peft_model(base, config, adapter, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
            config.base_model_name_or_path = origin  # whose vocabulary PEFT compares
            state = model.state_dict(keep_vars=True)
            itself = {name: name for name in state}
            saved = peft.get_peft_model_state_dict(model, state_dict=itself, adapter_name=adapter)
    except Exception as error:
        raise ModelBuildError(
            f"{folder}: PEFT cannot put the adapter of its adapter_config.json on a {type(base).__name__}: "
            f"{error_text(error)}"
        ) from error
    expected = {old: tuple(state[old].shape) for old in saved.values()}
    frozen = [old for old in expected if old not in shapes and "base_layer" in old]
    if frozen and all(old in shapes for old in expected if old not in frozen):
        raise CheckpointError(
            f"the checkpoint lacks {listed(frozen, 4)}, which PEFT saves with this adapter: frozen parameters were "
            "left out of it; save the adapter with PEFT's save_pretrained"
        )
    of_base: dict[str, str] = {}
    for name, module, last in _places(model):  # PEFT keeps the modules of the base, inside of its own
        if name in state and (names := places.get((id(module), last))):
            of_base[name] = names.pop(0)
    others = [name for name in shapes if name not in of_base and name not in expected]
    tied = {id(state[old]) for old in expected}
    left_out = [name for name in others if name in state and id(state[name]) in tied]
    wrong = [
        f"{old} is {shapes.get(old, 'missing')}, not {shape}"
        for old, shape in expected.items()
        if shapes.get(old) != shape
    ]
    wrong += [f"{name} is not part of it" for name in others if name not in left_out]
    if wrong:
        raise CheckpointError(
            f"the checkpoint is not of a {type(base).__name__} with the adapter of adapter_config.json: "
            f"{listed(wrong, 4)}"
        )
    named = {name: (of_base[name], tuple(state[name].shape)) for name in shapes if name in of_base}
    return PeftNames(named, saved, left_out)


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the name of each parameter and buffer, its module, and its name there."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for last in (*vars(module)["_parameters"], *vars(module)["_buffers"]):
            yield f"{prefix}.{last}" if prefix else last, module, last


def _together(layers: Sequence[Any]) -> list[Merge]:
    merges: list[Merge] = []
    for layer in layers:
        mine = list(layer.get_base_layer().parameters())
        others = [merge for merge in merges if {*map(id, merge.parameters)}.intersection(map(id, mine))]
        merges = [merge for merge in merges if merge not in others]
        parameters = {id(p): p for p in (*(p for merge in others for p in merge.parameters), *mine)}
        merges.append(Merge((*(one for merge in others for one in merge.layers), layer), tuple(parameters.values())))
    return merges


def _copied(module: nn.Module, copies: dict[int, Any], parameters: Mapping[int, nn.Parameter]) -> Any:
    """Return a copy of a module and of its children that has these parameters, and shares everything else."""
    made = copied(module, copies, lambda tensor: parameters.get(id(tensor), tensor))
    for each in copies.values():
        for name in ("merged_adapters", "_caches"):  # PEFT writes into them while merging
            if name in vars(each):
                vars(each)[name] = copy.copy(vars(each)[name])
    return made
