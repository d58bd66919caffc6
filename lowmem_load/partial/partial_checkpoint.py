"""The file that holds the replicated part of a model in a checkpoint of partial ZeRO-3."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lowmem_load.errors import CheckpointError
from lowmem_load.training_checkpoints.zero_checkpoint import REPLICATED_FILE

FORMAT = 1


def save_replicated(folder: str, state: Mapping[str, Any]) -> None:
    """Write the replicated part's state. The file appears when `load_replicated` can read it."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, REPLICATED_FILE)
    unfinished = f"{path}.{socket.gethostname()}.{os.getpid()}"
    try:
        torch.save(_plain({"format": FORMAT, **state}), unfinished)
        torch.load(unfinished, map_location="cpu", weights_only=True, mmap=True)  # reads no tensor
    except Exception as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise CheckpointError(f"{path}: cannot be written so that it can be read again: {error}") from error
    os.replace(unfinished, path)


def _plain(value: Any) -> Any:
    """Return `value` with Python numbers for those of numpy, which functions of schedulers often return."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value


def load_replicated(folder: str) -> dict[str, Any]:
    """Return the state that `save_replicated` wrote, in host memory. No pickled code is run."""
    path = os.path.join(folder, REPLICATED_FILE)
    if not os.path.isfile(path):
        raise CheckpointError(f"{folder}: no {REPLICATED_FILE}; this is not a checkpoint that partial ZeRO-3 has saved")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a dozen classes for damaged files
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not of format {FORMAT}; it was written by another version of lowmem_load")
    return state
