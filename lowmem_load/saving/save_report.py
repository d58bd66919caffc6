"""What a save did on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowmem_load.phases import Phases
from lowmem_load.quantities import size
from lowmem_load.saving.writer import Writer


@dataclass(slots=True)
class SaveReport(Phases):
    """What one save did on one rank.

    Attributes:
        folder: where the files are.
        files: bytes of each file of weights, by its name.
        rank, world_size: of the ranks that saved together.
        written_bytes: bytes of weights that this rank wrote. All ranks together wrote the data of the files.
        num_writes: system calls that wrote them.
        staged_bytes: those of `written_bytes` that went through a buffer of 8 MiB, because they were cast, rearranged
            or on a device. The others were written straight from the partitions.
        num_masters: parameters of which the optimizer's fp32 values were written.
        num_merged: weights that adapters were merged into; see `save_model`.
        adapter_bytes: bytes of the adapters that this rank gathered to merge them row by row.
        gathered: bytes, by name, of weights that were gathered one at a time to merge an adapter into them.
        seconds, peak_memory: see `Phases`; the phases are plan, merge, write, sync, rename.
    """

    folder: str
    files: dict[str, int] = field(default_factory=dict)
    rank: int = 0
    world_size: int = 1
    written_bytes: int = 0
    num_writes: int = 0
    staged_bytes: int = 0
    num_masters: int = 0
    num_merged: int = 0
    adapter_bytes: int = 0
    gathered: dict[str, int] = field(default_factory=dict)

    def note_writes(self, writer: Writer) -> None:
        """Take over what a writer counted."""
        self.written_bytes, self.num_writes = writer.written_bytes, writer.num_writes
        self.staged_bytes = writer.staged_bytes

    def __str__(self) -> str:
        lines = [
            f"{self.folder}: {len(self.files)} files of weights, {size(sum(self.files.values()))}; rank "
            f"{self.rank} of {self.world_size}",
            f"wrote {size(self.written_bytes)} in {self.num_writes} writes, {size(self.staged_bytes)} through a buffer",
            f"peak {size(self.peak_memory.total_bytes)} above the start",
            ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items()),
        ]
        if self.num_masters:
            lines.append(f"{self.num_masters} parameters as the optimizer's fp32 values")
        if self.num_merged:
            lines.append(f"{self.num_merged} weights merged with adapters of {size(self.adapter_bytes)}")
        if self.gathered:
            lines.append(f"{len(self.gathered)} of them gathered, the largest of {size(max(self.gathered.values()))}")
        return "\n  ".join(lines)
