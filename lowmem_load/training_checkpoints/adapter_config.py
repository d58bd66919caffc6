"""The adapter_config.json of adapters in a training checkpoint, which few trainers save beside them."""

from __future__ import annotations

import os
from typing import Any

from lowmem_load.errors import CheckpointError
from lowmem_load.files.index import read_json
from lowmem_load.training_checkpoints.names import MAGNITUDE, place_in
from lowmem_load.training_checkpoints.open_model import SavedModel, own_files

ADAPTER_CONFIG = "adapter_config.json"


def adapter_config(model: SavedModel, config: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return the adapter_config.json for a model's adapter; `config` is a folder that may have it.

    Raises CheckpointError if no file says it, or if it is not that of the tensors.
    """
    folder = model.companion(ADAPTER_CONFIG) or (None if config is None else os.fspath(config))
    paths = own_files(folder, [ADAPTER_CONFIG]) if folder else []
    if not paths:
        place = next(near for near in reversed(model.near) if os.path.isdir(near))
        raise CheckpointError(
            f"{model.folder}: holds adapters, but no {ADAPTER_CONFIG} says their scale (lora_alpha). Make one with "
            f"the training's arguments: peft.LoraConfig(r=..., lora_alpha=...).save_pretrained({place!r}); in "
            "a training program, model.peft_config['default'].save_pretrained(...) does it. Or copy it into the folder "
            "of config"
        )
    values = read_json(paths[0])
    if not isinstance(values, dict):
        raise CheckpointError(f"{paths[0]}: is no configuration of an adapter")
    if values.get("peft_type") == "LORA":
        _check(paths[0], values, model)
    return values


def _check(path: str, values: dict[str, Any], model: SavedModel) -> None:
    """Raise CheckpointError if a configuration of LoRA is not that of the tensors."""
    places = {name: place for name in model.adapter if (place := place_in(name)) is not None}
    has_magnitudes = any(place.kind == MAGNITUDE for place in places.values())
    if has_magnitudes != bool(values.get("use_dora")):
        raise CheckpointError(
            f"{path}: use_dora is {values.get('use_dora')}, but the checkpoint has {'' if has_magnitudes else 'no '}"
            f"tensors {MAGNITUDE}: it is of another adapter"
        )
    ranks = {values.get("r"), *(values.get("rank_pattern") or {}).values()}
    if values.get("target_parameters") or values.get("megatron_config"):
        return  # all experts have one tensor
    for name, place in places.items():
        if place.kind in ("lora_A", "lora_embedding_A") and model.adapter[name].shape[0] not in ranks:
            raise CheckpointError(
                f"{path}: says r={values.get('r')}, but {name} is of shape {model.adapter[name].shape}: it is of "
                "another adapter"
            )
