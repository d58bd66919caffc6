"""Modules that the caller has built: filled by the names of tensors in files, or by transformers' own loader.

The described module is the caller's, or one like it that stands for its shards: see `stand_in_for`.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
from torch import nn

from lowmem_load.errors import CheckpointError, ConfigError, UnsupportedError, listed, outside_level
from lowmem_load.files.format import NESTS
from lowmem_load.files.stand_ins import origin
from lowmem_load.models.loader import Call, TransformersCall, tensors_in
from lowmem_load.models.model_folder import FILE_KEYWORDS, files_of
from lowmem_load.models.skeleton import hand_over
from lowmem_load.models.wrappers import (
    NamedTensor,
    copied,
    extra_states,
    named_modules,
    named_tensors,
    plain_name,
    refuse_differences,
)
from lowmem_load.planning.proof import prove_names
from lowmem_load.planning.regions import FlatRange
from lowmem_load.symbolic.attributes import hand_over_attributes
from lowmem_load.symbolic.constructor import Context
from lowmem_load.symbolic.initialise import CPU
from lowmem_load.symbolic.tensor import SymbolicTensor
from lowmem_load.text import outer_prefix

T = TypeVar("T")

Rename: TypeAlias = Callable[[str], "str | None"] | Mapping[str, str]
"""Turns the name of a tensor in the files into its name in the module, None or "" for one that is left out: a function,
or a mapping of regular expressions, of which all are substituted, in order."""

Build = Callable[[], nn.Module]


class ModuleTensor:
    """One parameter or buffer of a module, in all of its places. `keys` are its names in the module's state dict."""

    def __init__(self, places: list[NamedTensor]) -> None:
        self._places, self.tensor = places, places[0].tensor
        self.names = [place.name for place in places]
        self.keys = [place.name for place in places if place.is_persistent]

    def put(self, value: torch.Tensor | None) -> None:
        """Put a value into all places; it has the dtype of the module."""
        if value is not None and self._places[0].is_parameter:
            value = nn.Parameter(value, requires_grad=self.tensor.requires_grad)
        for place in self._places:
            place.tensors[place.key] = value


class ModuleCall(Call):
    """A load of a module by names, which is described. See `load_into` for `rename`, `strict`, `skip` and `build`.

    `is_stand_in`: the module is not the caller's, and has no place for what the caller fills.
    """

    def __init__(
        self,
        path: str,
        model: nn.Module,
        kwargs: dict[str, Any],
        *,
        rename: Rename | None = None,
        strict: bool = True,
        skip: Collection[str] = (),
        build: Build | None = None,
        is_stand_in: bool = False,
    ) -> None:
        if unknown := kwargs.keys() - FILE_KEYWORDS:
            raise ConfigError(f"{', '.join(sorted(unknown))}: not a keyword of a load by names")
        self.path, self.name, self.kwargs = path, origin(path), kwargs
        self._model, self._rename, self._build = model, rename, build
        self._strict, self._skip = strict, {plain_name(model, name) for name in skip}
        self._is_stand_in = is_stand_in

    def run(self) -> NoReturn:
        """See `Call`."""
        raise UnsupportedError(f"{self.name}: nothing but lowmem_load fills a module by names")

    def describe(self, context: Context) -> tuple[nn.Module, dict[str, Any]]:
        """See `Call`."""
        model = self._model
        context.check_built(model)
        if not context.is_quiet:
            _warn_of_code(model, self.name)
        context.constructor.note(model)
        slots = tensors_of(model)
        weights = (
            tensors_in(files_of(self.path, **self.kwargs), context) if context.weights is None else context.weights
        )
        children = {name.partition(".")[0] for slot in slots for name in slot.names}
        tensors, left_out = renamed(weights, self._rename, children)
        _run_code_of_torch(model, tensors)
        states = extra_states(model)
        of_files = {name: tensors.pop(name) for name in states if name in tensors and name not in self._skip}
        left = self._left(slots, states)
        others = [slot for slot in slots if slot not in left]
        found, problems = _match(others, tensors, self.name)
        known = {name for slot in others for name in slot.keys} | {name for slot in left for name in slot.names}
        unexpected = tensors.keys() - known - self._skip
        problems["missing"] += states.keys() - of_files.keys() - self._skip
        refuse_differences(
            f"{self.name}: its tensors are not those of {type(model).__name__}",
            {**problems, "unexpected": unexpected if self._strict else ()},
            "Turn names into those of the module by rename=, give values to what no file has and name it in skip=, "
            "and pass strict=False to pass over tensors that the module does not have",
        )
        self._compute_buffers(model, others, context)
        for name, tensor in of_files.items():
            assert isinstance(tensor, SymbolicTensor)
            states[name].set_extra_state(context.read_now(tensor.expression, "set_extra_state"))
        for slot, tensor in found:
            slot.put(tensor.to(slot.tensor.dtype))
        for slot in left if self._is_stand_in else ():
            slot.put(None)
        info = {"missing_keys": set(), "unexpected_keys": unexpected | left_out, "mismatched_keys": []}
        return model, info

    def _left(self, slots: list[ModuleTensor], states: Collection[str]) -> list[ModuleTensor]:
        """Return the tensors that the caller fills. `states`: names of extra states."""
        left = [slot for slot in slots if not self._skip.isdisjoint(slot.names)]
        if unknown := self._skip - {name for slot in left for name in slot.names}.union(states):
            raise ConfigError(f"skip: the module has no parameter or buffer {', '.join(sorted(unknown))}")
        if empty := [slot.names[0] for slot in left if slot.tensor.is_meta and not self._is_stand_in]:
            raise ConfigError(f"skip: {', '.join(empty)} are on the meta device; give them values first")
        return left

    def _compute_buffers(self, model: nn.Module, slots: list[ModuleTensor], context: Context) -> None:
        """Give buffers that no state dict has the values that `build` computes; refuse those without."""
        bare = [slot for slot in slots if not (slot.keys or context.constructor.is_known(slot.tensor))]
        computed: dict[str, torch.Tensor] = {}
        if self._build is not None:
            with context.constructor.building():
                built = self._build()
            computed = {named.name: named.tensor for named in named_tensors(built) if not named.is_parameter}
            hand_over_attributes(dict(named_modules(built)), dict(named_modules(model)), CPU)
        others, lost = [], []
        for slot in bare:
            name, value = slot.names[0], next((computed[name] for name in slot.names if name in computed), slot.tensor)
            if value.shape != slot.tensor.shape:
                others.append(f"{name} {tuple(value.shape)} instead of {tuple(slot.tensor.shape)}")
            elif not context.constructor.is_known(value):
                lost.append(name)
            else:
                slot.put(value.to(slot.tensor.dtype))
        if others:
            raise ConfigError(f"build: makes buffers of other shapes than the module has: {', '.join(others)}")
        if lost:
            raise UnsupportedError(
                f"{type(model).__name__}: no file has the buffers {', '.join(lost)}, and their values are not known. "
                "Pass build=, a function that builds the module: it computes them. Or fill them yourself, and name "
                "them in skip="
            )


