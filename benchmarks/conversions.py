"""What strided conversions cost: time, over-read and memory of one large target, rank by rank.

    python -m benchmarks.conversions [--out DIR] [--worlds 1,2,7,8] [--only TEXT]

A target of 256 MiB in bfloat16 for each kind of conversion, made by transformers' own operations. One file of random
bytes serves as the shard file of all of them; it is written once and removed. Every row is one process, which fills
the partition of one rank and afterwards compares it with the result of the operations on real tensors.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import core_model_loading as loading

from benchmarks.machine import describe_machine
from benchmarks.table import aligned
from lowmem_load.bench.memory import MemorySampler
from lowmem_load.describe.tensor import SymbolicTensor, expression_of
from lowmem_load.planning import expression as ex
from lowmem_load.planning.copies import plan_copies
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.ranges import partition_range
from lowmem_load.read.executor import Executor
from lowmem_load.read.whole import read_whole

MIB = 2**20
TARGET_NUMEL = 128 * MIB  # 256 MiB in bfloat16
FILE_NBYTES = 3 * 256 * MIB  # the fused query, key and value of one target
NUM_HEADS = 64

COLUMNS = (
    "conversion", "file -> target", "world", "rank", "seconds", "MB/s", "partition", "needed", "read", "over-read",
    "reads", "copies", "peak-part", "anon-part", "plan ms", "computed",
)  # fmt: skip

DEFINITIONS = """\
All sizes in MiB (2**20 bytes); MB/s is needed bytes per second. The file is in the page cache. One thread reads.
needed     bytes of the file that end up in the partition; read: bytes fetched; over-read = read / needed.
reads      preadv calls. copies: pieces of the plan.
peak-part  high-water mark of resident memory (VmHWM, reset before planning) above the start, minus the partition.
anon-part  largest sample of RssAnon (every 5 ms) above the start, minus the partition.
computed   whether an operation could not be planned through and its inputs were read whole."""


@dataclass(frozen=True)
class Conversion:
    """Operations, and the sources that they need for one target of `TARGET_NUMEL` elements.

    Attributes:
        name: the row title.
        operations: of transformers, run in order.
        sources: source pattern -> shapes of its tensors.
        targets: target patterns; the first one is measured.
        file: dtype of the sources.
        target: dtype of the partition.
    """

    name: str
    operations: tuple[Any, ...]
    sources: dict[str, list[tuple[int, ...]]]
    targets: tuple[str, ...] = ("target",)
    file: torch.dtype = torch.bfloat16
    target: torch.dtype = torch.bfloat16

    def run(self, tensor: Callable[[int, tuple[int, ...]], torch.Tensor]) -> torch.Tensor:
        """Return the first target; `tensor(start, shape)` gives the source that starts at element `start`."""
        start, values = 0, {}
        for pattern, shapes in self.sources.items():
            values[pattern] = []
            for shape in shapes:
                values[pattern].append(tensor(start, shape))
                start += math.prod(shape)
        heads = SimpleNamespace(num_attention_heads=NUM_HEADS)
        config = SimpleNamespace(num_attention_heads=NUM_HEADS, vision_config=heads)
        for operation in self.operations:
            values = operation.convert(
                values, source_patterns=list(self.sources), target_patterns=list(self.targets), config=config
            )
        value = values[self.targets[0]]
        return value[0] if isinstance(value, list) else value


def conversions() -> list[Conversion]:
    """Return the conversions to measure: those that are not runs, and two that are, for comparison."""
    fp32, bf16 = torch.float32, torch.bfloat16
    qkv = ("q_proj", "k_proj", "v_proj")
    rope, some_rope = loading.PermuteForRope(), loading.PermuteForRope(permute_layer_names=["q_proj", "k_proj"])
    transpose, merge = loading.Transpose(1, 2), loading.MergeModulelist(0)
    ernie = loading.ErnieFuseAndSplitTextVisionExperts()
    found = [
        Conversion("MergeModulelist + Concatenate(1)", (merge, loading.Concatenate(1)),
                   {"gate.*": [(2048, 2048)] * 16, "up.*": [(2048, 2048)] * 16}),
        Conversion("Ernie fuse and split", (ernie,),
                   {"gate.*": [(2048, 2048)] * 32, "up.*": [(2048, 2048)] * 32}, ("text", "vision")),
        Conversion("Concatenate(1), 2-D", (loading.Concatenate(1),), {"a": [(8192, 8192)], "b": [(8192, 8192)]}),
        Conversion("Transpose(1,2), 16 experts", (transpose,), {"w": [(16, 2048, 4096)]}),
        Conversion("Transpose(1,2), 128 experts", (transpose,), {"w": [(128, 2048, 512)]}),
        Conversion("Transpose(1,2), 16 experts", (transpose,), {"w": [(16, 2048, 4096)]}, file=fp32),
        Conversion("Transpose(1,2), 16 experts", (transpose,), {"w": [(16, 2048, 4096)]}, target=fp32),
        Conversion("Transpose(0,1), wide", (loading.Transpose(0, 1),), {"w": [(8192, 16384)]}),
        Conversion("Transpose(0,1), tall", (loading.Transpose(0, 1),), {"w": [(65536, 2048)]}),
        Conversion("PermuteForRope", (rope,), {"q": [(8192, 16384)]}),
        Conversion("PermuteForRope, narrow", (rope,), {"q": [(65536, 2048)]}),
        Conversion("Chunk(0) + PermuteForRope", (loading.Chunk(0), some_rope), {"qkv": [(3 * 8192, 16384)]}, qkv),
        Conversion("Interleave(1), experts", (loading.Interleave(1),), {"w13": [(16, 4096, 2048)]}),
        Conversion("Interleave(1) + Chunk(1)", (loading.Interleave(1), loading.Chunk(1)),
                   {"w13": [(16, 8192, 2048)]}, ("gate", "up")),
        Conversion("Interleave(0) + Chunk(0)", (loading.Interleave(0), loading.Chunk(0)),
                   {"w13": [(2 * 16384, 8192)]}, ("gate", "up")),
        Conversion("Conv3dToLinear", (loading.Conv3dToLinear(4, (4, 32, 32)),), {"w": [(8192, 4, 4, 32, 32)]}),
        Conversion("LinearToConv3d", (loading.LinearToConv3d(4, (4, 32, 32)),), {"w": [(8192, 4 * 4 * 32 * 32)]}),
    ]  # fmt: skip
    if hasattr(loading, "VisionFuseAndPermuteForRope"):  # deprecated
        names, permuted = [f"attn.{name}" for name in qkv], ["q_proj", "k_proj"]
        fuse = loading.VisionFuseAndPermuteForRope(0, permuted)
        unfuse = loading.VisionUnfuseAndPermuteForRope(0, permuted)
        shapes = [[(4096, 16384)], [(2048, 16384)], [(2048, 16384)]]
        found += [
            Conversion("VisionFuse, GQA", (fuse,), dict(zip(names, shapes, strict=True))),
            Conversion("VisionUnfuse", (unfuse,), {"attn.qkv": [(3 * 8192, 16384)]}, tuple(names)),
        ]
    assert all(conversion.target in (fp32, bf16) for conversion in found)
    return found


@dataclass(frozen=True, slots=True)
class Result:
    """What one rank measured. Sizes in bytes."""

    conversion: str
    dtypes: str
    world_size: int
    rank: int
    seconds: float
    plan_seconds: float
    partition_bytes: int
    needed_bytes: int
    read_bytes: int
    num_reads: int
    num_copies: int
    peak_above_partition: int
    anon_above_partition: int
    computed: bool

    @property
    def over_read(self) -> float:
        """Bytes read per byte needed."""
        return self.read_bytes / self.needed_bytes

    def cells(self) -> Sequence[str]:
        """Return the row of the table."""
        sizes = [f"{size / MIB:.1f}" for size in (self.partition_bytes, self.needed_bytes, self.read_bytes)]
        peaks = [f"{size / MIB:.1f}" for size in (self.peak_above_partition, self.anon_above_partition)]
        return [
            self.conversion, self.dtypes, str(self.world_size), str(self.rank), f"{self.seconds:.2f}",
            f"{self.needed_bytes / self.seconds / 1e6:.0f}", *sizes, f"{self.over_read:.2f}", str(self.num_reads),
            str(self.num_copies), *peaks, f"{self.plan_seconds * 1000:.1f}", "yes" if self.computed else "no",
        ]  # fmt: skip


def measure(conversion: Conversion, path: str, world_size: int, rank: int) -> Result:
    """Fill the partition of one rank; raise when its bytes are not those of the operations on real tensors."""
    itemsize = conversion.file.itemsize

    def described(start: int, shape: tuple[int, ...]) -> torch.Tensor:
        source = ex.Source(path, "w", start * itemsize, shape, conversion.file)
        return SymbolicTensor(source, lambda node, _: read_whole(executor, node))

    with Executor() as executor, MemorySampler() as sampler:
        start_s = time.perf_counter()
        expression = ex.cast(expression_of(conversion.run(described)), conversion.target)
        span = partition_range(ex.numel(expression), rank, world_size)
        planner, copies = Planner(), list(plan_copies(expression, span))
        fill = planner.plan_fill(conversion.name, expression, span)
        costs = planner.costs([fill])
        plan_seconds = time.perf_counter() - start_s
        partition = torch.empty(span.numel, dtype=conversion.target)
        executor.fill(fill, partition, planner.values, planner.material)
        executor.finish()
        seconds = time.perf_counter() - start_s
    memory = sampler.use()
    _compare(conversion, path, partition, span.start)
    return Result(
        conversion.name,
        f"{_text(conversion.file)} -> {_text(conversion.target)}",
        world_size,
        rank,
        seconds,
        plan_seconds,
        partition.nbytes,
        costs.needed_bytes,
        executor.stats.read_bytes,
        executor.stats.num_reads,
        len(copies),
        memory.peak - partition.nbytes,
        memory.peak_anon - partition.nbytes,
        any(isinstance(copy.leaf, ex.Computed) for copy in copies),
    )


def _compare(conversion: Conversion, path: str, partition: torch.Tensor, first: int) -> None:
    mapped = torch.from_file(path, shared=False, size=FILE_NBYTES // conversion.file.itemsize, dtype=conversion.file)
    value = conversion.run(lambda start, shape: mapped[start : start + math.prod(shape)].view(shape))
    wanted = value.reshape(-1)[first : first + partition.numel()].to(conversion.target)
    if not torch.equal(partition.view(torch.uint8), wanted.view(torch.uint8)):
        raise ValueError(f"{conversion.name}: the partition from element {first} on has the wrong bytes")


def _text(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def measure_apart(conversion: Conversion, path: str, world_size: int, rank: int) -> Result:
    """Run `measure` in a process of its own, forked from this one so that nothing is imported again."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        sender.send(measure(conversion, path, world_size, rank))

    process = context.Process(target=work)
    process.start()
    sender.close()
    try:
        result: Result = receiver.recv()
    except EOFError:
        raise RuntimeError(f"{conversion.name}: rank {rank} of {world_size} failed, see above") from None
    finally:
        process.join()
    return result


