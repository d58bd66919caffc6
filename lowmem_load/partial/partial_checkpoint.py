"""The replicated tensors of a model under partial ZeRO-3, and the file that holds them in a checkpoint."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from lowmem_load.errors import CheckpointError, ConfigError, listed
from lowmem_load.targets.partition_choice import chosen_parameters

REPLICATED_FILE = "lowmem_load_whole_states.pt"
"""A file in the folder of the tag, next to DeepSpeed's. Its name must not change, or older checkpoints do not load."""

FORMAT = 1


def save_replicated(folder: str, state: Mapping[str, Any]) -> None:
    """Write the replicated part's state. The file appears when it is complete and readable.

    Raises:
        CheckpointError: the state holds objects that `load_replicated` refuses, such as a scheduler's own class.
    """
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, REPLICATED_FILE)
    unfinished = f"{path}.{socket.gethostname()}.{os.getpid()}"
    torch.save(_plain({"format": FORMAT, **state}), unfinished)
    try:
        torch.load(unfinished, map_location="cpu", weights_only=True, mmap=True)  # reads no tensor
    except Exception as error:
        os.unlink(unfinished)
        raise CheckpointError(f"{path}: the state could be written but not read again: {error}") from error
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


def find_checkpoint(load_dir: str, tag: str | None) -> str | None:
    """Return the folder of a tag; by default the tag in the file `latest`. None if there is none."""
    if tag is None:
        latest = os.path.join(load_dir, "latest")
        if not os.path.isfile(latest):
            return None
        with open(latest) as file:
            tag = file.read().strip()
    folder = os.path.join(load_dir, tag)
    return folder if os.path.isdir(folder) else None


def load_replicated(folder: str) -> dict[str, Any]:
    """Return the state that `save_replicated` wrote, in host memory. No pickled code is run.

    Raises:
        CheckpointError: the file is absent, damaged or of another format.
    """
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


class Outside:
    """The replicated tensors of a model.

    Attributes:
        parameters: by name.
        buffers: by name.
        frozen: parameters of the full model that required no gradient when this was made, by name.
    """

    def __init__(self, model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
        inside = chosen_parameters(dict(chosen))
        chosen_buffers = {id(buffer) for module in chosen.values() for buffer in module.buffers()}
        self.parameters = {name: p for name, p in model.named_parameters() if id(p) not in inside}
        self.frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self.buffers = {name: b for name, b in model.named_buffers() if id(b) not in chosen_buffers}
        self._model = model

    def move_to(self, device: torch.device, dtype: torch.dtype | None) -> None:
        """Move all tensors to a device; cast the parameters if a dtype is given."""
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(device, dtype if parameter.is_floating_point() else None)
        for name in self.buffers:
            owner, _, last = name.rpartition(".")
            module = self._model.get_submodule(owner)
            setattr(module, last, getattr(module, last).to(device))
            self.buffers[name] = getattr(module, last)

    def state(self, *, exclude_frozen: bool) -> dict[str, Any]:
        """Return the tensors for a checkpoint, and the names of frozen and excluded parameters."""
        return {
            "buffers": {name: buffer.detach() for name, buffer in self._persistent()["buffers"].items()},
            "parameters": {
                name: p.detach() for name, p in self.parameters.items() if p.requires_grad or not exclude_frozen
            },
            "frozen": list(self.frozen),
            "excluded": [name for name, p in self.parameters.items() if exclude_frozen and not p.requires_grad],
        }

    def check(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Raise ConfigError if a tensor of the checkpoint does not fit or, if strict, if names differ."""
        for kind, held in self._persistent().items():
            differ = sorted(set(state[kind]) ^ (set(held) - set(state["excluded"]))) if strict else []
            shapes = [name for name, value in state[kind].items() if name in held and value.shape != held[name].shape]
            if differ or shapes:
                raise ConfigError(
                    f"the checkpoint's replicated part has other {kind} than the model: {listed(differ + shapes)}"
                )
        frozen = [name for name in self.frozen if name not in state["frozen"] and name not in self.parameters]
        if frozen:
            raise ConfigError(
                f"{listed(frozen)} was trained when the checkpoint was saved and is frozen now, which DeepSpeed "
                "cannot load; freeze it after loading, or go by way of save_16bit_model"
            )

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Copy the tensors of a checkpoint into those of the same names."""
        for kind, held in self._persistent().items():
            for name, value in state[kind].items():
                if name in held:
                    held[name].copy_(value)

    def _persistent(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors that checkpoints hold, by kind and name."""
        names = self._model.state_dict().keys()
        buffers = {name: buffer for name, buffer in self.buffers.items() if name in names}
        return {"parameters": dict(self.parameters), "buffers": buffers}
