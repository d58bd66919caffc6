"""What of a model is not partitioned: its parameters and buffers, as checkpoints of partial ZeRO-3 hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowmem_load.errors import ConfigError, listed
from lowmem_load.targets.choice import chosen_parameters


class Outside:
    """The tensors of a model that are not partitioned.

    Args:
        model: the whole model.
        chosen: its partitioned modules, by name.

    Attributes:
        parameters: by name.
        buffers: by name.
        frozen: parameters of the whole model that required no gradient when this was made, by name.
    """

    def __init__(self, model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
        inside = chosen_parameters(dict(chosen))
        chosen_buffers = {id(buffer) for module in chosen.values() for buffer in module.buffers()}
        self.parameters = {name: p for name, p in model.named_parameters() if id(p) not in inside}
        self.frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self.buffers = {name: b for name, b in model.named_buffers() if id(b) not in chosen_buffers}
        self._model = model

    def move_to(self, device: torch.device, dtype: torch.dtype | None) -> None:
        """Move all there; cast parameters, if a dtype is given."""
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(device, dtype if parameter.is_floating_point() else None)
        for name in self.buffers:
            owner, _, last = name.rpartition(".")
            module = self._model.get_submodule(owner)
            setattr(module, last, getattr(module, last).to(device))
            self.buffers[name] = getattr(module, last)

    def state(self, *, exclude_frozen: bool) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {
            "buffers": {name: buffer.detach() for name, buffer in self._persistent()["buffers"].items()},
            "parameters": {
                name: p.detach() for name, p in self.parameters.items() if p.requires_grad or not exclude_frozen
            },
            "frozen": list(self.frozen),
            "excluded": [name for name, p in self.parameters.items() if exclude_frozen and not p.requires_grad],
        }

    def check(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Raise ConfigError where `load` would not load all of a checkpoint, or, if strict, into all of the model."""
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
        """Copy what a checkpoint holds into the tensors of the same names."""
        for kind, held in self._persistent().items():
            for name, value in state[kind].items():
                if name in held:
                    held[name].copy_(value)

    def _persistent(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors that checkpoints hold, by kind and name."""
        names = self._model.state_dict().keys()
        buffers = {name: buffer for name, buffer in self.buffers.items() if name in names}
        return {"parameters": dict(self.parameters), "buffers": buffers}
