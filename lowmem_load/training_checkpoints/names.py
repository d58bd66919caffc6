"""From the names of a training job's state dict to those of the model in it. Pure.

[Note: what is removed] A word in a name says nothing: a model may have a module called `scaler`, `module` or
`base_layer`. An entry is the trainer's because of where it lies in the whole state dict. A part of a name is removed if
all names begin with it, or if it stands where PEFT puts it. All that is left out is returned.

[Note: PEFT's names] PEFT puts `base_model.model.` before all names. A layer X that it trains has `X.base_layer.*` and,
for each adapter, `X.lora_A.ADAPTER.weight` and the like; a module that it trains whole `X.original_module.*` and
`X.modules_to_save.ADAPTER.*`. In what its `save_pretrained` writes the adapter's name is left out. Nothing else in a
name is PEFT's, whatever it is called.

Source: peft 0.15 to 0.21 `utils/save_and_load.py`, `tuners/tuners_utils.py` and `tuners/lora/layer.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from lowmem_load.errors import CheckpointError, ConfigError, UnsupportedError, listed
from lowmem_load.files.format import NESTS
from lowmem_load.planning.proof import prove_names
from lowmem_load.text import outer_prefix

T = TypeVar("T")

_OF_TRAINING = frozenset(
    (
        *("optimizer", "optimizers", "optim", "optim_state", "state", "param_groups", "scaler", "grad_scaler"),
        *("lr_scheduler", "lr_schedulers", "scheduler", "schedulers", "dataloader", "loader", "progress"),
        *("train_state", "trainer", "trainer_state", "rng", "rng_state", "rng_states"),
    )
)
"""Keys of dicts inside of a state dict that hold no model. The state dict of a module has no dicts in it."""

_STATE_KEYS = frozenset(
    (*("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg"), "fp32_param")
)
_OF_OPTIMIZER = re.compile(r"(?:^|\.)(state|param_groups)\.(.+)")

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What DDP, torch.compile, FSDP1 and activation checkpointing put before the names of all that they wrap."""

OF_PEFT = "base_model.model."

_OF_MODULES = ("lora_A", "lora_B")
"""Have a module for each adapter."""

_OF_PARAMETERS = ("lora_embedding_A", "lora_embedding_B", "trainable_tokens_delta")
"""Have a parameter for each adapter."""

MAGNITUDE = "lora_magnitude_vector"
"""Of DoRA: has a module for each adapter, and in older releases a parameter. Saved without `.weight`."""

TOKENS = "token_adapter"


@dataclass(frozen=True, slots=True)
class NamedWeights(Generic[T]):
    """The weights of a model in a state dict.

    Attributes:
        model: under the model's own names; those of the base model, if PEFT has wrapped it.
        left_out: names of all other entries.
        removed: what all names of the model began with.
        wrapped: what PEFT has made of the model: all of it, under PEFT's names. Empty if it has not.
        adapter: those of `wrapped` that are the adapter's.
        adapter_name: None if PEFT's `save_pretrained` has named the adapter's tensors.
    """

    model: dict[str, T]
    left_out: tuple[str, ...]
    removed: str
    wrapped: Mapping[str, T] = field(default_factory=dict)
    adapter: Mapping[str, T] = field(default_factory=dict)
    adapter_name: str | None = None


def weights_in(
    where: str, entries: Mapping[tuple[str, ...], T], part: str | None, *, has_adapter_config: bool = False
) -> NamedWeights[T]:
    """Return the model's weights under its own names, and those of an adapter under PEFT's.

    Args:
        where: for messages.
        entries: of a state dict, by the keys that lead to them.
        part: the keys of the model in the state dict, joined by ".": "model", "ema". None: found by their names.
        has_adapter_config: whether an adapter_config.json lies beside the checkpoint.

    Raises:
        ConfigError: several parts may be the model, there is no such part, or there are several adapters.
        CheckpointError: two names become one.
    """
    groups: dict[tuple[str, ...], dict[str, T]] = {}
    for keys, value in entries.items():
        groups.setdefault(keys[:-1], {})[keys[-1]] = value
    chosen = _model_among(where, groups) if part is None else _part_among(where, groups, part)
    group = groups[chosen]
    names = [name for name in group if not _is_of_optimizer(name, group)]
    outer = outer_prefix(names, _WRAPPERS)
    new_names = {(*chosen, name): name.removeprefix(outer) for name in names}
    left_out = [keys for keys in entries if keys not in new_names]
    prove_names(where, entries, new_names, left_out)
    weights = {new: entries[keys] for keys, new in new_names.items()}
    others = tuple(map(".".join, left_out))
    if not is_adapter(weights) and not (has_adapter_config and all(name.startswith(OF_PEFT) for name in weights)):
        return NamedWeights(weights, others, outer)
    base, adapter, adapter_name = _adapted(where, weights)
    return NamedWeights(base, others, outer, weights, adapter, adapter_name)


def _model_among(where: str, groups: Collection[tuple[str, ...]]) -> tuple[str, ...]:
    candidates = [group for group in groups if _OF_TRAINING.isdisjoint(group)]
    # Beside tensors at the top, a dict deep inside is more likely the extra state of a module.
    named = [group for group in candidates if group and group[-1] in NESTS and (len(group) == 1 or () not in groups)]
    chosen = candidates if len(candidates) == 1 else named
    if not candidates:
        raise CheckpointError(f"{where}: holds no weights of a model; its parts are {_shown(groups)}")
    if len(chosen) != 1:
        raise ConfigError(f"{where}: its state dict has the parts {_shown(groups)}; say which is the model: part=")
    return chosen[0]


