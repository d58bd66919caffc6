"""From the names of a training job's state dict to those of the model in it. Pure.

[Note: what is removed] A word in a name says nothing: a model may have a module called `scaler`, `module` or
`base_layer`. An entry is the trainer's because of where it lies in the state dict. A part of a name is removed if
all names begin with it, or if it stands where PEFT puts it. All that is left out is returned.

[Note: PEFT's names] PEFT puts `base_model.model.` before all names, and a layer that LoRA trains has for each adapter
`lora_A.ADAPTER.weight` and the like. In what PEFT's `save_pretrained` writes, the adapter's name is left out. Which
other names PEFT has changed depends on the model and the adapter, so PEFT itself says it (`models/peft.py`).

Source: peft 0.18 to 0.21 `utils/save_and_load.py` and `tuners/lora/layer.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Generic, NamedTuple, TypeVar

from lowmem_load.errors import CheckpointError, ConfigError, UnsupportedError, listed
from lowmem_load.files.format import NESTS
from lowmem_load.planning.proof import prove_names
from lowmem_load.text import outer_prefix

T = TypeVar("T")

OF_ACTIVATIONS = "_checkpoint_wrapped_module"
"""Key of torch's wrapper that recomputes activations: `state_dict` has names without it, but with those of others."""


_OF_TRAINING = {
    *("optimizer", "optimizers", "optim", "optim_state", "state", "param_groups", "scaler", "grad_scaler"),
    *("lr_scheduler", "lr_schedulers", "scheduler", "schedulers", "dataloader", "loader", "progress"),
    *("train_state", "trainer", "trainer_state", "rng", "rng_state", "rng_states"),
}
"""Keys of dicts inside of a state dict that are not the model. The state dict of a module has no dicts in it."""

_STATE_KEYS = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "fp32_param"}
_OF_OPTIMIZER = re.compile(r"(?:^|\.)(state|param_groups)\.(.+)")

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What DDP, torch.compile, FSDP1 and activation checkpointing put before the names of all that they wrap."""

_OF_PEFT = "base_model.model."

_OF_LORA = re.compile(r"\.lora_A\.(?:([^.]+)\.)?weight$|\.(?:lora_embedding_A|trainable_tokens_delta)(?:\.([^.]+))?$")
"""Names that each adapter of LoRA has, and in them its own, unless PEFT has left it out. See [Note: PEFT's names]."""


class NamedWeights(NamedTuple, Generic[T]):
    """The weights of a model in a state dict, under its own names, or under PEFT's if PEFT has wrapped it."""

    model: dict[str, T]
    left_out: tuple[str, ...]  # names of all other entries
    removed: str  # what all names of the model began with
    adapter: str | None  # its name, if PEFT has wrapped the model; "" if PEFT has saved the adapter alone, else None


def weights_in(
    where: str, entries: Mapping[tuple[str, ...], T], part: str | None, *, has_adapter_config: bool = False
) -> NamedWeights[T]:
    """Return the weights of the model in a state dict.

    Args:
        where: for messages.
        entries: of the state dict, by the keys that lead to them.
        part: the keys of the model in the state dict, joined by ".": "model", "ema". None: found by their names.
        has_adapter_config: whether an adapter_config.json lies next to the checkpoint.
    """
    groups: dict[tuple[str, ...], dict[str, T]] = {}
    for keys, value in entries.items():
        groups.setdefault(keys[:-1], {})[keys[-1]] = value
    chosen = _chosen(where, groups, part)
    group = groups[chosen]
    names = [name for name in group if not _is_of_optimizer(name, group)]
    outer = outer_prefix(names, _WRAPPERS)
    new_names = {(*chosen, name): name.removeprefix(outer) for name in names}
    left_out = [keys for keys in entries if keys not in new_names]
    prove_names(where, entries, new_names, left_out)
    weights = {new: entries[keys] for keys, new in new_names.items()}
    adapter = _adapter_in(where, weights, has_adapter_config=has_adapter_config)
    return NamedWeights(weights, tuple(map(".".join, left_out)), outer, adapter)


def _adapter_in(where: str, names: Collection[str], *, has_adapter_config: bool) -> str | None:
    """Return the name of the adapter in the names of a model. See `NamedWeights`."""
    adapters = {match[1] or match[2] or "" for match in map(_OF_LORA.search, names) if match}
    if not all(name.startswith(_OF_PEFT) for name in names) or not (adapters or has_adapter_config):
        return None
    if len(adapters) > 1:
        raise ConfigError(f"{where}: has the adapters {listed(sorted(adapters))}; only one can be written")
    if not adapters and (inside := [name for name in names if ".base_layer." in name]):
        raise UnsupportedError(
            f"{where}: {inside[0]}: is of an adapter that is not of LoRA; save the adapter with PEFT's save_pretrained"
        )
    return adapters.pop() if adapters else ""


def _chosen(where: str, groups: Collection[tuple[str, ...]], part: str | None) -> tuple[str, ...]:
    """Return the keys that lead to the dict of the model."""
    shown = listed(sorted(repr(".".join(group)) for group in groups))
    if part is not None:
        chosen = [group for group in groups if ".".join(group) == part]
        if len(chosen) != 1:
            raise ConfigError(f"{where}: has {len(chosen) or 'no'} part {part!r}; it has {shown}")
        return chosen[0]
    candidates = [group for group in groups if _OF_TRAINING.isdisjoint(group)]
    # Next to tensors at the top, a dict deep inside is more likely the extra state of a module.
    named = [group for group in candidates if group and group[-1] in NESTS and (len(group) == 1 or () not in groups)]
    chosen = candidates if len(candidates) == 1 else named
    if not candidates:
        raise CheckpointError(f"{where}: has no weights of a model; its parts are {shown}")
    if len(chosen) != 1:
        raise ConfigError(f"{where}: its state dict has the parts {shown}; say which is the model: part=")
    return chosen[0]


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
