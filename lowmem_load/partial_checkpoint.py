"""What a checkpoint of partial ZeRO-3 holds beside DeepSpeed's own files: one file with the whole part."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from .errors import CheckpointError

WHOLE_FILE = "lowmem_load_whole_states.pt"
"""Lies in the folder of the tag, next to DeepSpeed's files."""

FORMAT = 1


def save_whole(folder: str, state: Mapping[str, Any]) -> None:
    """Write the whole part's state; the file appears complete or not at all."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, WHOLE_FILE)
    torch.save({"format": FORMAT, **state}, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def load_whole(folder: str) -> dict[str, Any]:
    """Return what `save_whole` wrote, in host memory. No pickled code is run.

    Raises:
        CheckpointError: the file is absent, damaged or of another format.
    """
    path = os.path.join(folder, WHOLE_FILE)
    if not os.path.isfile(path):
        raise CheckpointError(f"{folder}: no {WHOLE_FILE}; this is not a checkpoint that partial ZeRO-3 has saved")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a dozen classes for damaged files
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not of format {FORMAT}; it was written by another version of lowmem_load")
    return state
