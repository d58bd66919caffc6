"""Partial ZeRO-3 under Hugging Face Trainer and accelerate, which make their engine with `deepspeed.initialize`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import deepspeed
from torch import nn

from .partial import Partition, partitioned_modules
from .partial_initialize import initialize
from .whole import Average, Unused
from .zero3 import is_partitioned


@contextlib.contextmanager
def partial_zero3(
    partition: Partition | None = None, *, average: Average = "all", unused: Unused = "skip"
) -> Iterator[None]:
    """Inside, `deepspeed.initialize` of a partly partitioned model makes a `PartialEngine`, whoever calls it.

    So `with partial_zero3(): trainer.train()` trains with one. Models that are not partitioned in part, where no
    `partition` is given, get DeepSpeed's own engine. On exit everything is as it was.

    Args:
        partition: as for `lowmem_load.initialize`: for models that were not loaded with one.
        average: as for `lowmem_load.initialize`.
        unused: as for `lowmem_load.initialize`.
    """
    ordinary = deepspeed.initialize

    def initialize_either(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        deepspeed.initialize = ordinary
        try:
            model = kwargs.get("model")
            if args or not isinstance(model, nn.Module) or not (partition or _in_part(model)):
                made: tuple[Any, Any, Any, Any] = ordinary(*args, **kwargs)
                return made
            engine = initialize(
                model,
                kwargs.get("config") or kwargs.get("config_params"),
                partition=partition,
                optimizer=kwargs.get("optimizer"),
                lr_scheduler=kwargs.get("lr_scheduler"),
                average=average,
                unused=unused,
            )
            return engine, engine.optimizer, None, engine.lr_scheduler
        finally:
            deepspeed.initialize = initialize_either

    deepspeed.initialize = initialize_either
    try:
        yield
    finally:
        deepspeed.initialize = ordinary


def _in_part(model: nn.Module) -> bool:
    chosen = partitioned_modules(model, is_partitioned)
    return bool(chosen) and "" not in chosen
