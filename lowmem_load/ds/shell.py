"""What DeepSpeed is given in a model's place, so that it makes an engine over some of its modules.

Empty containers, named as in the model, hold the chosen modules. So the engine partitions, hooks, reduces and saves
these under their own names, and its collectives depend on nothing else. The shell's forward is the whole model's, so
that the engine's bookkeeping around forward and backward happens as always.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

WHOLE_MODEL = "_whole_model"
"""Attribute of a shell that has the whole model."""

PLACEHOLDER = "lowmem_load_placeholder"
"""A parameter of one element that no forward uses: DeepSpeed makes no ZeRO-3 optimizer without a trainable one."""


class Shell(nn.Module):
    """Stands for the chosen modules of a model."""

    def __init__(self, model: nn.Module, chosen: Mapping[str, nn.Module], placeholder: nn.Parameter | None) -> None:
        super().__init__()
        self.__dict__[WHOLE_MODEL] = model  # not a child: its other modules are none of the engine's business
        for name, module in chosen.items():
            *path, last = name.split(".")
            container: nn.Module = self
            for part in path:
                if part not in container._modules:
                    container.add_module(part, nn.Module())
                container = container.get_submodule(part)
            container.add_module(last, module)
        if placeholder is not None:
            self.register_parameter(PLACEHOLDER, placeholder)
        # Checkpoints are the same with and without it: what was frozen may be trained later.
        self.register_state_dict_post_hook(_drop_placeholder)
        self.register_load_state_dict_pre_hook(_drop_placeholder)
        self.register_load_state_dict_post_hook(_miss_no_placeholder)
        self.train(model.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the whole model's forward."""
        return self.__dict__[WHOLE_MODEL](*args, **kwargs)


def _drop_placeholder(shell: nn.Module, state_dict: dict[str, Any], *_: Any) -> None:
    state_dict.pop(PLACEHOLDER, None)


def _miss_no_placeholder(shell: nn.Module, keys: Any) -> None:
    if PLACEHOLDER in keys.missing_keys:
        keys.missing_keys.remove(PLACEHOLDER)


def is_shell(model: nn.Module) -> bool:
    """Whether DeepSpeed is given `model` for a partial engine, so that what is whole in it is so on purpose."""
    return WHOLE_MODEL in vars(model)
