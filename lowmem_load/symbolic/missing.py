"""Symbolic parameters that the files lack: made uninitialised, then written into. See `symbolic/initialise.py`."""

from __future__ import annotations

import torch

from lowmem_load.planning.expression import Computed, Held
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.symbolic.initialise import UNINITIALISED, Initialiser, ReadNow
from lowmem_load.symbolic.tensor import CPU, SymbolicTensor


def uninitialised(like: torch.Tensor, read_now: ReadNow) -> SymbolicTensor:
    """Return a tensor of the shape and dtype of `like`, as `torch.empty_like` does, that allocates nothing.

    What is never written is zero: then it is at least the same on all ranks and in every run.
    """
    shape, dtype = tuple(like.shape), like.dtype
    nothing = Computed(UNINITIALISED, lambda _: torch.zeros(shape, dtype=dtype, device=CPU), (), shape, dtype)
    return SymbolicTensor(nothing, read_now)


def initialise_in(tensor: SymbolicTensor, initialiser: Initialiser, keep: FlatRange) -> None:
    """From now on writes into `tensor` and its views are done in `initialiser`, which keeps these elements of it."""
    tensor.value.initialiser, tensor.value.keep = initialiser, keep


def initialised_part(tensor: SymbolicTensor) -> Held | None:
    """Return what this rank keeps of a parameter that was written into; None for one that is read from files."""
    return None if tensor.views else tensor.value.initialised


def forget(tensor: SymbolicTensor) -> None:
    """Free what is held in memory for `tensor`, whose value has been used.

    Its log refers to it, so that without this it would live until the next garbage collection.
    """
    tensor.value.initialised, tensor.value.log, tensor.value.before = None, [], None
