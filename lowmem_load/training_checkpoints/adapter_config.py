"""The adapter_config.json of an adapter in a training checkpoint, which few trainers save next to it."""

from __future__ import annotations

import os
from typing import Any

from lowmem_load.errors import CheckpointError
from lowmem_load.files.index import read_json
from lowmem_load.training_checkpoints.open_model import SavedModel
from lowmem_load.training_checkpoints.saved_state import own_files

ADAPTER_CONFIG = "adapter_config.json"


def adapter_config(model: SavedModel, config: str | os.PathLike[str] | None) -> tuple[str, dict[str, Any]]:
    """Return a folder with the adapter_config.json of a model's adapter, and what it says.

    `config` is a folder that may have it. Raises CheckpointError if no folder has it, or if it is not that of tensors
    that PEFT itself has saved.
    """
    folder = model.companion(ADAPTER_CONFIG) or (None if config is None else os.fspath(config))
    paths = own_files(folder, [ADAPTER_CONFIG]) if folder else []
    if folder is None or not paths:
        place = next(near for near in reversed(model.near) if os.path.isdir(near))
        raise CheckpointError(
            f"{model.folder}: holds adapters, but no {ADAPTER_CONFIG} says their scale (lora_alpha). Make one with "
            f"the training's arguments: peft.LoraConfig(r=..., lora_alpha=...).save_pretrained({place!r}); in "
            "a training program, model.peft_config['default'].save_pretrained(...) does it. Or copy it into the folder "
            "of config"
        )
    values = read_json(paths[0])
    if not isinstance(values, dict):
        raise CheckpointError(f"{paths[0]}: is not a configuration of an adapter")
    if values.get("peft_type") == "LORA" and not model.adapter:
        _check(paths[0], values, model)
    return folder, values


def _check(path: str, values: dict[str, Any], model: SavedModel) -> None:
    """Raise CheckpointError if a configuration of LoRA is not that of the tensors, which PEFT has named."""
    has_magnitudes = any(name.endswith(".lora_magnitude_vector") for name in model.tensors)
    if has_magnitudes != bool(values.get("use_dora")):
        raise CheckpointError(
            f"{path}: use_dora is {values.get('use_dora')}, but the checkpoint has {'' if has_magnitudes else 'no '}"
            "tensors lora_magnitude_vector: it is of another adapter"
        )
    ranks = {values.get("r"), *(values.get("rank_pattern") or {}).values()}
    if values.get("target_parameters") or values.get("megatron_config"):
        return  # all experts have one tensor
    for name, tensor in model.tensors.items():
        if name.endswith((".lora_A.weight", ".lora_embedding_A")) and tensor.shape[0] not in ranks:
            raise CheckpointError(
                f"{path}: says r={values.get('r')}, but {name} is of shape {tensor.shape}: it is of another adapter"
            )
