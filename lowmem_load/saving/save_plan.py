"""Who writes which bytes: from what the files of a save are made of to each rank's writes. Pure.

[Note: the plan read backwards] A load asks which bytes of files fill a rank's partition; a save asks which bytes of
files are filled by it. `plan_copies` answers the first half for both: every tensor of a file, as loops over parameters.
These copies are the same on all ranks, and are proved to cover each tensor once. A rank then takes the part of each
copy whose parameter elements it holds (`Nest.clipped`). Ranks hold disjoint ranges that together are the parameter, so
each byte of each file is written by exactly one of them; the bytes that they will write are added up to make sure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lowmem_load.errors import UnsupportedError
from lowmem_load.planning.copies import Copy, plan_copies
from lowmem_load.planning.expression import Expression, Source, leaves, numel
from lowmem_load.planning.proof import prove_coverage
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.saving.file_layout import FileLayout


@dataclass(frozen=True, slots=True)
class Write:
    """Elements of one parameter that go to one tensor of one file.

    Attributes:
        file: number of the file.
        tensor: its name in the file.
        start: byte of the file at which the tensor starts.
        dtype: of the tensor.
        copy: from the parameter (elements of the whole) to the tensor.
    """

    file: int
    tensor: str
    start: int
    dtype: torch.dtype
    copy: Copy

    @property
    def parameter(self) -> str:
        """Name of the parameter or buffer."""
        assert isinstance(self.copy.leaf, Source)  # plan_writes
        return self.copy.leaf.name

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return self.copy.nest.numel * self.dtype.itemsize

    def within(self, held: FlatRange) -> Iterator[Write]:
        """Yield the parts of this write whose elements of the parameter lie in `held`."""
        for nest in self.copy.nest.clipped(held.start, held.end, "source"):
            yield replace(self, copy=replace(self.copy, nest=nest))


def plan_writes(files: Sequence[tuple[FileLayout, Mapping[str, Expression]]]) -> list[Write]:
    """Return what must be written by all ranks together, proved to cover every tensor of every file once.

    The order is that of the files, and of the tensors in them: file systems are fastest where offsets ascend.

    Raises:
        UnsupportedError: a tensor is not made of parameters by moving and casting their elements.
        PlanError: a tensor would not be covered once. That is a fault of this package.
    """
    writes: list[Write] = []
    for number, (layout, tensors) in enumerate(files):
        for name, expression in sorted(tensors.items(), key=lambda item: layout.starts[item[0]]):
            _refuse_computed(layout.name, name, expression)
            copies = list(plan_copies(expression, FlatRange(0, numel(expression))))
            prove_coverage(f"{layout.name}: {name}", [copy.nest for copy in copies], numel(expression))
            writes += [Write(number, name, layout.starts[name], expression.dtype, copy) for copy in copies]
    return writes


def held_writes(writes: Iterable[Write], held: Mapping[str, FlatRange]) -> list[Write]:
    """Return the parts of the writes whose elements lie in `held`, in the order of the parameters' first use.

    `held` has the elements of each parameter and buffer that are this rank's to write.
    """
    mine: dict[str, list[Write]] = {}
    for write in writes:
        parts = list(write.within(held[write.parameter]))
        if parts:
            mine.setdefault(write.parameter, []).extend(parts)
    return [write for parts in mine.values() for write in parts]


def _refuse_computed(file: str, name: str, expression: Expression) -> None:
    for leaf in leaves(expression):
        if not isinstance(leaf, Source):
            what = getattr(leaf, "operation", None) or getattr(leaf, "origin", "a value in memory")
            raise UnsupportedError(
                f"{file}: {name}: is made by {what}, for which whole parameters would have to be gathered; save it "
                "with save_original_format=False, or with stage3_gather_16bit_weights_on_model_save"
            )


def total_bytes(writes: Iterable[Write]) -> int:
    """Return how many bytes are written."""
    return sum(write.nbytes for write in writes)
