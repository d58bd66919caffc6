"""What a load needs of a family of models: name, files, how to describe one, what ranks compare; and who may do it."""

from __future__ import annotations

import os
from typing import Any, Protocol

from torch import nn

from lowmem_load.config.settings import Settings
from lowmem_load.errors import ConfigError
from lowmem_load.files.stand_ins import origin
from lowmem_load.symbolic.constructor import Context

PLACED_BY_STOCK = ("device_map", "quantization_config", "gguf_file")
"""Keywords of loads that transformers itself does under stages 0 to 2."""

SHARDS = ("distributed_config", "tp_plan", "tp_size")
"""Keywords by which `from_pretrained` shards a model."""


class Call(Protocol):
    """A load of one model that has not run yet.

    `TransformersCall` is that of transformers; `ModuleCall` fills any module by names; `DiffusersCall` is diffusers'.

    Attributes:
        path: of its files: a folder, a file, a Hub id or a URL.
        name: for messages: what the path stands for.
        kwargs: keywords that choose files and place the model, as `from_pretrained` of transformers has them.
    """

    path: str
    name: str
    kwargs: dict[str, Any]

    def move(self, folder: str, kwargs: dict[str, Any]) -> None:
        """Let it load from a folder, by these keywords."""
        kwargs.pop("pretrained_model_name_or_path", None)
        self.path, self.name, self.kwargs = folder, origin(folder), kwargs

    def run(self) -> tuple[nn.Module, dict[str, Any]]:
        """Load as without lowmem_load; return the model and the loading info."""

    def describe(self, context: Context) -> tuple[nn.Module, dict[str, Any]]:
        """Return a model of expressions and the loading info. `run` may be called after."""

    def configuration(self, model: nn.Module) -> dict[str, str]:
        """Return what must be equal on all ranks beside parameters and files, as text by topic."""

    def log_zero_init(self, _: nn.Module, /) -> None:
        """Log what the family's own loader logs when it builds a model under ZeRO-3: nothing but for transformers."""
        return


def is_left_alone(call: Call, settings: Settings) -> bool:
    """Return whether transformers does a load by itself, also inside `streaming()`."""
    return settings.stage < 3 and any(call.kwargs.get(name) for name in PLACED_BY_STOCK)


def is_local(call: Call) -> bool:
    """Return whether nothing can come from the Hub, not even the base model of an adapter."""
    folder = os.path.join(call.path, call.kwargs.get("subfolder") or "")
    return os.path.isdir(call.path) and not os.path.isfile(os.path.join(folder, "adapter_config.json"))


def refuse_device_map(call: Call, settings: Settings) -> None:
    """Raise ConfigError for a device_map under ZeRO-3."""
    if settings.stage == 3 and call.kwargs.get("device_map") is not None:
        raise ConfigError(f"{call.name}: device_map and ZeRO-3 both place parameters; remove device_map")