def tensors_of(model: nn.Module) -> list[ModuleTensor]:
    """Return the distinct parameters and buffers of a module, in its order."""
    places: dict[int, list[NamedTensor]] = {}
    for named in named_tensors(model):
        places.setdefault(id(named.tensor), []).append(named)
    return [ModuleTensor(same) for same in places.values()]


def renamed(
    tensors: Mapping[str, T], rename: Rename | None, children: Collection[str]
) -> tuple[dict[str, T], set[str]]:
    """Return tensors under the names of the module, and which are left out. Raise CheckpointError if two get one name.

    Without `rename`, what training code puts before all names is dropped. `children` are the first parts of the names
    in the module.
    """
    # All names of a compiled module begin with "_orig_mod".
    outer = outer_prefix(tensors.keys(), [key for key in (*NESTS, "_orig_mod") if key not in children])
    new_name = (lambda name: name.removeprefix(outer)) if rename is None else _as_function(rename)
    names = {old: new for old in tensors if (new := new_name(old))}
    left_out = tensors.keys() - names.keys()
    prove_names("rename", tensors, names, left_out)
    return {new: tensors[old] for old, new in names.items()}, left_out


def _as_function(rename: Rename) -> Callable[[str], str | None]:
    if not isinstance(rename, Mapping):
        return rename
    patterns = [(re.compile(pattern), new) for pattern, new in rename.items()]

    def substitute(name: str) -> str:
        for pattern, new in patterns:
            name = pattern.sub(new, name)
        return name

    return substitute


def _warn_of_code(model: nn.Module, where: str) -> None:
    """Warn of code that `load_state_dict` would run: it may give other values than the files have."""
    named = []
    for name, module in model.named_modules():
        own = vars(module)
        hooks = [*own["_load_state_dict_pre_hooks"].values(), *own["_load_state_dict_post_hooks"].values()]
        code = [getattr(hook, "hook", hook) for hook in hooks]  # torch wraps those of the old kind
        code += [type(module).load_state_dict, type(module)._load_from_state_dict]
        if not all(getattr(function, "__module__", "").startswith(("torch.", "lowmem_load.")) for function in code):
            named.append(name or type(module).__name__)
    if named:
        warnings.warn(
            f"{where}: {listed(named)}: load_state_dict would run code of these modules (hooks, overridden methods); "
            "load_into does not. If it changes values, change them yourself",
            stacklevel=outside_level(),
        )


