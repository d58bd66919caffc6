"""What the largest models cost a rank: `python -m benchmarks.scale MODEL --rank R --world-size W`, or `--all`.

This is a simulation: the checkpoints are sparse files with true headers and holes for data (`benchmarks.published`).
One process, on one core, is rank R of W on torch's fake process group. Small partitions are loaded; larger ones are
only planned. Every row is a fresh process. With `--all`, the command ends with status 1 if a row failed. To compare
with another version, run it in a `git worktree` of that version as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.launch import REPOSITORY
from benchmarks.published import MODELS, write
from benchmarks.results import parser_of, show_table

DS_CONFIG = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}

ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
"""Read by the libraries when they are imported. Nothing needs an accelerator."""

DEQUANTIZING = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""transformers' class of quantization configs for each method that checkpoints of `MODELS` are stored in."""

MAX_LOADED_BYTES = 4 << 30
"""Of the largest partition that is loaded; of larger ones only the plan is made."""

LIMIT_S = 300.0
"""Of one row."""

MIB = 1 << 20

COLUMNS = (
    "model",
    "tensors",
    "rank/world",
    "describe, s",
    "plan, s",
    "read, s",
    "over, MiB",
    "partition, MiB",
    "reads",
    "bytes read/needed",
)

DEFINITIONS = f"""\
Simulated: sparse checkpoints with true headers and holes for data; one process is the rank, and has one core.
tensors    in all files, those included that the model does not use.
describe, plan, read   CPU seconds: transformers' loader run on symbolic tensors (and, for a DistributedConfig, the
           sharding of the model); from there to the finished plan;
           partitions made and filled (empty where they are more than {MAX_LOADED_BYTES >> 30} GiB).
over       MiB: high-water mark of resident memory above the start and the partition; of the plan alone where nothing is
           read. The start is after imports (torch, transformers and the model's module, deepspeed) and malloc_trim.
partition  MiB. reads: read calls of the plan. read/needed: bytes."""


class Row(NamedTuple):
    """A model of `MODELS` as one rank of a world."""

    model: str
    rank: int
    world_size: int
    sizes: str = ""  # of the DistributedConfig, "fsdp=128 tp=8"; "" for ZeRO-3

    def target(self) -> dict[str, Any]:
        if not self.sizes:
            return {"ds_config": DS_CONFIG}
        from transformers.distributed import DistributedConfig

        sizes = {name: int(size) for name, _, size in (each.partition("=") for each in self.sizes.split())}
        return {"distributed_config": DistributedConfig(**{f"{name}_size": size for name, size in sizes.items()})}


ROWS = (
    Row("llama-3.1-405b", 3, 8),
    Row("llama-3.1-405b", 517, 1024),
    Row("qwen3-235b-a22b", 517, 1024),
    Row("deepseek-v3-bf16", 517, 1024),
    Row("deepseek-v3-fp8", 517, 1024),
    Row("kimi-k2-fp8", 517, 1024),
    Row("qwen3-vl-235b-a22b", 33, 64),
    Row("qwen3-vl-235b-a22b", 517, 1024),
    Row("qwen3-vl-235b-a22b", 1, 4096),
    Row("gpt-oss-120b", 33, 64),
    Row("gpt-oss-120b", 517, 1024),
    Row("llama-3.1-405b", 517, 1024, "fsdp=128 tp=8"),
    Row("llama-3.1-405b", 517, 1024, "dp_replicate=16 fsdp=64"),
    Row("qwen3-235b-a22b", 517, 1024, "fsdp=128 tp=8 ep=64"),
    Row("deepseek-v3-bf16", 517, 1024, "fsdp=128 tp=8 ep=64"),
    Row("deepseek-v3-fp8", 517, 1024, "dp_replicate=16 fsdp=64"),
)
"""What `--all` measures: ranks in the middle of most worlds, since the last one's partitions may be cut short."""


def keywords_of(model: str) -> dict[str, Any]:
    """Return what loading a model of `MODELS` takes besides its folder."""
    import transformers

    config = MODELS[model].config
    if "quantization_config" not in config:
        return {}
    method = DEQUANTIZING[config["quantization_config"]["quant_method"]]
    return {"quantization_config": getattr(transformers, method)(dequantize=True)}


