"""Which files a model folder would have, without a model: one is made of a configuration, without memory, or none.

Part of the transformers seam, see `saver.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import huggingface_hub
import torch
import transformers

from lowmem_load.errors import ConfigError
from lowmem_load.hf.saver import SavedFile
from lowmem_load.planning.expression import Source, cast


def model_of(config: str | os.PathLike[str]) -> transformers.PreTrainedModel:
    """Return the model that a configuration names, on the meta device.

    `config` is a folder with config.json, or the name of a model on the Hub.

    Raises:
        ConfigError: it cannot be read, or names no class of transformers.
    """
    try:
        found = transformers.AutoConfig.from_pretrained(os.fspath(config))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config {config}: cannot be read: {error}") from error
    name = next(iter(getattr(found, "architectures", None) or ()), None)
    kind = getattr(transformers, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ConfigError(
            f"config {config}: its 'architectures' name {name}, which is no model of transformers; name one that "
            "is, or pass config=False, which writes the parameters under the names that the checkpoint has"
        )
    with torch.device("meta"):
        model = kind(found)
    model.tie_weights()
    if os.path.isfile(os.path.join(config, "generation_config.json")):
        model.generation_config = transformers.GenerationConfig.from_pretrained(os.fspath(config))
    return model


def describe_plain(
    tensors: Mapping[str, Source], scratch: Path, *, dtype: torch.dtype, max_shard_size: int | str
) -> list[SavedFile]:
    """Return the files of weights of tensors under their own names; write the index of several to `scratch`."""
    expressions = {
        name: cast(source, dtype) if source.dtype.is_floating_point else source for name, source in tensors.items()
    }
    empty = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in expressions.items()}
    split = huggingface_hub.split_torch_state_dict_into_shards(
        empty, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (scratch / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return [
        SavedFile(file, {name: expressions[name] for name in names}, {"format": "pt"})
        for file, names in split.filename_to_tensors.items()
    ]
