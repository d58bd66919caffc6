"""Saving a partitioned model: default consolidation, lowmem_load, and plain writes of the same bytes, in one run.

    python -m benchmarks.save [--params 1.5e9] [--ranks 2 4] [--repeats 4]

Each method writes to a fresh folder and deletes it again. Before each, the former files have reached the disk. In every
two turns ours and the floor run four times each, after each other, after themselves and after the default. The default
is `engine._zero3_consolidated_16bit_state_dict()` followed by `save_pretrained` on rank 0, as `Trainer.save_model` does
it; it does not wait for the disk, the other two do. The floor writes each rank's partitions, one after the other, to a
file of its own. The files of weights that ours and the default wrote are compared byte by byte.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import checkpoint_of
from benchmarks.collectives import CollectiveCounter
from benchmarks.launch import REPOSITORY, run_on_ranks
from benchmarks.memory import MemorySampler
from benchmarks.methods import zero3_config
from benchmarks.results import MIB, parser_of, show_table

METHODS = {"default": "default", "lowmem": "lowmem_load", "floor": "plain writes"}
"""What tables call them."""
TURNS = (("default", "lowmem", "floor", "floor", "lowmem"), ("default", "floor", "lowmem", "lowmem", "floor"))
"""Orders, in turn: what writes after another method finds the pages that this one has freed."""
COLUMNS = ("ranks", "method", "seconds", "peak anonymous, MiB", "peak file-backed, MiB", "in collectives, MiB")


@dataclass(frozen=True, slots=True)
class Result:
    """One save on one rank; bytes of memory above its start."""

    method: str
    seconds: float
    peak_anon: int
    peak_file: int
    collective_bytes: int
    digests: dict[str, str]


def _default(engine: Any, folder: Path, max_shard_size: str) -> None:
    state = engine._zero3_consolidated_16bit_state_dict()
    if os.environ["RANK"] == "0":
        engine.module.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_size)


def _lowmem(engine: Any, folder: Path, max_shard_size: str) -> None:
    from lowmem_load import save_model

    print(save_model(engine, folder, max_shard_size=max_shard_size), flush=True)


def _floor(engine: Any, folder: Path, _: str) -> None:
    import torch

    from lowmem_load.engines.parameters import held_range, partition_of

    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / f"rank{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT)
    for parameter in engine.module.parameters():
        partition = partition_of(parameter).detach()[: held_range(parameter).numel]
        data = memoryview(partition.view(torch.uint8).numpy())
        while data:
            data = data[os.write(descriptor, data[: 64 << 20]) :]
    os.fsync(descriptor)
    os.close(descriptor)


SAVERS: dict[str, Callable[[Any, Path, str], None]] = {"default": _default, "lowmem": _lowmem, "floor": _floor}


def run_rank(checkpoint: str, out: str, max_shard_size: str, repeats: int) -> list[Result]:
    collectives = CollectiveCounter()
    collectives.install()
    import deepspeed
    import torch.distributed as dist

    collectives.install_deepspeed()
    from lowmem_load import load_model

    config = zero3_config("bf16")
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    engine = deepspeed.initialize(model=load_model(checkpoint, config), config=config)[0]
    results = []
    for turn in range(repeats):
        for method in TURNS[turn % len(TURNS)]:
            folder = Path(out) / method
            os.sync()
            dist.barrier()
            collectives.use.payload_bytes, collectives.active = 0, True
            with MemorySampler() as memory:
                start = time.perf_counter()
                SAVERS[method](engine, folder, max_shard_size)
                seconds = time.perf_counter() - start
            collectives.active = False
            use = memory.use
            dist.barrier()
            digests = {}
            if os.environ["RANK"] == "0":
                if method != "floor" and method not in {result.method for result in results}:
                    digests = {path.name: _digest(path) for path in sorted(folder.glob("*.safetensors"))}
                shutil.rmtree(folder)
            dist.barrier()
            results.append(
                Result(method, seconds, use.peak_anon, use.peak_file, collectives.use.payload_bytes, digests)
            )
    return results


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(8 << 20):
            digest.update(data)
    return digest.hexdigest()


def _cells(world_size: int, method: str, ranks: list[list[Result]]) -> list[str]:
    """Return a row: medians over the repeats of the slowest rank, and the largest peak of all ranks."""
    mine = [[result for result in results if result.method == method] for results in ranks]
    seconds = statistics.median(max(each.seconds for each in turn) for turn in zip(*mine, strict=True))
    every = [result for results in mine for result in results]
    peak_anon, peak_file = max(r.peak_anon for r in every), max(r.peak_file for r in every)
    network = max(r.collective_bytes for r in every)
    sizes = (f"{size / MIB:.0f}" for size in (peak_anon, peak_file, network))
    return [str(world_size), METHODS[method], f"{seconds:.1f}", *sizes]


def main() -> None:
    parser = parser_of(__doc__, params=1.5e9, ranks=[2, 4], repeats=4)
    parser.add_argument("--max-shard-size", default="500MB")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "save")
    arguments = parser.parse_args()
    rows: list[Sequence[str]] = [COLUMNS]
    with checkpoint_of(int(arguments.params)) as path:
        for world_size in arguments.ranks:
            out = arguments.out / f"{world_size}-ranks"
            args = str(path), str(out), arguments.max_shard_size, arguments.repeats
            found = run_on_ranks(run_rank, *args, out=out, world_size=world_size)
            ranks = [[Result(**result) for result in results] for results in found]
            digests = {result.method: result.digests for result in ranks[0] if result.digests}
            if digests["default"] != digests["lowmem"]:
                differing = sorted(k for k in digests["default"] if digests["default"][k] != digests["lowmem"].get(k))
                raise SystemExit(f"{world_size} ranks: default and lowmem_load wrote other files: {differing}")
            rows += [_cells(world_size, method, ranks) for method in METHODS]
    show_table("benchmarks.save", rows, docs=arguments.docs)


if __name__ == "__main__":
    main()
