"""What a load needs of a family of models: name, files, how to describe one, what ranks compare."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from lowmem_load.symbolic.constructor import Context


class Call(Protocol):
    """A load of one model that has not run yet.

    `hf.loader.Call` is that of transformers; `ModuleCall` fills any module by names; `DiffusersCall` is diffusers'.

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

    def run(self) -> tuple[nn.Module, dict[str, Any]]:
        """Load as without lowmem_load; return the model and the loading info."""

    def describe(self, context: Context) -> tuple[nn.Module, dict[str, Any]]:
        """Return a model of expressions and the loading info. `run` may be called after."""

    def configuration(self, model: nn.Module) -> dict[str, str]:
        """Return what must be equal on all ranks beside parameters and files, as text by topic."""

    def log_zero_init(self, model: nn.Module) -> None:
        """Log what the family's own loader logs when it builds a model under ZeRO-3."""
