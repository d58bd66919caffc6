"""The files of a checkpoint: which were opened, and where tensors lie in them. Reads no weights.

All functions raise CheckpointError if a file is absent, truncated or malformed.

[Note: swapped states] DeepSpeed copies the swapper's folder of each rank into the checkpoint. In the rank's file of
optimizer states the tensors of a swapped sub-group are empty, and their attribute `ds_id` names the file that has the
elements, in fp32, with padding at its end. Sub-groups of less than 1 MiB are not swapped, and saved as usual.
Source: deepspeed 0.16.4 to 0.19.8 `runtime/engine.py`, `save_checkpoint`; `runtime/swap_tensor/optimizer_utils.py`,
`SwapTensorContext` and `_get_state_tensors`.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

import torch

from lowmem_load.errors import CheckpointError
from lowmem_load.formats.inert_pickle import Tensor
from lowmem_load.formats.plain_objects import shown
from lowmem_load.formats.torch_zip import TorchObjects, describe_objects
from lowmem_load.io.executor import Executor
from lowmem_load.io.read_whole import read_whole
from lowmem_load.planning.expression import Source, numel
from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.resume.zero_layout import SavedParameter, place_fragments

_SWAPPED = "offloaded_tensors"
"""Folder of the swapper's files, in the folder of the tag."""

_SWAPPED_DTYPE = torch.float32


class Files:
    """The files of one checkpoint.

    Attributes:
        folder: of the tag.
        opened: all files that were opened, in order.
    """

    def __init__(self, folder: str, executor: Executor) -> None:
        self.folder, self._executor = folder, executor
        self.opened: list[PlannedFile] = []

    def open(self, path: str) -> TorchObjects:
        """Return the contents of a torch file, without weights."""
        if not os.path.exists(path):
            raise CheckpointError(f"{path}: is missing; the checkpoint is incomplete")
        with self._executor.sources.reading(path) as source:
            file = describe_objects(source)
        self.opened.append(PlannedFile(path, file.nbytes, file.digest, file.version))
        return file

    def flat(self, file: TorchObjects, tensor: Any, what: str, size: int | None) -> Source:
        """Return where the elements of a tensor lie: `size` of them, or any number if that is None.

        Messages call the tensor `what`.
        """
        if not isinstance(tensor, Tensor) or (size is not None and math.prod(tensor.size) != size):
            held = f"is of shape {tensor.size}" if isinstance(tensor, Tensor) else "is absent"
            expected = "a tensor" if size is None else f"{size} elements"
            raise CheckpointError(f"{file.path}: {what} {held}, expected {expected}, as the model states say")
        expression = file.expression(tensor, what)
        if not isinstance(expression, Source):
            raise CheckpointError(f"{file.path}: {what} is not contiguous")
        return Source(expression.path, what, expression.start, (numel(expression),), expression.dtype)

    def flat_or_swapped(self, file: TorchObjects, tensor: Any, what: str, size: int, rank: int, ranks: int) -> Source:
        """Return where the elements of a rank's tensor lie. See [Note: swapped states]."""
        is_swapped = isinstance(tensor, Tensor) and not math.prod(tensor.size) and "ds_id" in tensor.attributes
        if not is_swapped or not size:
            return self.flat(file, tensor, what, size)
        path = self._swap_file(rank, ranks, tensor, what)
        if not os.path.exists(path):
            raise CheckpointError(f"{path}: is missing, with {what} of an optimizer that was on nvme")
        with self._executor.sources.reading(path) as source:
            nbytes, version = source.nbytes, source.version
        if nbytes < size * _SWAPPED_DTYPE.itemsize:
            raise CheckpointError(f"{path}: has {nbytes} bytes, expected {size} elements of {_SWAPPED_DTYPE}: {what}")
        self.opened.append(PlannedFile(path, nbytes, "", version))
        return Source(path, what, 0, (size,), _SWAPPED_DTYPE)

    def scalar(self, file: TorchObjects, value: Any, key: str) -> Any:
        """Return a small value of the optimizer: a number, text, or a tensor, which is read."""
        if isinstance(value, Tensor):
            return read_whole(self._executor, file.expression(value, key))
        if not isinstance(value, int | float | str | None):
            raise CheckpointError(f"{file.path}: {key!r:.80} of the optimizer is no number, text or tensor")
        return value

    def replicated(self, file: TorchObjects, name: str, tensor: Any) -> SavedParameter:
        """Return a tensor that was saved in full."""
        shape = tensor.size if isinstance(tensor, Tensor) else ()
        return place_fragments(name, shape, [self.flat(file, tensor, name, math.prod(shape))])

    def _swap_file(self, rank: int, ranks: int, tensor: Tensor, what: str) -> str:
        name = tensor.attributes["ds_id"]
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]{1,200}", name):
            raise CheckpointError(
                f"{self.folder}: {what} was on nvme under the name {shown(name)}, which is none of DeepSpeed's"
            )
        own = os.path.join(self.folder, _SWAPPED, f"rank{rank:02d}")
        if not os.path.isdir(own):
            if ranks > 1:
                raise CheckpointError(
                    f"{own}: is missing, with the states of an optimizer that was on nvme: ranks of deepspeed 0.17 and "
                    "older overwrite each other's copies, and with use_node_local_storage each node has its own"
                )
            own = os.path.join(self.folder, _SWAPPED)
        return os.path.join(own, f"{name}.tensor.swp")