def _run_code_of_torch(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Do what torch's own modules do in `load_state_dict` before tensors are copied: old names, a counter of 0.

    Source: torch 2.13 `nn/utils/parametrizations.py`, `weight_norm`; `nn/modules/batchnorm.py`, `_NormBase`.
    """
    for plain, module in named_modules(model):
        prefix = f"{plain}." if plain else ""
        for hook in vars(module)["_load_state_dict_pre_hooks"].values():
            if getattr(getattr(hook, "hook", hook), "__module__", "").startswith("torch.nn."):
                hook(tensors, prefix, {}, True, [], [], [])
        counter = f"{prefix}num_batches_tracked"
        is_norm = isinstance(module, nn.modules.batchnorm._NormBase)
        if is_norm and vars(module)["_buffers"].get("num_batches_tracked") is not None and counter not in tensors:
            tensors[counter] = torch.zeros((), dtype=torch.int64, device="cpu")


def _match(
    slots: list[ModuleTensor], tensors: Mapping[str, torch.Tensor], where: str
) -> tuple[list[tuple[ModuleTensor, torch.Tensor]], dict[str, list[str]]]:
    """Return the tensor of the files for each of the module's, and the names of those that have none of their shape."""
    found: list[tuple[ModuleTensor, torch.Tensor]] = []
    problems: dict[str, list[str]] = {"missing": [], "mismatched": []}
    for slot in slots:
        names = [name for name in slot.keys if name in tensors]
        shape = tuple(slot.tensor.shape)
        if others := {tuple(tensors[name].shape) for name in names} - {shape}:
            problems["mismatched"].append(f"{slot.names[0]} {others.pop()} instead of {shape}")
            continue
        if names:
            found.append((slot, tensors[names[0]]))
        elif slot.keys:
            problems["missing"].append(slot.names[0])
        for other in names[1:]:
            if not torch.equal(tensors[names[0]], tensors[other]):
                raise CheckpointError(
                    f"{where}: {names[0]} and {other} differ, and the module has one parameter for both; give each one "
                    "of its own, or leave one out by rename="
                )
    return found, problems


# -- transformers models, by its own loader ----------------------------------------------------------------------------


class BuiltModelCall(TransformersCall):
    """A load of a transformers model that the caller has built, and of which the caller fills the tensors `left`.

    It gets the tensors of the model that another call describes.
    """

    def __init__(self, call: Call, model: nn.Module, left: Collection[str]) -> None:
        vars(self).update(vars(call))
        self._model, self._left = model, left

    def describe(self, context: Context) -> tuple[nn.Module, dict[str, Any]]:
        """See `Call`."""
        # Wrappers give other names to modules of the caller's model, so it keeps all that no file has until the plan.
        in_full = replace(context, keeps_of=lambda _: lambda parameter: FlatRange(0, parameter.numel()))
        described, info = super().describe(in_full)
        if getattr(described, "hf_quantizer", None) is not None:
            raise UnsupportedError(
                f"{self.name}: load_into cannot fill a quantized model under ZeRO-3; call load_model"
            )
        self._put(described)
        hand_over(described, self._model, CPU, info["missing_keys"])
        return self._model, info

    def _put(self, described: nn.Module) -> None:
        """Give the caller's model the tensors of the described one, with its ties, and the flags that it had."""
        values = {named.name: named.tensor for named in named_tensors(described)}
        lacking, others, used = [], [], set[str]()
        for named in named_tensors(self._model):
            name = named.name
            used.add(name)
            if name in self._left:
                continue
            if name not in values:
                lacking.append(name)
            elif values[name].shape != named.tensor.shape:
                others.append(f"{name} {tuple(values[name].shape)} instead of {tuple(named.tensor.shape)}")
            else:
                named.tensors[named.key] = values[name].requires_grad_(named.tensor.requires_grad)
        refuse_differences(
            f"{self.name}: its tensors are not those of the {type(self._model).__name__} that was built",
            {"missing": lacking, "unexpected": values.keys() - used, "mismatched": others},
            "Build that from the configuration of the checkpoint, and name in skip= what you have added to it, and "
            "fill yourself",
        )


@contextlib.contextmanager
def as_before_if_it_fails(model: nn.Module) -> Iterator[None]:
    """Inside, an error leaves what modules refer to as it was: tensors, attributes, and what is in their dicts."""
    dicts = [own for module in model.modules() for own in (vars(module), *vars(module).values())]
    before = [(own, dict(own)) for own in dicts if isinstance(own, dict)]
    try:
        yield
    except BaseException:
        for own, items in before:
            own.clear()
            own.update(items)
        raise


# -- modules that are described in the place of others -----------------------------------------------------------------


def stand_in_for(model: nn.Module) -> nn.Module:
    """Return a module like another, on meta, to describe in its place. Ties are kept; all but tensors is shared."""
    tensors: dict[int, torch.Tensor] = {}

    def bare(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in tensors:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            tensors[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        return tensors[id(tensor)]

    made: nn.Module = copied(model, {}, bare)
    return made
