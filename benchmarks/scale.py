"""What planning the largest models costs: python -m benchmarks.scale MODEL --rank R --world-size W, or --all.

With `--node N` it plans ranks R to R + N - 1 instead, and says what these read, each alone and together.

Simulated: the checkpoints are sparse files with true headers and holes for data (`benchmarks.published`), nothing but
headers is read from them, and one plain process plans as rank R of W. Every measurement is a fresh process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import describe_machine
from benchmarks.measure import MemorySampler
from benchmarks.node_reads import NODE_COLUMNS, NODE_DEFINITIONS
from benchmarks.published import MODELS, write
from benchmarks.table import aligned

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}

# Read by the libraries when they are imported. Planning needs no accelerator, and the figures are those of one core.
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

DEQUANTIZING = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""transformers' class of quantization configs for each method that checkpoints of `MODELS` are stored in."""

COLUMNS = (
    "model", "tensors", "rank/world", "describe s", "plan s", "wall s", "CPU s", "peak", "anon", "file", "targets",
    "reads", "needed", "read", "partition",
)  # fmt: skip

DEFINITIONS = """\
Simulated: sparse checkpoints with true headers and holes for data; one plain process plans as rank R of W, without
process group or GPU, and reads headers only, which are in the page cache. No figure here includes reading weights.
All sizes in MiB (2**20 bytes). Every row is a fresh process; of several, the one of median CPU seconds is shown.
tensors    in all files, those included that the model does not use.
describe   transformers' loader run on symbolic tensors; plan: from there to the finished plan; wall: the whole call.
CPU s      of the process during the call, all threads; the memory sampler's about 1 % included.
peak       high-water mark of resident memory (VmHWM, reset at the start) above the start, which is after imports
           (torch, transformers and the model's module, deepspeed) and malloc_trim.
anon, file largest sample of RssAnon, and of RssFile + RssShmem, every 5 ms, above the start.
targets    distinct parameters. reads: read calls that the plan makes. needed: bytes of the files that end up on this
           rank; read: bytes that those calls fetch. partition: bytes of this rank's partitions, padding included."""


class Row(NamedTuple):
    """A model of `MODELS`, planned as one rank of a world."""

    model: str
    rank: int
    world_size: int


ROWS = (
    Row("llama-3.1-405b", 3, 8),
    Row("llama-3.1-405b", 33, 64),
    Row("llama-3.1-405b", 257, 512),
    Row("qwen3-235b-a22b", 517, 1024),
    Row("deepseek-v3-bf16", 517, 1024),
    Row("deepseek-v3-fp8", 517, 1024),
    Row("kimi-k2-fp8", 517, 1024),
    Row("qwen3-vl-235b-a22b", 517, 1024),
    Row("gpt-oss-120b", 33, 64),
    Row("gpt-oss-120b", 517, 1024),
)
"""What `--all` measures: ranks in the middle of each world, since the last one's partitions may be cut short."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one plan cost, and what it says; bytes and seconds.

    Attributes:
        phases_s: wall seconds of each phase of the plan, as it reports them.
        held_bytes: anonymous memory above the start at the end, while the plan is alive.
    """

    model: str
    rank: int
    world_size: int
    num_tensors: int
    num_parameters: int
    phases_s: dict[str, float]
    wall_s: float
    cpu_s: float
    peak_bytes: int
    peak_anon_bytes: int
    peak_file_bytes: int
    held_bytes: int
    num_targets: int
    num_reads: int
    needed_bytes: int
    read_bytes: int
    partition_bytes: int
    staging_bytes: int
    largest_temporary_bytes: int

    def cells(self) -> list[str]:
        """Return the row of the table."""
        sizes = (self.needed_bytes, self.read_bytes, self.partition_bytes)
        return [
            self.model,
            f"{self.num_tensors:,}",
            f"{self.rank}/{self.world_size}",
            *(f"{seconds:.2f}" for seconds in (self.phases_s["describe"], self.phases_s["plan"])),
            *(f"{seconds:.2f}" for seconds in (self.wall_s, self.cpu_s)),
            *map(_mib, (self.peak_bytes, self.peak_anon_bytes, self.peak_file_bytes)),
            *(f"{count:,}" for count in (self.num_targets, self.num_reads)),
            *map(_mib, sizes),
        ]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"


def measure(folder: Path, row: Row) -> Result:
    """Plan in this process, which must be a fresh one: what an earlier plan left behind would not be counted."""
    import deepspeed  # noqa: F401  a ZeRO-3 plan needs it; imported here so that the figures are the plan's alone
    import transformers

    import lowmem_load

    published = MODELS[row.model]
    getattr(transformers, published.config["architectures"][0])  # imports the model's module
    keywords = keywords_of(row.model)
    with MemorySampler() as sampler:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        plan = lowmem_load.plan(folder, DS_CONFIG, rank=row.rank, world_size=row.world_size, **keywords)
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    memory = sampler.use()
    return Result(
        *row,
        num_tensors=published.num_tensors,
        num_parameters=published.num_parameters,
        phases_s=dict(plan.seconds),
        wall_s=wall_s,
        cpu_s=cpu_s,
        peak_bytes=memory.peak,
        peak_anon_bytes=memory.peak_anon,
        peak_file_bytes=memory.peak_file,
        held_bytes=memory.end_anon,
        num_targets=len(plan.targets),
        num_reads=plan.num_reads,
        needed_bytes=plan.needed_bytes,
        read_bytes=plan.read_bytes,
        partition_bytes=plan.partition_bytes,
        staging_bytes=plan.staging_bytes,
        largest_temporary_bytes=plan.largest_temporary_bytes,
    )


def keywords_of(model: str) -> dict[str, Any]:
    """Return what loading a model of `MODELS` takes besides its folder."""
    import transformers

    config = MODELS[model].config
    if "quantization_config" not in config:
        return {}
    method = DEQUANTIZING[config["quantization_config"]["quant_method"]]
    return {"quantization_config": getattr(transformers, method)(dequantize=True)}


def node_table(model: str, first: int, world_size: int, size: int, folder: Path, sharing: str) -> list[list[str]]:
    """Return rows about what ranks `first` to `first + size - 1` read, each alone and together."""
    import lowmem_load
    from benchmarks.node_reads import node_reads, rank_reads
    from lowmem_load.planning.cooperative import Sharing

    found = []
    for rank in range(first, first + size):
        plan = lowmem_load.plan(folder, DS_CONFIG, rank=rank, world_size=world_size, **keywords_of(model))
        found.append(rank_reads(plan, Sharing(sharing)))
        print(f"rank {rank} of {world_size} planned", file=sys.stderr, flush=True)
    return [[model, f"{first}-{first + size - 1}/{world_size}", *each.cells()] for each in node_reads(found)]


def measure_apart(folder: Path, row: Row) -> Result:
    """Run `measure` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, folder, row).result()


def measure_rows(rows: Sequence[Row], repeats: int, folder: Path) -> Iterator[list[Result]]:
    """Yield the repeats of each row; the checkpoints are written below `folder`."""
    for model in dict.fromkeys(row.model for row in rows):
        write(model, folder / model)
    for row in rows:
        yield [measure_apart(folder / row.model, row) for _ in range(repeats)]


def median_of(repeats: Sequence[Result]) -> Result:
    """Return the repeat of median CPU seconds (the lower one of an even number)."""
    return sorted(repeats, key=lambda result: result.cpu_s)[(len(repeats) - 1) // 2]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: measure, print the table, write it as JSON where `--json` says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", choices=list(MODELS), help="what to plan")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--all", action="store_true", help="plan the default table instead of one model")
    parser.add_argument("--repeats", type=int, default=1, help="fresh processes for each row")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--folder", help="where the sparse checkpoints go; by default the temporary folder")
    parser.add_argument("--node", type=int, metavar="N", help="what the node of ranks R to R + N - 1 reads")
    parser.add_argument("--share", choices=["auto", "off", "on"], default="auto", help="with --node: as the setting")
    options = parser.parse_args(arguments)
    if options.all == (options.model is not None):
        parser.error("name a model, or pass --all")
    if options.model and not 0 <= options.rank < (options.world_size or 0):
        parser.error("a model needs --world-size W and --rank R, from 0 to W - 1")
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if options.node and (options.all or not 0 < options.node <= options.world_size - options.rank):
        parser.error("--node needs a model, and at least as many ranks from --rank on")
    rows = ROWS if options.all else [Row(options.model, options.rank, options.world_size)]
    os.environ.update(ENVIRONMENT)
    shown, found = [], []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.node:
            checkpoint = write(options.model, Path(folder) / options.model)
            row = options.model, options.rank, options.world_size
            table = aligned([NODE_COLUMNS, *node_table(*row, options.node, checkpoint, options.share)])
            print("\n".join([*table, "", NODE_DEFINITIONS]))
            return
        for results in measure_rows(rows, options.repeats, Path(folder)):
            shown.append(median_of(results))
            found.append({**asdict(shown[-1]), "cpu_s_of_repeats": [result.cpu_s for result in results]})
            print("  ".join(shown[-1].cells()), file=sys.stderr, flush=True)
    described = describe_machine()
    table = aligned([COLUMNS, *(result.cells() for result in shown)])
    print("\n".join([*described.lines(), "", *table, "", DEFINITIONS]))
    if options.json:
        data = {"simulated": True, "machine": asdict(described), "ds_config": DS_CONFIG, "rows": found}
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
