"""What a save did on this rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowmem_load.phases import Phases


@dataclass(slots=True)
class SaveReport(Phases):
    """What one save did on this rank.

    Attributes:
        folder: where the files are.
        files: bytes of each file of weights, by its name.
        rank, world_size: of the ranks that saved together.
        written_bytes: bytes of weights that this rank wrote; those of all ranks add up to the data of the files.
        num_writes: system calls that wrote them.
        staged_bytes: of `written_bytes`, what went through a buffer of 8 MiB because it was cast, rearranged or on a
            device; the rest was written straight from the partitions.
        scattered: tensors that this rank writes piece by piece, because a conversion of transformers moves rows or
            elements apart: how many pieces, and bytes of the largest, by the tensor's name in the files.
        num_masters: parameters of which the optimizer's fp32 values were written.
        num_merged: weights into which adapters were merged; see `save_model`.
        adapter_bytes: bytes of the adapters that this rank held whole to merge them row by row.
        gathered: weights that had to be whole to merge an adapter into them, one after the other: bytes, by name.
        seconds, peak_memory: see `Phases`; the phases are plan, merge, write, sync, rename.
    """

    folder: str
    files: dict[str, int] = field(default_factory=dict)
    rank: int = 0
    world_size: int = 1
    written_bytes: int = 0
    num_writes: int = 0
    staged_bytes: int = 0
    scattered: dict[str, tuple[int, int]] = field(default_factory=dict)
    num_masters: int = 0
    num_merged: int = 0
    adapter_bytes: int = 0
    gathered: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        mib = float(1 << 20)
        grown = self.peak_memory.total_bytes / mib
        lines = [
            f"{self.folder}: {len(self.files)} files of weights, {sum(self.files.values()) / mib:.1f} MiB; rank "
            f"{self.rank} of {self.world_size}",
            f"  wrote {self.written_bytes / mib:.1f} MiB in {self.num_writes} writes, "
            f"{self.staged_bytes / mib:.1f} MiB of it through a buffer",
            f"  peak {grown:.1f} MiB above the start",
            "  " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items()),
        ]
        if self.num_masters:
            lines.insert(2, f"  {self.num_masters} parameters as the optimizer's fp32 values")
        if self.num_merged:
            lines.insert(2, f"  {self.num_merged} weights merged with adapters of {self.adapter_bytes / mib:.1f} MiB")
        for name, nbytes in list(self.gathered.items())[:5]:
            lines.append(f"  gathered to merge it: {name}, {nbytes / mib:.1f} MiB")
        if len(self.gathered) > 5:
            lines.append(f"  gathered to merge them: {len(self.gathered) - 5} more")
        for name, (count, largest) in list(self.scattered.items())[:5]:
            lines.append(f"  in pieces: {name}: {count} of at most {largest} bytes")
        if len(self.scattered) > 5:
            lines.append(f"  in pieces: {len(self.scattered) - 5} more")
        return "\n".join(lines)
