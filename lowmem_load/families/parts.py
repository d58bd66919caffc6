"""One module of several checkpoints: submodules by prefix, transformers' models in it by transformers' own loader.

A transformers model is described as an object of its own, whose tensors then take the places in the module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from lowmem_load.errors import CheckpointError, UnsupportedError, listed
from lowmem_load.families.call import Call
from lowmem_load.families.modules import ModuleCall, slots_of
from lowmem_load.frameworks.wrappers import named_tensors, plain_modules
from lowmem_load.hf import loader
from lowmem_load.hf.active import transformers_class
from lowmem_load.hf.skeleton import hand_over
from lowmem_load.io.stand_ins import is_stand_in, origin
from lowmem_load.planning.regions import FlatRange
from lowmem_load.symbolic.attributes import hand_over_attributes, hand_over_extra_states
from lowmem_load.symbolic.context import Context
from lowmem_load.symbolic.initialise import CPU
from lowmem_load.text import is_below

Part = Callable[[nn.Module], Call]
"""Makes the load that fills a submodule, given that."""


class InnerCall(loader.Call):
    """A load of a transformers model that is `inside` of a module. For other arguments see `ModuleCall`.

    `left` has the names of tensors, within that model, that the caller fills.
    """

    def __init__(
        self,
        inside: nn.Module,
        cls: Any,
        name: str,
        kwargs: dict[str, Any],
        *,
        left: Collection[str],
        is_stand_in: bool,
    ) -> None:
        ordinary = transformers_class().from_pretrained.__func__
        if cls.from_pretrained.__func__ is not ordinary:
            raise UnsupportedError(
                f"{cls.__name__}: has a from_pretrained of its own; load that model by itself, and name it in leave="
            )
        super().__init__(ordinary, cls, (name,), kwargs)
        self._inside, self._left, self._is_stand_in = inside, left, is_stand_in
        self._hand_over_states: Callable[[nn.Module], object] = lambda _: None

    def describe(self, context: Context) -> tuple[nn.Module, dict[str, Any]]:
        """See `Call`."""
        described, info = super().describe(context)
        if getattr(described, "hf_quantizer", None) is not None:
            raise UnsupportedError(f"{self.name}: quantized weights of a part of a module; call load_into for it alone")
        self._put(described)
        hand_over(described, self._inside)
        hand_over_attributes(plain_modules(described), plain_modules(self._inside), CPU)
        missing = info["missing_keys"]
        self._hand_over_states = lambda model: hand_over_extra_states(
            plain_modules(described), plain_modules(model), CPU, missing
        )
        return described, info

    def set_extra_states(self, model: nn.Module) -> None:
        """See `ModuleCall`. `model` is the transformers model of the caller."""
        self._hand_over_states(model)

    def _put(self, described: nn.Module) -> None:
        """Give the model inside the tensors of the described one, with its ties, and the flags that it had."""
        values: dict[str, torch.Tensor] = dict(described.named_parameters(remove_duplicate=False))
        values |= described.named_buffers(remove_duplicate=False)
        lacking, others, used = [], [], set[str]()
        for named in named_tensors(self._inside):
            name = named.name
            used.add(name)
            if name in self._left:
                named.tensors[named.key] = None if self._is_stand_in else named.tensor
            elif name not in values:
                lacking.append(name)
            elif values[name].shape != named.tensor.shape:
                others.append(f"{name} {tuple(values[name].shape)} instead of {tuple(named.tensor.shape)}")
            else:
                named.tensors[named.key] = values[name].requires_grad_(named.tensor.requires_grad)
        problems = {
            "missing": lacking,
            "unexpected": sorted(values.keys() - used),
            "mismatched": others,
        }
        if texts := [f"{kind}: {listed(names)}" for kind, names in problems.items() if names]:
            raise CheckpointError(
                f"{self.name}: its tensors are not those of the {type(self._inside).__name__} in the module. "
                f"{'; '.join(texts)}. Build that from the configuration of the checkpoint, and name in leave= what you "
                "have added to it, and fill yourself"
            )


def _keep_all(parameter: torch.Tensor) -> FlatRange:
    return FlatRange(0, parameter.numel())


class PartsCall:
    """Loads of submodules, by prefix, and of the rest of a module. `make_rest` is given what `make` has made."""

    def __init__(
        self,
        make: Callable[[Context], nn.Module],
        parts: Mapping[str, Part],
        make_rest: Callable[[nn.Module], ModuleCall],
        paths: Collection[str],
    ) -> None:
        self.path = next(filter(is_stand_in, paths), next(iter(paths)))
        self.name, self.kwargs = ", ".join(map(origin, paths)), dict[str, Any]()
        self._make, self._parts, self._make_rest = make, parts, make_rest
        self._calls: dict[str, Call] = {}
        self._rest: ModuleCall | None = None

    def move(self, folder: str, _: dict[str, Any]) -> NoReturn:
        """See `Call`."""
        raise UnsupportedError(f"{folder}: a module of several checkpoints is found before its load")

    def run(self) -> NoReturn:
        """See `Call`."""
        raise UnsupportedError(f"{self.name}: nothing but lowmem_load fills a module of several checkpoints")

    def configuration(self, model: nn.Module) -> dict[str, str]:
        """See `Call`."""
        texts = {"class of the module": type(model).__name__}
        for prefix, call in self._calls.items():
            inside = model.get_submodule(prefix)
            texts |= {f"{prefix}: {key}": text for key, text in call.configuration(inside).items()}
        return texts

    def log_zero_init(self, model: nn.Module) -> None:
        """See `Call`."""

    def set_extra_states(self, model: nn.Module) -> None:
        """See `ModuleCall`."""
        for prefix, call in (*self._calls.items(), ("", self._rest)):
            if isinstance(call, ModuleCall | InnerCall):
                call.set_extra_states(model.get_submodule(prefix))

    def describe(self, context: Context) -> tuple[nn.Module, dict[str, Any]]:
        """See `Call`."""
        model = self._make(context)
        # The target knows the names of the whole module, so what no file of a part has is kept whole until the plan.
        inside = replace(context, keeps_of=lambda _: _keep_all)
        slots = slots_of(model)
        infos: dict[str, dict[str, Any]] = {}
        for prefix, part in self._parts.items():
            self._calls[prefix] = part(model.get_submodule(prefix))
            _, infos[prefix] = self._calls[prefix].describe(inside)
        for slot in slots:
            places = [place for name, place in zip(slot.names, slot.places, strict=True) if is_below(name, self._parts)]
            values = {id(tensors[key]): tensors[key] for tensors, key in places}
            if not values:
                continue
            first, *others = values.values()
            if any(not torch.equal(first, other) for other in others):
                raise CheckpointError(
                    f"{', '.join(slot.names)}: the module has one parameter for these, and the checkpoints differ"
                )
            if others or len(places) < len(slot.places):
                slot.put(first)
        rest = self._rest = self._make_rest(model)
        rest.name = rest.name or self.name
        _, infos[""] = rest.describe(context)
        return model, _joined(infos)


def _joined(infos: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the loading info of a module out of those of its parts."""
    joined: dict[str, Any] = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": []}
    for prefix, info in infos.items():
        start = f"{prefix}." if prefix else ""
        for kind in ("missing_keys", "unexpected_keys"):
            joined[kind] |= {start + name for name in info[kind]}
        joined["mismatched_keys"] += [(start + name, *shapes) for name, *shapes in info["mismatched_keys"]]
    return joined
