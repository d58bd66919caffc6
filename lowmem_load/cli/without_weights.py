"""A folder to plan with where there is a config.json and no weights: headers of the files that a save would write."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowmem_load.api.model_sizes import config_of, without_values
from lowmem_load.families import diffusion
from lowmem_load.hf.remote_names import Checkpoint
from lowmem_load.saving.writer import lay_out

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
"""Ends of the names of files that have weights, or say where they are."""


@contextlib.contextmanager
def with_headers(checkpoint: Checkpoint, keywords: Mapping[str, Any]) -> Iterator[Checkpoint]:
    """Inside, a checkpoint that can be planned: itself, or its configuration with a file that has a header and a hole.

    The hole takes no space on the disk. The tensors have the names and shapes of the model's parameters, and the dtype
    of the configuration.
    """
    folder = Path(checkpoint.folder, keywords["subfolder"])
    names = os.listdir(folder) if folder.is_dir() else []
    if "config.json" not in names or any(name.endswith(WEIGHTS) for name in names):
        yield checkpoint
        return
    dtype = getattr(config_of(checkpoint, keywords), "dtype", None) or torch.float32
    model = without_values(checkpoint, keywords)
    tensors = {name: (_saved_dtype(tensor, dtype), tuple(tensor.shape)) for name, tensor in _saved(model)}
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary, keywords["subfolder"])
        made.mkdir(parents=True, exist_ok=True)
        (made / "config.json").symlink_to((folder / "config.json").resolve())
        start = "diffusion_pytorch_" if diffusion.is_model(model) else ""
        layout = lay_out(f"{start}model.safetensors", tensors, {"format": "pt"})
        with open(made / layout.name, "wb") as file:
            file.write(layout.header)
            file.truncate(layout.nbytes)
        yield Checkpoint(f"{checkpoint.name} (config.json alone: sizes as a save would write them)", temporary, None)


def _saved(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()  # a tied one once
    stored = model.state_dict()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in stored)


def _saved_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype
