"""What a job opens and reads of metadata: python -m benchmarks.sharing MODEL ... --ranks N --nodes M.

Simulated, as `benchmarks.scale`: one process plans as the first rank of a node, which reads and parses every header,
and as another one, which takes what the first has found. What the whole job does is the sum over its ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.machine import describe_machine
from benchmarks.published import MODELS
from benchmarks.scale import DEQUANTIZING, DS_CONFIG, ENVIRONMENT
from benchmarks.sparse import write
from benchmarks.table import aligned

T = TypeVar("T")

COLUMNS = (
    "model",
    "ranks",
    "opens before",
    "after",
    "header and index GB before",
    "after",
    "first CPU s",
    "others CPU s",
)

DEFINITIONS = """\
opens      of shard files and of the index, by all ranks, for headers and data. Before: every rank is like the first
           one of a node. A rank opens a shard again for its data if more than 96 files were in use meanwhile.
GB         10**9 bytes of headers, and of the index, which is read twice (checked here, then read by transformers).
CPU s      of planning, as `benchmarks.scale` has it: the first rank of a node, and the others."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank does: opens of files, bytes of headers and index, CPU seconds of planning."""

    num_opens: int
    num_bytes: int
    cpu_s: float


class Found:
    """What the first rank has found, by key, for the plan as another one."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.is_first = True

    def once(self, key: str, find: Callable[[], T], pack: Callable[[T], bytes], unpack: Callable[[bytes], T]) -> T:
        """See `lowmem_load.describe.context.Once`."""
        if not self.is_first and self.records[key]:
            return unpack(self.records[key])
        found = find()
        if self.is_first:
            self.records[key] = pack(found)
        return found


@contextlib.contextmanager
def _counted(found: Found) -> Iterator[list[int]]:
    """Count opens and bytes of local files; let what is described go through `found`."""
    from lowmem_load.read import source
    from lowmem_load.stages import plan_only

    counts = [0, 0]
    ordinary_open, ordinary_read, ordinary = source._open_regular, source.LocalFile.read_into, plan_only.describe

    def open_regular(path: str) -> Any:
        counts[0] += not path.endswith("config.json")
        return ordinary_open(path)

    def read_into(file: Any, offset: int, buffers: Sequence[memoryview]) -> None:
        counts[1] += sum(buffer.nbytes for buffer in buffers) if not file.path.endswith("config.json") else 0
        ordinary_read(file, offset, buffers)

    source._open_regular, source.LocalFile.read_into = open_regular, read_into  # type: ignore[method-assign]
    plan_only.describe = lambda *args, **kwargs: ordinary(*args, **kwargs, once=found.once)
    try:
        yield counts
    finally:
        source._open_regular, source.LocalFile.read_into = ordinary_open, ordinary_read  # type: ignore[method-assign]
        plan_only.describe = ordinary


def measure(folder: Path, model: str, rank: int, world_size: int) -> tuple[Part, Part]:
    """Plan in this process as the first rank of a node and as another; return what each does."""
    import deepspeed  # noqa: F401  so that the figures are the plan's alone
    import transformers

    import lowmem_load
    from lowmem_load.planning.reads import Read
    from lowmem_load.read.open_sources import OpenSources
    from lowmem_load.read.source import LocalFile

    config, keywords = MODELS[model].config, {}
    if "quantization_config" in config:
        method = DEQUANTIZING[config["quantization_config"]["quant_method"]]
        keywords["quantization_config"] = getattr(transformers, method)(dequantize=True)
    found, parts = Found(), []
    for is_first in (True, True, False):  # once before, since the first plan of a process takes longer
        found.is_first = is_first
        with _counted(found) as counts:
            start_s = time.process_time()
            plan = lowmem_load.plan(folder, DS_CONFIG, rank=rank, world_size=world_size, **keywords)
            cpu_s = time.process_time() - start_s
            num_bytes = counts[1]
            counts[0] = int(is_first)  # by transformers
            num_bytes += counts[0] * (folder / "model.safetensors.index.json").stat().st_size
            sources = OpenSources(LocalFile)
            paths = [file.path for file in plan.files] if is_first else []
            for target in plan.targets:
                steps = [step for fill in target.fills for step in fill.steps]
                paths += [step.tensor.path for step in steps if isinstance(step, Read)]
            for path in paths:  # headers, then data, as in a load
                with sources.reading(path):
                    pass
            sources.close()
            parts.append(Part(counts[0] + is_first, num_bytes, cpu_s))
    return parts[1], parts[2]


def cells(model: str, ranks: int, nodes: int, first: Part, other: Part) -> list[str]:
    """Return the row of the table."""
    opens = [ranks * first.num_opens, nodes * first.num_opens + (ranks - nodes) * other.num_opens]
    sizes = [ranks * first.num_bytes, nodes * first.num_bytes + (ranks - nodes) * other.num_bytes]
    shown_sizes = [f"{size / 1e9:.2f}" for size in sizes]
    return [
        model,
        f"{ranks}",
        *(f"{count:,}" for count in opens),
        *shown_sizes,
        f"{first.cpu_s:.2f}",
        f"{other.cpu_s:.2f}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: measure, print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharing", description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", choices=list(MODELS), help="what to plan")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--folder", help="where the sparse checkpoints go; by default the temporary folder")
    options = parser.parse_args(arguments)
    os.environ.update(ENVIRONMENT)
    rows = []
    for model in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            write(model, Path(folder))
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                parts = pool.submit(measure, Path(folder), model, options.ranks // 2 + 5, options.ranks).result()
        rows.append(cells(model, options.ranks, options.nodes, *parts))
    print("\n".join([*describe_machine().lines(), "", *aligned([COLUMNS, *rows]), "", DEFINITIONS]))


if __name__ == "__main__":
    main()
