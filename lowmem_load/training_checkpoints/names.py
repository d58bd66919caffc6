"""From the names of a training job's state dict to those of the model in it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from lowmem_load.errors import CheckpointError, ConfigError, listed
from lowmem_load.formats.format import NESTS
from lowmem_load.text import outer_prefix

T = TypeVar("T")

_OF_TRAINING = frozenset(
    (
        *("optimizer", "optimizers", "optim", "optim_state", "state", "param_groups", "scaler", "grad_scaler"),
        *("lr_scheduler", "lr_schedulers", "scheduler", "schedulers", "dataloader", "loader", "progress"),
        *("train_state", "trainer", "trainer_state", "rng", "rng_state", "rng_states"),
    )
)
"""First keys of what is not a model: the states of optimizers, schedulers, data loaders and loops."""

_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""What torch.compile, FSDP1 and activation checkpointing put into names."""

_OF_DDP, _OF_PEFT = "module", "base_model.model."
"""What DDP and PEFT put before all names."""

_ADAPTER = re.compile(r"\.(lora_[A-Za-z_]+|modules_to_save|token_adapter)(\.|$)")
"""In the names of adapters."""

_INNER = re.compile(
    r"\.base_layer\.|\.original_module\.|\.(?:lora_A|lora_embedding_A)\.(?!weight$)|\.modules_to_save\."
)
"""In the names of a model that PEFT has wrapped, and not in those that its `save_pretrained` writes."""

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


def weights_in(where: str, entries: Mapping[tuple[str, ...], T], part: str | None) -> tuple[dict[str, T], dict[str, T]]:
    """Return the model's weights under its own names, and those of an adapter under the names by which PEFT saves them.

    Args:
        where: for messages.
        entries: of a state dict, by the keys that lead to them.
        part: the keys of the model in the state dict, joined by ".": "model", "ema". None: found by their names.

    Raises:
        ConfigError: several parts may be the model, there is no such part, or there are several adapters.
        CheckpointError: two names become one.
    """
    groups: dict[str, dict[str, T]] = {}
    for keys, value in entries.items():
        is_model = part is not None or keys[0].partition(".")[0] not in _OF_TRAINING
        if is_model:
            groups.setdefault(".".join(keys[:-1]), {})[keys[-1]] = value
    if part is None:
        part = _model_among(where, groups)
    if part not in groups:
        raise ConfigError(f"{where}: has no part {part!r}; it has {listed(sorted(map(repr, groups)))}")
    names = {name: _WRAPPERS.sub("", name) for name in groups[part]}
    outer = outer_prefix(names.values(), [_OF_DDP])
    names = {old: name.removeprefix(outer) for old, name in names.items()}
    weights = _renamed(where, groups[part], names)
    if not all(name.startswith(_OF_PEFT) for name in weights):
        return weights, {}
    if not any(map(_INNER.search, weights)):
        return {}, weights  # what PEFT's save_pretrained writes: also heads and embeddings are the adapter's
    return _parted(where, weights)


def _model_among(where: str, groups: Iterable[str]) -> str:
    candidates = [group for group in groups if _OF_TRAINING.isdisjoint(group.split("."))]
    named = [group for group in candidates if group.rpartition(".")[2] in NESTS]
    chosen = candidates if len(candidates) == 1 else named
    if not candidates:
        raise CheckpointError(f"{where}: holds no weights of a model")
    if len(chosen) != 1:
        raise ConfigError(
            f"{where}: its state dict has the parts {listed(sorted(map(repr, groups)))}; say which is the model: part="
        )
    return chosen[0]


def _renamed(where: str, entries: Mapping[str, T], names: Mapping[str, str]) -> dict[str, T]:
    result: dict[str, T] = {}
    for old, name in names.items():
        if name in result:
            raise CheckpointError(f"{where}: {old} and another tensor are both {name} without the wrappers of training")
        result[name] = entries[old]
    return result


def _parted(where: str, weights: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Return the weights of the base model and those of the adapter, given those of a model that PEFT has wrapped."""
    adapter_names = {match[1] or match[2] for match in map(_ADAPTER_NAME.search, weights) if match} - {"weight"}
    if len(adapter_names) > 1:
        raise ConfigError(f"{where}: holds the adapters {listed(sorted(adapter_names))}; only one can be written")
    (adapter_name,) = adapter_names or {"default"}
    names: dict[str, str] = {}
    for name in weights:
        if _ADAPTER.search(name):
            saved = name.replace(".modules_to_save.", ".").replace(f".{adapter_name}.", ".")
            saved = saved.removesuffix(f".{adapter_name}")
            is_vector = saved.endswith(".lora_magnitude_vector.weight")  # of DoRA: PEFT saves it without its layer
            names[name] = saved.removesuffix(".weight") if is_vector else saved
        else:
            plain = re.sub(r"(\.base_layer)+\.", ".", name).replace(".original_module.", ".")
            names[name] = plain.removeprefix(_OF_PEFT)
    is_adapter = {name: bool(_ADAPTER.search(name)) for name in names}
    base = {name: new for name, new in names.items() if not is_adapter[name]}
    adapter = {name: new for name, new in names.items() if is_adapter[name]}
    return _renamed(where, weights, base), _renamed(where, weights, adapter)
