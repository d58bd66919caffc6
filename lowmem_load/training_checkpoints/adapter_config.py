"""The adapter_config.json of adapters in a training checkpoint, which few trainers save beside them."""

from __future__ import annotations

import json
import os
import re

from lowmem_load.errors import CheckpointError
from lowmem_load.formats.index import read_json
from lowmem_load.training_checkpoints.open_model import SavedModel

_CONFIG = "adapter_config.json"

_OF_VERL = "lora_train_meta.json"
"""What verl saves of a LoRA: r, lora_alpha, task_type."""

_MODULE = re.compile(r"([^.]+)\.lora_[A-Za-z]+(?:_[A-Z])?\.")


def adapter_config(model: SavedModel, config: str | None) -> str:
    """Return the text of the adapter_config.json for a model's adapter; `config` is a folder that may have it.

    Raises CheckpointError if no file says it.
    """
    for folder in (model.companion(_CONFIG), config):
        if folder and os.path.isfile(os.path.join(folder, _CONFIG)):
            return json.dumps(read_json(os.path.join(folder, _CONFIG)), indent=2, sort_keys=True) + "\n"
    folder = model.companion(_OF_VERL)
    if folder is None:
        raise CheckpointError(
            f"{model.folder}: holds adapters, but no {_CONFIG} says their scale (lora_alpha): copy it there, or into "
            "the folder of config"
        )
    meta = read_json(os.path.join(folder, _OF_VERL))
    if not isinstance(meta, dict) or not all(isinstance(meta.get(key), int) for key in ("r", "lora_alpha")):
        raise CheckpointError(f"{os.path.join(folder, _OF_VERL)}: has no numbers r and lora_alpha")
    modules = sorted({match[1] for match in map(_MODULE.search, model.adapter) if match})
    made = {
        "peft_type": "LORA",
        "r": meta["r"],
        "lora_alpha": meta["lora_alpha"],
        "target_modules": modules,
        "task_type": meta.get("task_type"),
    }
    return json.dumps(made, indent=2, sort_keys=True) + "\n"
