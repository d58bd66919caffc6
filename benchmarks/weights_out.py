"""Weights for an inference engine: gathered parameter by parameter, and `iter_weights`, in one run.

    python -m benchmarks.weights_out [--params 0.5e9] [--ranks 2 4] [--repeats 3] [--bucket-mb 128]

A consumer of each rank (or of rank 0 alone) reads every byte, as an engine does, and drops it. Stock is what TRL does:
`deepspeed.zero.GatheredParameters` around one parameter after the other. The values of both are compared by a sum of
their bytes. The methods take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import checkpoint_of
from benchmarks.launch import REPOSITORY, run_processes
from benchmarks.memory import MemorySampler
from benchmarks.methods import zero3_config
from benchmarks.results import MIB, show_table

TO_ONE = "buckets, to=0"
METHODS = ("gathered, all", "buckets, all", TO_ONE)
COLUMNS = ("ranks", "method", "seconds", "seconds to plan", "peak anonymous, MiB", "collectives")


@dataclass(frozen=True, slots=True)
class Spec:
    """What the parent asks a group of ranks to do; it travels as JSON."""

    checkpoint: str
    out: str
    bucket_bytes: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Result:
    """One method on one rank; bytes of memory above its start."""

    method: str
    seconds: float
    plan_seconds: float
    peak_anon: int
    num_collectives: int
    total: int  # of all bytes that the consumer has seen


def _taken(tensor: Any) -> int:
    import torch

    units = tensor.detach().reshape(-1).view(torch.int16)
    return sum(int(piece.sum()) for piece in units.split(1 << 20))  # a sum casts all that it gets


def _gathered(engine: Any, _: int, __: str) -> tuple[float, int]:
    import deepspeed

    total = 0
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            total += _taken(parameter)
    return 0.0, total


def _buckets(engine: Any, bucket_bytes: int, method: str) -> tuple[float, int]:
    from lowmem_load.saving.iter_weights import Arguments, plan_weights

    start, total = time.perf_counter(), 0
    to: Any = 0 if method == TO_ONE else "all"
    weights = plan_weights(engine, Arguments(bucket_bytes, to, None, None, False))
    plan_seconds = time.perf_counter() - start
    for bucket in weights.buckets():
        total += sum(_taken(tensor) for _, tensor in bucket)
    return plan_seconds, total


def _run_rank(spec: Spec) -> list[Result]:
    import deepspeed
    import torch.distributed as dist

    from lowmem_load import load_model

    found: list[str] = []
    _count(dist, found)
    config = zero3_config("bf16")
    engine = deepspeed.initialize(model=load_model(spec.checkpoint, config), config=config)[0]
    results = []
    for turn in range(spec.repeats):
        for method in METHODS if turn % 2 else METHODS[::-1]:
            dist.barrier()
            found.clear()
            with MemorySampler() as memory:
                start = time.perf_counter()
                run = _gathered if method == METHODS[0] else _buckets
                plan_seconds, total = run(engine, spec.bucket_bytes, method)
                seconds = time.perf_counter() - start
            results.append(Result(method, seconds, plan_seconds, memory.use.peak_anon, len(found), total))
    return results


def _count(dist: Any, found: list[str]) -> None:
    """Note the collectives of torch's that run, by whoever calls them."""
    for name in ("all_gather_single", "all_gather_into_tensor", "all_gather", "gather", "broadcast", "isend", "irecv"):
        if (ordinary := getattr(dist, name, None)) is not None:

            def call(*args: Any, ordinary: Any = ordinary, name: str = name, **kwargs: Any) -> Any:
                found.append(name)
                return ordinary(*args, **kwargs)

            setattr(dist, name, call)


def _cells(world_size: int, method: str, ranks: list[list[Result]]) -> list[str]:
    """Return a row: medians over the repeats of the slowest rank, and the largest peak of all ranks."""
    mine = [[result for result in results if result.method == method] for results in ranks]
    seconds = statistics.median(max(each.seconds for each in turn) for turn in zip(*mine, strict=True))
    plans = statistics.median(max(each.plan_seconds for each in turn) for turn in zip(*mine, strict=True))
    every = [result for results in mine for result in results]
    peak, collectives = max(r.peak_anon for r in every), max(r.num_collectives for r in every)
    return [str(world_size), method, f"{seconds:.2f}", f"{plans:.2f}", f"{peak / MIB:.0f}", str(collectives)]


def main() -> None:
    """Run all, print the table, and fail if the methods gave different bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=0.5e9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bucket-mb", type=float, default=128)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "weights_out")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/measured.md")
    arguments = parser.parse_args()
    cache = REPOSITORY / ".cache" / "benchmarks"
    rows: list[Sequence[str]] = [COLUMNS]
    with checkpoint_of(int(arguments.params), cache, keep=False, log=lambda text: print(text, file=sys.stderr)) as path:
        for world_size in arguments.ranks:
            out = arguments.out / f"{world_size}-ranks"
            spec = Spec(str(path), str(out), int(arguments.bucket_mb * MIB), arguments.repeats)
            texts = run_processes("benchmarks.weights_out", asdict(spec), out, world_size, on_gpu=False)
            ranks = [[Result(**result) for result in json.loads(text)] for text in texts]
            totals = {r.total for number, rank in enumerate(ranks) for r in rank if number == 0 or r.method != TO_ONE}
            if len(totals) != 1:
                raise SystemExit(f"{world_size} ranks: the methods gave different bytes: {totals}")
            rows += [_cells(world_size, method, ranks) for method in METHODS]
    show_table("benchmarks.weights_out", rows, docs=arguments.docs)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].endswith("spec.json"):
        given = Spec(**json.loads(Path(sys.argv[1]).read_text()))
        (Path(given.out) / f"rank{os.environ['RANK']}.json").write_text(
            json.dumps([asdict(result) for result in _run_rank(given)])
        )
    else:
        main()
