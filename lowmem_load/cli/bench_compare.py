"""Runs each way to load a checkpoint in fresh ranks, and lays the results side by side."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowmem_load.cli.bench_launch import run_ranks
from lowmem_load.cli.bench_memory import available_bytes, drop, warm
from lowmem_load.cli.bench_worker import FLOOR, METHODS, STOCK
from lowmem_load.cli.file_contents import weight_files

MODULE = "lowmem_load.cli.bench_worker"


@dataclass(frozen=True, slots=True)
class Row:
    """One method, all repeats.

    Attributes:
        method: which it was.
        seconds, all_seconds: of the slowest rank: the middle one of the repeats, and of each.
        peak_bytes, device_peak_bytes: the largest of all ranks, see `bench.worker.measure`.
        digest: of the model.
        skipped: why it was not run; "" if it was.
    """

    method: str
    seconds: float = 0.0
    all_seconds: tuple[float, ...] = ()
    peak_bytes: int = 0
    device_peak_bytes: int = 0
    digest: str = ""
    skipped: str = ""


def compare(
    folder: str,
    ds_config: Mapping[str, Any],
    *,
    ranks: int,
    repeats: int,
    is_cold: bool,
    on_gpu: bool,
    told: Callable[[str], object] = str,
) -> list[Row]:
    """Return a row for each method.

    Args:
        folder: of the checkpoint.
        ds_config: of stage 3.
        ranks: processes on this machine.
        repeats: of each method.
        is_cold: whether the files are put out of the page cache before each run; else they are read into it.
        on_gpu: see `run_ranks`.
        told: called with a line before each run.

    Raises:
        CheckpointError: the folder holds no weights.
        GroupError: a rank failed.
    """
    files, rows = weight_files(folder), []
    for method in METHODS:
        spec = {"method": method, "folder": folder, "files": files, "ds_config": ds_config}
        reason = _reason_to_skip(method, files)
        found: list[list[dict[str, Any]]] = []
        for repeat in range(0 if reason else repeats):
            told(f"{method}, {ranks} ranks, run {repeat + 1} of {repeats}")
            (drop if is_cold else warm)(files)
            found.append(_run(spec, ranks, on_gpu=on_gpu))
        rows.append(Row(method, skipped=reason) if reason else _row(method, found))
    return rows


def _run(spec: Mapping[str, Any], ranks: int, *, on_gpu: bool) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="lowmem_load-bench-") as out:
        texts = run_ranks(MODULE, {**spec, "out": out}, Path(out), ranks, on_gpu=on_gpu)
    return [json.loads(text) for text in texts]


def _row(method: str, repeats: Sequence[Sequence[Mapping[str, Any]]]) -> Row:
    seconds = tuple(max(result["seconds"] for result in results) for results in repeats)
    results = [result for each in repeats for result in each]
    digests = {result["digest"] for result in results}
    return Row(
        method=method,
        seconds=statistics.median(seconds),
        all_seconds=seconds,
        peak_bytes=max(result["peak_bytes"] for result in results),
        device_peak_bytes=max(result["device_peak_bytes"] for result in results),
        digest=digests.pop() if len(digests) == 1 else "differs between runs",
    )


def equal_weights(rows: Sequence[Row]) -> bool:
    """Return whether all methods that end with a model ended with the same one."""
    return len({row.digest for row in rows if row.digest}) <= 1


def _reason_to_skip(method: str, files: Sequence[str]) -> str:
    """Return why a method cannot be run here: stock holds all files on rank 0, beside the ranks' partitions."""
    copies, free = {STOCK: 2, FLOOR: 1}.get(method, 0), available_bytes()
    needed = copies * sum(map(os.path.getsize, files))
    if free is None or needed <= free:
        return ""
    return f"would take {needed >> 20} MiB of host memory, {free >> 20} MiB are free"