def write_random(path: str) -> None:
    """Write the file of `FILE_NBYTES` random bytes; as numbers they are finite, so that casts of them compare."""
    generator = torch.Generator().manual_seed(0)
    with open(path, "wb") as file:
        for _ in range(FILE_NBYTES // (32 * MIB)):
            bits = torch.randint(-(2**31), 2**31, (8 * MIB,), generator=generator, dtype=torch.int64).to(torch.int32)
            file.write((bits & ~0x40004000).numpy().data)  # exponents of bf16 and fp32 stay below their maximum


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write it as JSON where `--out` says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conversions", description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="folder for conversions.txt and conversions.json")
    parser.add_argument("--worlds", default="1,2,7,8", help="world sizes; rank 0 and the last one are measured")
    parser.add_argument("--only", default="", help="measure conversions with this in their name")
    parser.add_argument("--folder", help="where the file of 768 MiB goes; by default the temporary folder")
    options = parser.parse_args(arguments)
    worlds = [int(world) for world in options.worlds.split(",")]
    chosen = [conversion for conversion in conversions() if options.only in conversion.name]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = os.path.join(folder, "random")
        write_random(path)
        results = list(_measured(chosen, path, worlds))
    described = describe_machine()
    lines = [*described.lines(), "", *aligned([COLUMNS, *(result.cells() for result in results)]), "", DEFINITIONS]
    print("\n".join(lines))
    if options.out:
        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "conversions.txt").write_text("\n".join(lines) + "\n")
        rows = [{**asdict(result), "over_read": round(result.over_read, 4)} for result in results]
        (folder / "conversions.json").write_text(json.dumps({"machine": asdict(described), "rows": rows}, indent=1))


def _measured(chosen: Sequence[Conversion], path: str, worlds: Sequence[int]) -> Iterator[Result]:
    for conversion in chosen:
        for world_size in worlds:
            for rank in sorted({0, world_size - 1}):
                result = measure_apart(conversion, path, world_size, rank)
                print("  ".join(result.cells()), file=sys.stderr, flush=True)
                yield result


if __name__ == "__main__":
    main()
