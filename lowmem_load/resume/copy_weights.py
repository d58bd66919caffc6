"""Writes whole tensors of a training checkpoint into the files of a folder, in one process or in several."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lowmem_load.distributed.group import RankGroup
from lowmem_load.distributed.heartbeat import Progress
from lowmem_load.errors import PlanError
from lowmem_load.io.executor import Executor
from lowmem_load.phases import progress_bar
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.ranges import FlatRange, partition_range
from lowmem_load.saving import folder as folders
from lowmem_load.saving.writer import FileLayout, SaveReport, Write, Writer, own_writes, total_bytes
from lowmem_load.text import share
from lowmem_load.training_checkpoints.open_model import Values

CHUNK_BYTES = 32 << 20
"""Most bytes of a parameter that are in memory at a time."""


@dataclass(frozen=True, slots=True)
class Copying:
    """What all processes write together."""

    ranks: RankGroup
    files: Sequence[FileLayout]
    writes: Sequence[Write]
    tensors: Mapping[str, Values]
    report: SaveReport

    def write(self, staging: folders.Staging, executor: Executor, *, past_cache: bool) -> None:
        """Write this process's share of each tensor."""
        report = self.report
        spans = {
            name: partition_range(tensor.numel, report.rank, report.world_size) for name, tensor in self.tensors.items()
        }
        mine = own_writes(self.writes, {name: [span] for name, span in spans.items()})
        total = total_bytes(itertools.chain.from_iterable(mine.values()))

        def progress() -> Progress:
            written = f"{share(writer.written_bytes, total)} written"
            return Progress(writer.written_bytes + writer.num_synced, f"{written}, {writer.num_synced} files synced")

        def on_bytes(num_bytes: int) -> None:
            update(num_bytes)
            report.sample_memory()
            self.ranks.check()

        paths = [staging.path / file.name for file in self.files]
        bar = progress_bar(total, "Consolidating", report.rank)
        with bar as update, Writer(paths, on_bytes, past_cache=past_cache) as writer:
            with self.ranks.step("writing", name=report.folder, progress=progress):
                with report.phase("write"):
                    buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu")
                    for name, writes in mine.items():
                        for memory, first in read_chunks(self.tensors[name], executor, buffer, spans[name]):
                            writer.write_parts(writes, memory, first)
                    executor.sources.check_unchanged()
                with report.phase("sync"):
                    writer.sync()
            report.written_bytes, report.staged_bytes = writer.written_bytes, writer.staged_bytes
        if writer.written_bytes != total:
            raise PlanError(f"{report.folder}: wrote {writer.written_bytes} bytes, expected {total}")


def read_chunks(
    values: Values, executor: Executor, buffer: torch.Tensor, span: FlatRange
) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the elements of a span in the memory of a buffer, chunk by chunk, with the first element of each."""
    step = buffer.numel() // values.dtype.itemsize
    for start in range(span.start, span.end, step):
        elements = FlatRange(start, min(start + step, span.end))
        planner = Planner()
        fill = planner.plan_fill("a part of the checkpoint", *values.part(elements))
        memory = buffer.view(values.dtype)[: elements.numel]
        executor.fill(fill, memory, planner.values, planner.constants)
        executor.finish()
        yield memory, start
