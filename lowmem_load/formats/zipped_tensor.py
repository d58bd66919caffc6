"""Torch zips of one tensor inside a larger file, as torch DCP writes them one behind the other."""

from __future__ import annotations

from dataclasses import replace

from lowmem_load.errors import CheckpointError
from lowmem_load.formats.inert_pickle import Tensor
from lowmem_load.formats.torch_zip import describe_objects
from lowmem_load.io.source import ByteSource, read_bytes
from lowmem_load.planning.expression import Expression, Source

HEAD_NBYTES = 1024
"""Bytes read of each zip: those before the data, which are 704 in torch 2.13."""


class _Window:
    """A part of a source, as a source."""

    def __init__(self, source: ByteSource, start: int, nbytes: int) -> None:
        self.path, self.version, self.nbytes = source.path, source.version, nbytes
        self._source, self._start = source, start

    def read_into(self, offset: int, memory: memoryview) -> None:
        self._source.read_into(self._start + offset, memory)

    def close(self) -> None:
        """Leave the source open."""


class ZippedTensors:
    """Finds tensors in files. Zips of tensors of one shape begin alike, so only the first is read beyond its head."""

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[bytes, Source]]] = {}  # by bytes of the zip: its head, and where the data lie

    def find(self, source: ByteSource, start: int, nbytes: int, name: str) -> Expression:
        """Return the tensor of the zip that lies at `start`, and is of `nbytes` bytes; `name` is for messages.

        Raises:
            CheckpointError: there is no torch zip of one tensor; another save has written the file, say.
        """
        window = _Window(source, start, nbytes)
        head = read_bytes(window, 0, HEAD_NBYTES)
        for known, values in self._known.get(nbytes, ()):
            if head.startswith(known):
                return replace(values, path=source.path, name=name, start=start + len(known))
        try:
            zipped = describe_objects(window)
            if not isinstance(zipped.tree, Tensor):
                raise CheckpointError(f"{source.path}: holds no tensor")
            expression = zipped.expression(zipped.tree, name)
        except CheckpointError as error:
            raise CheckpointError(
                f"{source.path}: no tensor {name} in the {nbytes} bytes from byte {start} on, where .metadata says it "
                f"is: another save may have written the file ({error})"
            ) from error
        if not isinstance(expression, Source):
            return zipped.shifted(start).expression(zipped.tree, name)
        if expression.start <= HEAD_NBYTES:
            self._known.setdefault(nbytes, []).append((head[: expression.start], expression))
        return replace(expression, start=start + expression.start)
