"""From the names of a training job's state dict to those of the model in it. Pure.

[Note: what is removed] A word in a name says nothing: a model may have a module called `scaler`, `module` or
`base_layer`. An entry is the trainer's because of where it lies in the whole state dict. A part of a name is removed if
all names begin with it, or if it stands where PEFT puts it (`adapter_names.py`). All that is left out is returned.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from lowmem_load.errors import CheckpointError, ConfigError, listed
from lowmem_load.formats.format import NESTS
from lowmem_load.planning.proof import prove_names
from lowmem_load.text import outer_prefix
from lowmem_load.training_checkpoints.adapter_names import OF_PEFT, Adapted, adapted, is_adapter

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

_OF_OTHER_MODELS = {
    "tok_embeddings.": "are those of torchtitan's own models: convert it with its scripts/checkpoint_conversion",
    "decoder.layers.": "may be those of Megatron: export it with Megatron Bridge",
}
"""What to do about names of models that are none of transformers, by a beginning of such names."""


@dataclass(frozen=True, slots=True)
class Weights(Generic[T]):
    """The weights of a model in a state dict.

    Attributes:
        model: under the model's own names; those of the base model, if PEFT has wrapped it.
        adapted: what PEFT has made of the model; None if it has not.
        left_out: names of all other entries.
        removed: what all names of the model began with.
    """

    model: dict[str, T]
    adapted: Adapted[T] | None
    left_out: tuple[str, ...]
    removed: str


def advice_on(names: Iterable[str]) -> str:
    """Return what to do with weights of these names, which are not those of a configuration; "" if it is not known."""
    known = {text for name in names for start, text in _OF_OTHER_MODELS.items() if name.startswith(start)}
    return "".join(f". Its names {text}" for text in sorted(known))


def weights_in(
    where: str, entries: Mapping[tuple[str, ...], T], part: str | None, *, has_adapter_config: bool = False
) -> Weights[T]:
    """Return the model's weights under its own names, and those of an adapter under the names by which PEFT saves them.

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
        return Weights(weights, None, others, outer)
    found = adapted(where, weights)
    return Weights(found.base, found, others, outer)


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
