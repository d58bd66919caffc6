"""The files of a checkpoint: which were opened, and where tensors lie in them. Reads no weights."""

from __future__ import annotations

import math
import os
from typing import Any

from lowmem_load.errors import CheckpointError
from lowmem_load.formats.pickled_tensor import Tensor
from lowmem_load.formats.torch_zip import TorchObjects, describe_objects
from lowmem_load.planning.expression import Source, numel
from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.read.executor import Executor
from lowmem_load.read.whole import read_whole
from lowmem_load.resume.layout import SavedParameter, place_fragments
from lowmem_load.resume.swapped import DTYPE


class Files:
    """The files of one checkpoint.

    Args:
        folder: of the tag.
        executor: reads small values, and keeps the files open.

    Attributes:
        opened: all that were, in order.
    """

    def __init__(self, folder: str, executor: Executor) -> None:
        self.folder, self.executor = folder, executor
        self.opened: list[PlannedFile] = []

    def open(self, path: str) -> TorchObjects:
        """Return what a file of torch's holds.

        Raises:
            CheckpointError: it is absent or malformed.
        """
        if not os.path.exists(path):
            raise CheckpointError(f"{path}: is missing; the checkpoint is incomplete")
        with self.executor.sources.reading(path) as source:
            file = describe_objects(source)
        self.opened.append(PlannedFile(path, file.nbytes, file.digest, file.version))
        return file

    def flat(self, file: TorchObjects, tensor: Any, what: str, size: int | None) -> Source:
        """Return where the elements of a tensor lie.

        Args:
            file: that has it.
            tensor: of its tree.
            what: it is, for messages.
            size: elements that it must have; None for any number.

        Raises:
            CheckpointError: it has others, is none, or does not lie in one run.
        """
        if not isinstance(tensor, Tensor) or (size is not None and math.prod(tensor.size) != size):
            held = f"is of shape {tensor.size}" if isinstance(tensor, Tensor) else "is absent"
            expected = "a tensor" if size is None else f"{size} elements"
            raise CheckpointError(f"{file.path}: {what} {held}, expected {expected}, as the model states say")
        expression = file.expression(tensor, what)
        if not isinstance(expression, Source):
            raise CheckpointError(f"{file.path}: {what} does not lie in one run")
        return Source(expression.path, what, expression.start, (numel(expression),), expression.dtype)

    def swapped(self, path: str, what: str, size: int) -> Source:
        """Return where the elements of a sub-group lie that was on nvme, in a file of the swapper.

        Raises:
            CheckpointError: it is absent or truncated.
        """
        if not os.path.exists(path):
            raise CheckpointError(f"{path}: is missing, with {what} of an optimizer that was on nvme")
        with self.executor.sources.reading(path) as source:
            nbytes, version = source.nbytes, source.version
        if nbytes < size * DTYPE.itemsize:
            raise CheckpointError(f"{path}: has {nbytes} bytes, expected {size} elements of {DTYPE}: {what}")
        self.opened.append(PlannedFile(path, nbytes, "", version))
        return Source(path, what, 0, (size,), DTYPE)

    def scalar(self, file: TorchObjects, value: Any, key: str) -> Any:
        """Return a small value of the optimizer: a number, text, or a tensor, which is read.

        Raises:
            CheckpointError: it is none of these.
        """
        if isinstance(value, Tensor):
            return read_whole(self.executor, file.expression(value, key))
        if not isinstance(value, int | float | str | None):
            raise CheckpointError(f"{file.path}: {key!r:.80} of the optimizer is no number, text or tensor")
        return value

    def whole(self, file: TorchObjects, name: str, tensor: Any) -> SavedParameter:
        """Return a tensor that was saved whole."""
        shape = tensor.size if isinstance(tensor, Tensor) else ()
        return place_fragments(name, shape, [self.flat(file, tensor, name, math.prod(shape))])
