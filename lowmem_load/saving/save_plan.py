"""Which rank writes which bytes of the files of a save. Pure.

[Note: the plan read backwards] A load asks which bytes of files fill a rank's partition. A save asks which bytes of
files a rank's partition fills. `plan_copies` answers the first half for both: it describes every tensor of a file as
copies from parameters. These copies are the same on all ranks, and are proved to cover each tensor once. A rank then
takes the part of each copy whose parameter elements it holds (`Nest.clipped`). Ranks hold disjoint ranges that together
are the parameter, so exactly one rank writes each byte. The ranks add up their bytes to check that.
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
        copy: from the whole parameter to the tensor.
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
    """Return what all ranks write together, proved to cover every tensor of every file once.

    The writes are in the order of the files and of the tensors in them: file systems are fastest if offsets ascend.

    Raises:
        UnsupportedError: a tensor is more than moved and cast elements of parameters.
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


def held_writes(writes: Iterable[Write], held: Mapping[str, Sequence[FlatRange]]) -> dict[str, list[Write]]:
    """Return the parts of the writes that a rank does, by parameter, in the order of the parameters' first use.

    `held` has the elements of each parameter and buffer that the rank writes.
    """
    mine: dict[str, list[Write]] = {}
    for write in writes:
        parts = [part for span in held[write.parameter] for part in write.within(span)]
        if parts:
            mine.setdefault(write.parameter, []).extend(parts)
    return mine


def _refuse_computed(file: str, name: str, expression: Expression) -> None:
    for leaf in leaves(expression):
        if not isinstance(leaf, Source):
            what = getattr(leaf, "operation", None) or getattr(leaf, "origin", "a value in memory")
            raise UnsupportedError(
                f"{file}: {name}: is made by {what}, which needs gathered parameters; save it with "
                "save_original_format=False, or with stage3_gather_16bit_weights_on_model_save"
            )


def total_bytes(writes: Iterable[Write]) -> int:
    """Return how many bytes are written."""
    return sum(write.nbytes for write in writes)
