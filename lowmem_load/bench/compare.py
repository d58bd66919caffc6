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

from lowmem_load.bench import page_cache
from lowmem_load.bench.launch import run_ranks
from lowmem_load.bench.memory import available_bytes
from lowmem_load.bench.worker import FLOOR, STOCK, Result
from lowmem_load.errors import ConfigError
from lowmem_load.inspection.files import stored
from lowmem_load.read.source import LocalFile

MODULE = "lowmem_load.bench.worker"


@dataclass(frozen=True, slots=True)
class Row:
    """One method, all repeats. Seconds of the slowest rank (the middle one of the repeats), the largest peaks of ranks.

    Attributes:
        method, ranks: which it was.
        seconds, all_seconds: middle one, and of each repeat.
        peak_bytes, device_peak_bytes, read_bytes, phases: see `Result`; of the rank that had most.
        digest: of the model.
        skipped: why it was not run; "" if it was.
    """

    method: str
    ranks: int
    seconds: float = 0.0
    all_seconds: tuple[float, ...] = ()
    peak_bytes: int = 0
    device_peak_bytes: int = 0
    read_bytes: int | None = None
    digest: str = ""
    skipped: str = ""


def compare(
    folder: str,
    ds_config: Mapping[str, Any],
    *,
    methods: Sequence[str],
    ranks: int,
    repeats: int,
    is_cold: bool,
    on_gpu: bool,
    auto_class: str | None = None,
    told: Callable[[str], object] = str,
) -> list[Row]:
    """Return a row for each method.

    Args:
        folder: of the checkpoint.
        ds_config: of stage 3.
        methods: in order.
        ranks: processes on this machine.
        repeats: of each.
        is_cold: whether the files are put out of the page cache before each; else they are read into it.
        on_gpu: whether DeepSpeed may look for an accelerator.
        auto_class: as for `load_model`.
        told: called with a line before each run.

    Raises:
        GroupError: a rank failed.
    """
    files = [os.path.join(folder, file.name) for file in _files(folder)]
    rows = []
    for method in methods:
        reason = _reason_to_skip(method, files)
        if reason:
            rows.append(Row(method, ranks, skipped=reason))
            continue
        found: list[list[Result]] = []
        for repeat in range(repeats):
            told(f"{method}, {ranks} ranks, run {repeat + 1} of {repeats}")
            with tempfile.TemporaryDirectory(prefix="lowmem_load-bench-") as out:
                (page_cache.drop if is_cold else page_cache.warm)(files)
                spec = {"method": method, "folder": folder, "files": files, "ds_config": ds_config, "out": out}
                texts = run_ranks(MODULE, {**spec, "auto_class": auto_class}, Path(out), ranks, on_gpu=on_gpu)
                found.append([Result(**json.loads(text)) for text in texts])
        rows.append(_row(method, found))
    return rows


def _row(method: str, repeats: Sequence[Sequence[Result]]) -> Row:
    seconds = tuple(max(result.seconds for result in results) for results in repeats)
    results = [result for each in repeats for result in each]
    digests = {result.digest for result in results}
    counted = [result.read_bytes for result in results if result.read_bytes is not None]
    return Row(
        method=method,
        ranks=results[0].world_size,
        seconds=statistics.median(seconds),
        all_seconds=seconds,
        peak_bytes=max(result.peak_bytes for result in results),
        device_peak_bytes=max(result.device_peak_bytes for result in results),
        read_bytes=max(counted, default=None),
        digest=digests.pop() if len(digests) == 1 else "differs between runs",
    )


def equal_weights(rows: Sequence[Row]) -> bool:
    """Return whether all methods that end with a model ended with the same one."""
    return len({row.digest for row in rows if row.digest}) <= 1


def _files(folder: str) -> Sequence[Any]:
    files, _ = stored(folder, "", LocalFile)
    return files


def _reason_to_skip(method: str, files: Sequence[str]) -> str:
    """Return why a method cannot be run here: stock holds all files on rank 0."""
    needed, free = sum(map(os.path.getsize, files)), available_bytes()
    if method == STOCK and free is not None and 2 * needed > free:
        return f"rank 0 alone would take about {2 * needed >> 20} MiB, {free >> 20} MiB are free"
    if method == FLOOR and free is not None and needed > free:
        return f"would take {needed >> 20} MiB, {free >> 20} MiB are free"
    return ""


def checked_methods(methods: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the methods, in order, each once.

    Raises:
        ConfigError: one is not known.
    """
    unknown = [method for method in methods if method not in known]
    if unknown:
        raise ConfigError(f"--method: expected {', '.join(known)}, got {', '.join(unknown)}")
    return list(dict.fromkeys(methods or known))
