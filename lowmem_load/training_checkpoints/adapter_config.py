"""The adapter_config.json of adapters in a training checkpoint, which few trainers save beside them."""

from __future__ import annotations

import os
from typing import Any

from lowmem_load.errors import CheckpointError, ConfigError, listed
from lowmem_load.formats.index import read_json
from lowmem_load.training_checkpoints.names import MAGNITUDE, place_in
from lowmem_load.training_checkpoints.open_model import SavedModel, own_files

ADAPTER_CONFIG = "adapter_config.json"

_OF_VERL = "lora_train_meta.json"
"""What verl saves of a LoRA: r, lora_alpha, task_type."""


def adapter_config(model: SavedModel, config: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return the adapter_config.json for a model's adapter; `config` is a folder that may have it.

    Raises CheckpointError if no file says it, or if it is not that of the tensors.
    """
    folder = model.companion(ADAPTER_CONFIG) or (None if config is None else os.fspath(config))
    if folder and (paths := own_files(folder, [ADAPTER_CONFIG])):
        values = read_json(paths[0])
        if not isinstance(values, dict):
            raise CheckpointError(f"{paths[0]}: is no configuration of an adapter")
        _check(paths[0], values, model)
        return values
    if (folder := model.companion(_OF_VERL)) is None:
        place = next(near for near in reversed(model.near) if os.path.isdir(near))
        raise CheckpointError(
            f"{model.folder}: holds adapters, but no {ADAPTER_CONFIG} says their scale (lora_alpha). Make one with "
            f"the training's arguments: peft.LoraConfig(r=..., lora_alpha=...).save_pretrained({place!r}); in "
            "a training program, model.peft_config['default'].save_pretrained(...) does it. Or copy it into the folder "
            "of config"
        )
    path = os.path.join(folder, _OF_VERL)
    meta = read_json(path)
    if not isinstance(meta, dict) or not all(isinstance(meta.get(key), int) for key in ("r", "lora_alpha")):
        raise CheckpointError(f"{path}: has no numbers r and lora_alpha")
    places = {name: place_in(name) for name in model.adapter}
    if others := [name for name, place in places.items() if place is None or place.kind not in ("lora_A", "lora_B")]:
        raise CheckpointError(
            f"{path}: describes a LoRA without {listed(others)}; make an {ADAPTER_CONFIG} with the arguments of the "
            f"training: peft.LoraConfig(...).save_pretrained({folder!r})"
        )
    values = {
        "peft_type": "LORA",
        "r": meta["r"],
        "lora_alpha": meta["lora_alpha"],
        "target_modules": sorted({place.layer.rpartition(".")[2] for place in places.values() if place is not None}),
        "task_type": meta.get("task_type"),
    }
    _check(path, values, model)
    return values


def _check(path: str, values: dict[str, Any], model: SavedModel) -> None:
    """Raise CheckpointError if a configuration of LoRA is not that of the tensors."""
    if values.get("peft_type") != "LORA":
        return
    places = {name: place_in(name) for name in model.adapter}
    has_magnitudes = any(place is not None and place.kind == MAGNITUDE for place in places.values())
    if has_magnitudes != bool(values.get("use_dora")):
        raise CheckpointError(
            f"{path}: use_dora is {values.get('use_dora')}, but the checkpoint has {'' if has_magnitudes else 'no '}"
            f"tensors {MAGNITUDE}: it is of another adapter"
        )
    ranks = {values.get("r"), *(values.get("rank_pattern") or {}).values()}
    if values.get("target_parameters") or values.get("megatron_config"):
        return  # all experts have one tensor
    for name, place in places.items():
        if (
            place is not None
            and place.kind in ("lora_A", "lora_embedding_A")
            and model.adapter[name].shape[0] not in ranks
        ):
            raise CheckpointError(
                f"{path}: says r={values.get('r')}, but {name} is of shape {model.adapter[name].shape}: it is of "
                "another adapter"
            )


def check_names_suffice(model: SavedModel, values: dict[str, Any]) -> None:
    """Raise ConfigError if only the model itself tells which of its tensors PEFT saves as the adapter's."""
    if model.adapted is None or model.adapted.adapter is None:
        return  # named by PEFT itself
    places = [place for name in model.adapter if (place := place_in(name)) is not None]
    reasons = {
        f"bias={values.get('bias')!r}": values.get("bias") not in (None, "none"),
        "embeddings among the targets": any(place.kind.startswith("lora_embedding") for place in places),
        "trainable_token_indices": any(place.kind == "trainable_tokens_delta" for place in places),
        f"peft_type={values.get('peft_type')!r}": values.get("peft_type") != "LORA",
        "a vocabulary that is not that of its base": _is_resized(model, values.get("base_model_name_or_path")),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ConfigError(
            f"{model.folder}: holds an adapter with {', '.join(found)}: which tensors PEFT saves of it depends on the "
            "model; name that by config"
        )


def _is_resized(model: SavedModel, base: object) -> bool:
    """Whether no tensor has as many rows as the vocabulary of the base, where that is in a folder."""
    path = os.path.join(base, "config.json") if isinstance(base, str) else ""
    if not model.tensors or not os.path.isfile(path):
        return False
    values = read_json(path)
    size = values.get("vocab_size") if isinstance(values, dict) else None
    return type(size) is int and not any(tensor.shape[:1] == (size,) for tensor in model.tensors.values())
