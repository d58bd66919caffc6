"""What it costs to plan weights out on many ranks: bytes through the store, and seconds and memory of one rank.

    python -m benchmarks.weights_plan [--ranks 8 1024] [--docs]

No ranks are started: one rank's layouts and the messages of all buckets are computed as `iter_weights` does, for the
shapes of published models. The cost of describing the save, which is the same on any number of ranks, is not in it. The
bytes are those of the entries of all ranks, of the rank that reads them, and of the verdict that all ranks read.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.memory import PeakMemory
from benchmarks.results import MIB, parser_of, show_table
from lowmem_load.distributed.peers import Entry, verdict_on
from lowmem_load.planning.expression import Source
from lowmem_load.planning.nest import Axis, Copy, Nest
from lowmem_load.planning.regions import Cuts, Mesh, Partitions, Rule, Split
from lowmem_load.text import fingerprint
from lowmem_load.weights_out.buckets import PlannedTensor, Unit, plan_buckets, plan_messages
from lowmem_load.weights_out.rank_shards import RankShard, layouts_by_rule

COLUMNS = ("model", "tensors", "under", "ranks", "store, KiB", "CPU s", "peak, MiB")
LLAMA = {"q": (8192, 8192), "k": (1024, 8192), "v": (1024, 8192), "o": (8192, 8192), "gate": (28672, 8192)}
LLAMA |= {"up": (28672, 8192), "down": (8192, 28672), "norm_1": (8192,), "norm_2": (8192,)}
QWEN = {"q": (8192, 4096), "k": (512, 4096), "v": (512, 4096), "o": (4096, 8192), "q_norm": (128,), "k_norm": (128,)}
QWEN |= {"router": (128, 4096), "norm_1": (4096,), "norm_2": (4096,)}
EXPERTS = {"gate_up": (128, 3072, 4096), "down": (128, 4096, 1536)}
MODELS = {"Llama 70B": (80, LLAMA, {}, (128256, 8192)), "Qwen3 235B-A22B": (94, QWEN, EXPERTS, (151936, 4096))}


def parameters(model: str) -> Iterator[tuple[Source, int]]:
    """Yield each parameter, and of how many tensors of the files it is made."""
    layers, dense, experts, embedding = MODELS[model]
    shapes = {f"{layer}.{name}": shape for layer in range(layers) for name, shape in (dense | experts).items()}
    for name, shape in {**shapes, "embed": embedding, "head": embedding, "norm": embedding[1:]}.items():
        of_one = 2 if name.endswith("gate_up") else 1
        yield Source("", name, 0, shape, torch.bfloat16), shape[0] * of_one if len(shape) == 3 else 1


def tensors(source: Source, num: int) -> Iterator[PlannedTensor]:
    size = math.prod(source.shape) // num
    for number in range(num):
        copy = Copy(source, Nest(number * size, 0, (Axis(size, 1, 1),)))
        yield PlannedTensor(f"{source.name}.{number}", (size,), source.dtype, (copy,))


def rule_of(source: Source, under: str, mesh: Mesh) -> Rule:
    if under == "ZeRO-3":
        return Partitions(math.prod(source.shape))
    return Cuts(source.shape, mesh, (((0,), Split(0, len(mesh.ranks), 0)),))


def shards_of(sources: Sequence[Source], rules: Sequence[Rule], rank: int, world_size: int) -> list[RankShard]:
    """Return what a rank holds. A real one has it from its parameters."""
    held = {rule: rule.regions(world_size)[rank] for rule in set(rules)}
    none: Any = None
    return [
        RankShard(each, none, held[rule], held[rule], True, False) for each, rule in zip(sources, rules, strict=True)
    ]


def plan(shards: Sequence[RankShard], rules: Sequence[Rule], buckets: Sequence[Sequence[Unit]], world_size: int) -> str:
    """Plan what one rank plans; return the digest of the rules."""
    rank = world_size // 2
    (layouts, digest), shares = layouts_by_rule(shards, rules, rank, world_size), {}
    for bucket in buckets:
        for _ in plan_messages(bucket, layouts, world_size, shares).parts(rank):
            pass
    return digest


def store_bytes(digest: str, world_size: int) -> int:
    topics = dict.fromkeys(("bucket_bytes, to, dtype", "tensors", "the layout of the tensors"), digest)
    entries = dict.fromkeys(range(world_size), Entry("planning the weights", digest=fingerprint([json.dumps(topics)])))
    verdict = json.dumps(verdict_on(entries))
    return 2 * world_size * len(json.dumps(entries[0])) + (world_size + 1) * len(verdict)


def measure(model: str, under: str, ranks: Sequence[int]) -> Iterator[list[str]]:
    sources, nums = zip(*parameters(model), strict=True)
    units = [Unit((one,)) for source, num in zip(sources, nums, strict=True) for one in tensors(source, num)]
    buckets = plan_buckets(units, 1 << 30)
    for world_size in ranks:
        mesh = Mesh(tuple(range(world_size)), (world_size,))
        rules = [rule_of(source, under, mesh) for source in sources]
        arguments = shards_of(sources, rules, world_size // 2, world_size), rules, buckets, world_size
        with PeakMemory() as memory:
            start = time.process_time()
            digest = plan(*arguments)
            seconds = time.process_time() - start
        store = store_bytes(digest, world_size)
        yield [
            model,
            str(len(units)),
            under,
            str(world_size),
            f"{store / 1024:.1f}",
            f"{seconds:.2f}",
            f"{memory.peak_bytes / MIB:.1f}",
        ]


def main() -> None:
    arguments = parser_of(__doc__, ranks=[8, 64, 512, 1024, 4096]).parse_args()
    rows: list[Sequence[str]] = [COLUMNS]
    for model in MODELS:
        for under in ("ZeRO-3", "FSDP2"):
            rows += measure(model, under, arguments.ranks)
    show_table("benchmarks.weights_plan", rows, docs=arguments.docs)


if __name__ == "__main__":
    main()
