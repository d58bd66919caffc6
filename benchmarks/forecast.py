"""What `lowmem-load plan` says: of published models, and beside what loads of models that fit here then report.

python -m benchmarks.forecast --published     # from sparse files with true headers; some minutes
python -m benchmarks.forecast --loads         # two ranks on the CPU, checkpoints of 3 and 2 GB
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.checkpoint import checkpoint_of, warm_page_cache
from benchmarks.compare import PRESETS
from benchmarks.launch import run_processes
from benchmarks.machine import describe_machine
from benchmarks.sparse import write
from benchmarks.table import aligned

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
}
MIB = 1 << 20
GIB = 1 << 30
MAX_PEAK_DIFFERENCE = 32 * MIB
"""Bytes by which a stated peak of host memory may differ from the one that a load reports."""


class Published(NamedTuple):
    """A model of `benchmarks.published`, and a job for it."""

    model: str
    world_size: int
    options: tuple[str, ...] = ()


JOBS = (
    Published("llama-3.1-8b", 8),
    Published("llama-3.1-70b", 16),
    Published("llama-3.1-405b", 128),
    Published("qwen3-235b-a22b", 64),
    Published("deepseek-v3-fp8", 256, ("--dequantize",)),
)
NODE = ("--device-memory", "80GiB", "--host-memory", "1TiB", "--read-rate", "5GB/s", "--accelerator", "cuda")
LOADS = ("llama-1.5b", "qwen3-moe")


def _told(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def planned(folder: Path, ds_config: Path, world_size: int, *options: str) -> tuple[dict[str, Any], float]:
    """Return what the command says, and the seconds that it took from start to end."""
    command = [sys.executable, "-m", "lowmem_load", "plan", str(folder), "--ds-config", str(ds_config), "--json"]
    start_s = time.perf_counter()
    done = subprocess.run([*command, "--world-size", str(world_size), *options], stdout=subprocess.PIPE, check=False)
    if done.returncode > 1:
        raise RuntimeError(f"{folder.name}: lowmem-load plan ended with {done.returncode}")
    return json.loads(done.stdout), time.perf_counter() - start_s


def published(ds_config: Path, jobs: Sequence[Published]) -> list[tuple[str, ...]]:
    """Return the rows of the table of published models."""
    rows = [
        (
            *("model", "ranks", "partition", "host peak", "device peak", "reads", "read / needed", "s to read"),
            *("GPU in training", "node in training", "fits", "describe s", "plan s", "whole command s"),
        )
    ]
    for job in jobs:
        with tempfile.TemporaryDirectory() as folder:
            found, seconds = planned(
                write(job.model, Path(folder) / job.model), ds_config, job.world_size, *NODE, *job.options
            )
        rank, training, verdict = found["ranks"][0], found["training"], found["verdict"]
        fits = "yes" if found["fits"] else f"no; from {verdict['world_size']} ranks on"
        rows.append(
            (
                job.model,
                str(job.world_size),
                f"{rank['partition_bytes'] / GIB:.2f} GiB",
                f"{rank['host_peak_bytes'] / MIB:.0f} MiB",
                f"{rank['device_peak_bytes'] / GIB:.2f} GiB",
                f"{rank['num_reads']:,}",
                f"{rank['read_bytes'] / rank['needed_bytes']:.4f}",
                f"{found['read_seconds']:.1f}",
                f"{training['device_bytes'] / GIB:.1f} GiB",
                f"{training['host_bytes'] / GIB:.1f} GiB",
                fits,
                *(f"{found['seconds'][name]:.2f}" for name in ("describe", "plan")),
                f"{seconds:.1f}",
            )
        )
        print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    return rows


def loads(
    ds_config: Path, presets: Sequence[str], cache: Path, *, keeps: bool
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the rows of the table of loads, and what differs by more than it may."""
    rows = [("model", "rank", "bytes read", "stated", "reads", "stated", "peak MiB", "stated", "difference")]
    problems: list[str] = []
    for name in presets:
        preset = PRESETS[name]
        with checkpoint_of(preset.num_params, cache, keeps, _told, preset.family) as folder:
            found, _ = planned(folder, ds_config, 2, "--accelerator", "cpu", "--threads", "1")
            warm_page_cache(folder)
            with tempfile.TemporaryDirectory() as out:
                spec = {"checkpoint": str(folder), "ds_config": DS_CONFIG, "out": out}
                reports = [
                    json.loads(text) for text in run_processes("benchmarks.load_worker", spec, Path(out), 2, False)
                ]
        for stated, report in zip(found["ranks"], reports, strict=True):
            peak = sum(report["peak_memory"].values())
            difference = stated["host_peak_bytes"] - peak
            pairs = [(report[key], stated[key]) for key in ("read_bytes", "num_reads")]
            is_off = abs(difference) > MAX_PEAK_DIFFERENCE or any(one != other for one, other in pairs)
            problems += [f"{name}, rank {report['rank']}: stated and reported differ"] * is_off
            counts = [f"{number:,}" for pair in pairs for number in pair]
            peaks = [f"{nbytes / MIB:.1f}" for nbytes in (peak, stated["host_peak_bytes"], difference)]
            rows.append((name, str(report["rank"]), *counts, *peaks))
    return rows, problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: print the tables; 1 if a load differs from what was stated."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecast", description=__doc__.splitlines()[0])
    parser.add_argument("--published", action="store_true", help="plan the published models")
    parser.add_argument("--loads", action="store_true", help="load models that fit here, and compare")
    parser.add_argument("--cache", type=Path, default=Path(".cache/benchmarks"), help="folder of the checkpoints")
    parser.add_argument("--keep-checkpoint", action="store_true", help="leave a new checkpoint for the next run")
    options = parser.parse_args(arguments)
    if not (options.published or options.loads):
        parser.error("pass --published, --loads or both")
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        ds_config = Path(folder) / "ds_config.json"
        ds_config.write_text(json.dumps(DS_CONFIG))
        print("\n".join(describe_machine().lines()))
        if options.published:
            print("\n".join(["", *aligned(published(ds_config, JOBS))]))
        if options.loads:
            rows, problems = loads(ds_config, LOADS, options.cache, keeps=options.keep_checkpoint)
            print("\n".join(["", *aligned(rows), *problems]))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
