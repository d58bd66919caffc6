"""A digest of a loaded model that is the same for any number of ranks and any partitioning."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import sys
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from lowmem_load.distributed.group import RankGroup
from lowmem_load.errors import UnsupportedError
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.saving.digest_sums import LANES, Keys, add, sums_of


def model_digest(model: nn.Module) -> dict[str, str]:
    """Return a digest of each parameter and persistent buffer of a model, without gathering any.

    They are the same for any number of ranks and any partitioning: of a model under ZeRO-3, whole or in part, with any
    offload, of one under stages 0 to 2, and of one that an ordinary `from_pretrained` made in a plain process. So two
    loads are equal, or a load and what was saved of it, if their digests are. Under an engine they are of the
    parameters, not of the optimizer's copies; under hpZ of the partitions, not of the secondary ones.

    Accidents of every kind show; see [Note: sums of values] in `saving/digest_sums.py` for how surely.

    Collective: all ranks of the partition group, where parameters are partitioned: two steps. Call it between
    steps: not inside `GatheredParameters`, whose changes reach the partitions at its end.
    Memory: a few MiB; a parameter that is whole and not contiguous is copied, a partition on nvme is read into one of
        the swapper's buffers.

    Args:
        model: a transformers model or any other; engines and DDP are looked into.

    Returns:
        Hex, by the first name of each tensor. A digest covers all names of the tensor, its shape, dtype and values.

    Raises:
        UnsupportedError: names a parameter or buffer that has no values here, or that nvme has no buffer for.
        RankError: another rank failed.
    """
    parts = [_Part(names, tensor) for names, tensor in _distinct(unwrapped(model))]
    keys, groups = Keys(), list(dict.fromkeys(part.group for part in parts if part.group is not None))
    with RankGroup(groups[0]).step("digesting the model") if groups else contextlib.nullcontext():
        for part in parts:
            part.take(keys)
    for group in groups:
        together = [part for part in parts if part.group is group]
        with RankGroup(group).step("adding up the digests") as step:
            sums = np.array([part.sums for part in together], "<u8")
            step.payload = base64.b64encode(sums.tobytes()).decode()
        pieces = [np.frombuffer(base64.b64decode(each), "<u8").reshape(-1, LANES) for each in step.payloads]
        for number, part in enumerate(together):
            part.sums = add(piece[number].tolist() for piece in pieces)
    return {part.names[0]: part.hexdigest() for part in parts}


class _Part:
    """A parameter or buffer. Its sums are first those of what this rank holds, then of the whole.

    Attributes:
        names: all names of it.
        group: of torch.distributed, among whose ranks it is partitioned; None if it is whole.
        sums: for each lane.
    """

    def __init__(self, names: list[str], tensor: torch.Tensor) -> None:
        self.names, self.sums = names, (0,) * LANES
        self._tensor, self._range = tensor, FlatRange(0, tensor.numel())
        self._shape, self.group = tuple(tensor.shape), None
        if isinstance(tensor, nn.Parameter) and "deepspeed" in sys.modules:  # else nothing can be partitioned
            from lowmem_load.ds.parameters import group_of, held_range, is_partitioned, whole_shape

            if is_partitioned(tensor):
                self.group, self._range, self._shape = group_of(tensor), held_range(tensor), whole_shape(tensor)

    def take(self, keys: Keys) -> None:
        """Add up what this rank holds."""
        if self.group is None:
            if self._tensor.is_meta or self._tensor.layout is not torch.strided:
                state = "on the meta device" if self._tensor.is_meta else f"of layout {self._tensor.layout}"
                raise UnsupportedError(f"{self.names[0]}: is {state}, so that it has no values to digest")
            self.sums = sums_of(self._tensor.detach().reshape(-1), 0, keys)
            return
        from lowmem_load.ds.parameters import partition_in_memory

        with partition_in_memory(self._tensor, self.names[0]) as partition:
            self.sums = sums_of(partition[: self._range.numel], self._range.start, keys)

    def hexdigest(self) -> str:
        """Return the digest of names, shape, dtype and sums."""
        head = (*sorted(self.names), str(self._shape), str(self._tensor.dtype))
        lines = (*head, *(f"{lane:016x}" for lane in self.sums))
        return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def unwrapped(model: nn.Module) -> nn.Module:
    """Return what engines and DDP hold as their only child, `module`."""
    while [name for name, _ in model.named_children()] == ["module"] and not list(model.parameters(recurse=False)):
        (model,) = model.children()
    return model


def _distinct(model: nn.Module) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Yield each parameter and each persistent buffer once, with all of its names in order."""
    persistent = model.state_dict(keep_vars=True)
    buffers = [(name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if name in persistent]
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *buffers):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    for number, tensor in tensors.items():
        yield names[number], tensor
