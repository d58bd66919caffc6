"""What was read so far, for progress and for the report."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowmem_load.phases import FileReads


@dataclass(slots=True)
class ReadStats:
    """What was read so far.

    Attributes:
        read_bytes: bytes fetched from files, over-read included; counted while a read goes on.
        num_reads: reads that have ended.
        path: of the file that the latest read is from, whether it has ended or not.
        files: what was read of each file, by its path.
    """

    read_bytes: int = 0
    num_reads: int = 0
    path: str = ""
    files: dict[str, FileReads] = field(default_factory=dict)
