"""Reads an expression whole, at once: for code that must know a value before anything can be planned."""

from __future__ import annotations

import torch

from lowmem_load.io.executor import Executor
from lowmem_load.planning.expression import Expression, numel
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.ranges import FlatRange


def read_whole(executor: Executor, expression: Expression) -> torch.Tensor:
    """Return `expression` as a tensor in host memory.

    Raises:
        CheckpointError: it cannot be read.
    """
    planner = Planner()
    fill = planner.plan_fill("a value", expression, FlatRange(0, numel(expression)))
    whole = torch.empty(fill.numel, dtype=expression.dtype, device="cpu")
    executor.fill(fill, whole, planner.values, planner.constants)
    executor.finish()
    return whole.reshape(expression.shape)