def _part_among(where: str, groups: Collection[tuple[str, ...]], part: str) -> tuple[str, ...]:
    chosen = [group for group in groups if ".".join(group) == part]
    if len(chosen) != 1:
        raise ConfigError(f"{where}: has {len(chosen) or 'no'} part {part!r}; it has {_shown(groups)}")
    return chosen[0]


def _shown(groups: Iterable[tuple[str, ...]]) -> str:
    return listed(sorted(repr(".".join(group)) for group in groups))


def _is_of_optimizer(name: str, names: Collection[str]) -> bool:
    """Whether an entry is an optimizer's state of another entry: `state.NAME.exp_avg`, `state.exp_avg.NAME`."""
    match = _OF_OPTIMIZER.search(name)
    if match is None:
        return False
    (before, _, last), (first, _, after) = match[2].rpartition("."), match[2].partition(".")
    if match[1] == "param_groups":
        return last in ("lr", "initial_lr") and before in names
    return (last in _STATE_KEYS and before in names) or (first in _STATE_KEYS and after in names)


def without_wrappers(where: str, names: Collection[str]) -> dict[str, str]:
    """Return names without what wraps modules inside of a model, such as layers that were compiled one by one.

    A wrapper is the only child of its module. For names that a model checks afterwards.
    """
    children: dict[str, set[str]] = {}
    for name in names:
        above = ""
        for part in name.split("."):
            children.setdefault(above, set()).add(part)
            above = f"{above}.{part}"

    def inner(name: str) -> str:
        (*modules, own), kept, above = name.split("."), [], ""
        for part in modules:
            if part not in _WRAPPERS[1:] or len(children[above]) > 1:
                kept.append(part)
            above = f"{above}.{part}"
        return ".".join((*kept, own))

    new_names = {name: inner(name) for name in names}
    prove_names(where, names, new_names)
    return new_names


# -- what PEFT has wrapped: see [Note: PEFT's names] -------------------------------------------------------------------


class Place(NamedTuple):
    """What PEFT has put at the end of a name: the layer, what of it, and the adapter (None as saved)."""

    layer: str
    kind: str
    adapter: str | None


def place_in(name: str) -> Place | None:
    """Return what LoRA has put at the end of a name; None for a name of the base, or of a module that is saved."""
    *above, first, second, third = ("", "", *name.split("."))
    layer = ".".join(filter(None, above))
    if first in (*_OF_MODULES, MAGNITUDE) and third in ("weight", "bias"):
        return Place(layer, first, second)
    below = f"{layer}.{first}" if layer else first
    if second in (*_OF_PARAMETERS, MAGNITUDE):
        return Place(below, second, third)
    if second in _OF_MODULES and third in ("weight", "bias"):
        return Place(below, second, None)
    if third in (*_OF_PARAMETERS, MAGNITUDE):
        return Place(f"{below}.{second}", third, None)
    return None


def is_adapter(names: Collection[str]) -> bool:
    """Whether these are the names of a model that PEFT has wrapped with LoRA, or of an adapter of LoRA."""
    return all(name.startswith(OF_PEFT) for name in names) and any(map(place_in, names))


def _adapted(where: str, weights: Mapping[str, T]) -> tuple[dict[str, T], Mapping[str, T], str | None]:
    """Return the weights of the base model, those of the adapter, and its name. All names begin as PEFT's do.

    Raises:
        ConfigError: there are several adapters.
        UnsupportedError: the adapter is not of LoRA, and its base is there, too.
        CheckpointError: two names become one.
    """
    whole = _whole_modules(weights, ())
    places = {name: place for name in weights if name not in whole and (place := place_in(name)) is not None}
    adapters = {adapter for _, adapter in whole.values()}
    adapters |= {place.adapter for place in places.values() if place.adapter is not None}
    whole |= _whole_modules([name for name in weights if name not in places], adapters)
    if len(adapters) > 1:
        raise ConfigError(f"{where}: holds the adapters {listed(sorted(adapters))}; only one can be written")
    if not adapters:
        if not places and (inside := [name for name in weights if ".base_layer." in name]):
            raise UnsupportedError(
                f"{where}: {inside[0]}: holds an adapter that is not of LoRA, and its base; save the adapter with "
                "PEFT's save_pretrained"
            )
        return {}, weights, None
    layers, originals = {place.layer for place in places.values()}, {module for module, _ in whole.values()}
    own = {name: weights[name] for name in weights if name in places or name in whole}
    names = {name: _of_base(name, layers, originals).removeprefix(OF_PEFT) for name in weights if name not in own}
    prove_names(where, weights, names, own)
    return {new: weights[name] for name, new in names.items()}, own, adapters.pop()


def _whole_modules(names: Collection[str], adapters: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return the module and the adapter for tensors of modules that PEFT trains whole."""
    split = {name: name.split(".") for name in names}
    wrappers = {
        ".".join(parts[:place])
        for parts in split.values()
        for place, part in enumerate(parts)
        if part == "original_module"
    }
    found = {}
    for name, parts in split.items():
        for place in range(len(parts) - 2):
            module, adapter = ".".join(parts[:place]), parts[place + 1]
            if parts[place] == "modules_to_save" and (module in wrappers or adapter in adapters):
                found[name] = module, adapter
                break
    return found


def _of_base(name: str, layers: Collection[str], originals: Collection[str]) -> str:
    kept, above = [], ""
    for part in name.split("."):
        below = f"{above}.{part}" if above else part
        is_wrapper = (
            (part == "base_layer" and above in layers)
            or (part == TOKENS and below in layers)
            or (part == "original_module" and above in originals)
        )
        if not is_wrapper:
            kept.append(part)
        above = below
    return ".".join(kept)
