"""Skips torch's initialisations of tensors that have no memory. Part of the transformers seam, see `loader.py`.

transformers builds a model on meta; torch's layers initialise themselves there, which leaves nothing, draws no random
number, and is a third of what building takes: each call goes through Python decompositions of torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lowmem_load.hf.replaced import replaced

INITIALISATIONS = ("kaiming_uniform_", "uniform_", "normal_")
"""Of `torch.nn.init`: those of `nn.Linear`, convolutions and `nn.Embedding`."""


@contextlib.contextmanager
def skipped_on_meta() -> Iterator[None]:
    """Inside, `INITIALISATIONS` of plain tensors on meta return at once."""
    with contextlib.ExitStack() as stack:
        for name in INITIALISATIONS:
            stack.enter_context(replaced(nn.init, name, _skipping(getattr(nn.init, name))))
        yield


def _skipping(ordinary: Callable[..., Any]) -> Callable[..., Any]:
    def initialise(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        # Of fewer dimensions some refuse; and a subclass may have values that its device does not tell of.
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_meta and tensor.dim() >= 2:
            return tensor
        return ordinary(tensor, *args, **kwargs)

    return initialise