def be_rank(rank: int, world_size: int) -> None:
    """Make this process a rank of a world that has no others, on torch's fake process group."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="8")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # DeepSpeed asks for them, and uses the group
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def measure(folder: str, row: Row) -> dict[str, Any]:
    """Load, or plan, in this process, which must be fresh: what an earlier load left behind would not be counted."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import deepspeed  # noqa: F401  imported here so that the figures are the load's alone
    import transformers

    import lowmem_load
    from benchmarks.memory import PeakMemory
    from lowmem_load.load import load_model
    from lowmem_load.load.make_plan import PlannedModel

    getattr(transformers, MODELS[row.model].config["architectures"][0])  # imports the model's module
    keywords: dict[str, Any] = keywords_of(row.model)
    is_loaded = not row.sizes and MODELS[row.model].num_parameters * 2 // row.world_size <= MAX_LOADED_BYTES
    if is_loaded:
        be_rank(row.rank, row.world_size)
    elif row.sizes:  # DeepSpeed has set others
        os.environ.update(LOCAL_RANK="0")
        keywords["dtype"] = "bfloat16"
    elapsed, time.perf_counter = time.perf_counter, time.process_time  # phases are measured by it
    with PeakMemory() as sampler:
        if is_loaded:
            seconds = dict(lowmem_load.get_load_report(lowmem_load.load_model(folder, DS_CONFIG, **keywords)).seconds)
        else:
            start, ordinary, seconds = time.perf_counter(), load_model.make_plan, {}

            def timed(*args: Any) -> PlannedModel:
                seconds["describe"] = time.perf_counter() - start  # the sharding of the skeleton too
                made = ordinary(*args)
                seconds["plan"] = time.perf_counter() - start - seconds["describe"]
                return made

            load_model.make_plan = timed
            plan = lowmem_load.plan(folder, rank=row.rank, world_size=row.world_size, **row.target(), **keywords)
    time.perf_counter = elapsed
    if is_loaded:
        plan = lowmem_load.plan(folder, DS_CONFIG, rank=row.rank, world_size=row.world_size, **keywords)
    figures = {name: getattr(plan.costs, name) for name in ("needed_bytes", "read_bytes", "num_reads")}
    return {
        "seconds": {name: seconds.get(name) for name in ("describe", "plan", "read")},
        "over_bytes": sampler.peak_bytes - (plan.partition_bytes if is_loaded else 0),
        "partition_bytes": plan.partition_bytes,
        **figures,
    }


def measure_apart(row: Row, folder: Path, repeats: int) -> dict[str, Any]:
    """Measure a row in fresh processes; return the one of median CPU seconds, or {"failed": ...}."""
    found = []
    for _ in range(repeats):
        command = [sys.executable, "-m", "benchmarks.scale", json.dumps([str(folder), *row])]
        try:
            done = subprocess.run(
                command, cwd=REPOSITORY, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True,
                timeout=LIMIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"failed": f"took more than {LIMIT_S:.0f} s"}
        if done.returncode:
            return {"failed": (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]}
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return sorted(found, key=lambda each: sum(filter(None, each["seconds"].values())))[(repeats - 1) // 2]


def cells(row: Row, found: dict[str, Any]) -> list[str]:
    names = [row.model, f"{MODELS[row.model].num_tensors:,}", f"{row.rank}/{row.world_size} {row.sizes}".strip()]
    if "failed" in found:
        return [*names, f"failed: {found['failed']}", *[""] * (len(COLUMNS) - len(names) - 1)]
    return [
        *names,
        *("" if seconds is None else f"{seconds:.1f}" for seconds in found["seconds"].values()),
        *(f"{found[name] / MIB:,.0f}" for name in ("over_bytes", "partition_bytes")),
        f"{found['num_reads']:,}",
        f"{found['read_bytes'] / found['needed_bytes']:.2f}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, repeats=1)
    parser.add_argument("model", nargs="?", choices=list(MODELS), help="what to load or plan")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--sizes", default="", help='shard by a DistributedConfig instead of ZeRO-3: "fsdp=128 tp=8"')
    parser.add_argument("--all", action="store_true", help="the default table instead of one model")
    parser.add_argument("--folder", help="where the sparse checkpoints go; by default the temporary folder")
    options = parser.parse_args(arguments)
    if options.all == (options.model is not None) or options.repeats < 1:
        parser.error("name a model, or pass --all; --repeats must be at least 1")
    if options.model and not 0 <= options.rank < (options.world_size or 0):
        parser.error("a model needs --world-size W and --rank R, from 0 to W - 1")
    table: list[Sequence[str]] = [COLUMNS]
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        for row in ROWS if options.all else [Row(options.model, options.rank, options.world_size, options.sizes)]:
            folder = Path(scratch, row.model)
            if not folder.exists():
                write(row.model, folder)
            table.append(cells(row, measure_apart(row, folder, options.repeats)))
            print(f"{'failed' if 'failed:' in table[-1][3] else 'done'}: {'  '.join(table[-1])}", flush=True)
    show_table("benchmarks.scale", table, docs=options.docs)
    print(DEFINITIONS)
    return int(any("failed:" in line[3] for line in table))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("["):
        given, *row_of = json.loads(sys.argv[1])
        print(json.dumps(measure(given, Row(*row_of))), flush=True)
        os._exit(0)  # as benchmarks/worker.py says
    sys.exit(main())
