"""Gives each engine a configuration of its own, on releases of DeepSpeed that take torch_adam out of the caller's."""

import copy
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine


def copy_configs() -> None:
    """The next engine of the same configuration would otherwise make DeepSpeed's own Adam, which is compiled first."""
    if "optimizer_parameters = self.optimizer_params()\n" not in inspect.getsource(DeepSpeedEngine):
        return
    ordinary = deepspeed.initialize

    @functools.wraps(ordinary)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        copied = {name: copy.deepcopy(value) if isinstance(value, Mapping) else value for name, value in kwargs.items()}
        return ordinary(*args, **copied)

    deepspeed.initialize = initialize
