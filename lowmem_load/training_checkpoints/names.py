"""From the names of a training job's state dict to those of the model in it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from lowmem_load.errors import CheckpointError, ConfigError, listed

T = TypeVar("T")

_OF_TRAINING = re.compile(r"optim|sched|loader|train_state|trainer|rng|scaler|^state\.|^param_groups|progress")
"""In the first key of what is not a model: the states of optimizers, schedulers, data loaders and loops."""

_MODELS = ("model", "module", "state_dict")
"""First keys of a model, where there are other tensors beside it, such as an average of its weights."""

_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""What torch.compile, FSDP1 and activation checkpointing put into names."""

_OUTER = ("module.", "base_model.model.")
"""What DDP and PEFT put before all names."""

_ADAPTER = re.compile(r"\.lora_[A-Za-z_]+(\.|$)|\.modules_to_save\.")
"""In the names of adapters."""

_ADAPTER_NAME = re.compile(r"\.(?:lora_A|lora_embedding_A)\.([^.]+)(?:\.weight)?$|\.modules_to_save\.([^.]+)\.")
"""What PEFT calls the adapter, in the names of its parameters; not in those that it saves."""


_OF_OTHER_MODELS = {
    "tok_embeddings.": "are those of torchtitan's own models: convert it with its scripts/checkpoint_conversion",
    "decoder.layers.": "may be those of Megatron: export it with Megatron Bridge",
}
"""What to do about names of models that are none of transformers, by a beginning of such names."""


def advice_on(names: Iterable[str]) -> str:
    """Return what to do with weights of these names, which are not those of a configuration; "" if it is not known."""
    known = {text for name in names for start, text in _OF_OTHER_MODELS.items() if name.startswith(start)}
    return "".join(f". Its names {text}" for text in sorted(known))


def weights_in(where: str, entries: Mapping[tuple[str, ...], T], part: str | None) -> dict[str, T]:
    """Return what belongs to the model, by the names that the model gives.

    Args:
        where: for messages.
        entries: of a state dict, by the keys that lead to them.
        part: the keys of the model in the state dict, joined by ".": "model", "ema". None: found by their names.

    Raises:
        ConfigError: several parts may be the model, or there is no such part.
        CheckpointError: two names become one.
    """
    groups: dict[str, dict[str, T]] = {}
    for keys, value in entries.items():
        groups.setdefault(".".join(keys[:-1]), {})[keys[-1]] = value
    if part is None:
        part = _model_among(where, groups)
    if part not in groups:
        raise ConfigError(f"{where}: has no part {part!r}; it has {listed(sorted(map(repr, groups)))}")
    group = {name: value for name, value in groups[part].items() if part or not _OF_TRAINING.search(name)}
    return stripped(where, group)


def _model_among(where: str, groups: Iterable[str]) -> str:
    candidates = [group for group in groups if not _OF_TRAINING.search(group)]
    named = [group for group in candidates if group.rpartition(".")[2] in _MODELS]
    chosen = candidates if len(candidates) == 1 else named
    if len(chosen) != 1:
        raise ConfigError(
            f"{where}: its state dict has the parts {listed(sorted(map(repr, groups)))}; say which is the model: part="
        )
    return chosen[0]


def stripped(where: str, entries: Mapping[str, T]) -> dict[str, T]:
    """Return entries under the names that they have without the wrappers of training."""
    names = {name: _WRAPPERS.sub("", name) for name in entries}
    for outer in _OUTER:
        if names and all(name.startswith(outer) for name in names.values()):
            names = {old: name.removeprefix(outer) for old, name in names.items()}
    result: dict[str, T] = {}
    for old, name in names.items():
        if name in result:
            raise CheckpointError(f"{where}: {old} and another tensor are both {name} without the wrappers of training")
        result[name] = entries[old]
    return result


def without_adapters(where: str, entries: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Return the weights of the base model under its own names, and those of the adapter as PEFT saves them.

    Raises ConfigError if there are several adapters.
    """
    base: dict[str, T] = {}
    adapter: dict[str, T] = {}
    names = {match[1] or match[2] for match in map(_ADAPTER_NAME.search, entries) if match} - {"weight"}
    if len(names) > 1:
        raise ConfigError(f"{where}: holds the adapters {listed(sorted(names))}; only one can be written")
    (name_of_adapter,) = names or {"default"}
    for name, value in entries.items():
        if _ADAPTER.search(name):
            saved = name.replace(".modules_to_save.", ".").replace(f".{name_of_adapter}.", ".")
            adapter[f"{_OUTER[1]}{saved.removesuffix(f'.{name_of_adapter}')}"] = value
        else:
            base[name.replace(".base_layer.", ".").replace(".original_module.", ".")] = value
    return base, adapter
