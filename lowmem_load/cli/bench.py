"""`lowmem-load bench`: load a checkpoint by each method in fresh ranks, and compare seconds and memory."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from lowmem_load.cli.bench_worker import FLOOR, STOCK, STREAMED, available_bytes, drop, warm
from lowmem_load.cli.common import NO, Json, answer, table, working
from lowmem_load.errors import LowMemLoadError
from lowmem_load.integrations.startup_hook import OFF, SWITCH
from lowmem_load.text import size

DS_CONFIG = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}

TIMEOUT_S = 3600
"""Seconds for all ranks of one run. No load on one machine takes that long."""

LOG_TAIL_LINES = 25
"""Lines of a failed rank's output that its error repeats."""

POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    """All runs of one method, `STOCK`, `STREAMED` or `FLOOR`.

    Attributes:
        seconds: median of `all_seconds`; the slowest rank times a run.
        peak_bytes, device_peak_bytes: the highest of all ranks and runs; see `bench_worker.measure`.
        digests: of the loaded models, each once.
        skipped: the reason for not running the method; "" if it ran.
    """

    method: str
    seconds: float = 0.0
    all_seconds: tuple[float, ...] = ()
    peak_bytes: int = 0
    device_peak_bytes: int = 0
    digests: tuple[str, ...] = ()
    skipped: str = ""


class GroupError(LowMemLoadError, RuntimeError):
    """A rank failed or the ranks ran out of time. The message ends with the last lines of that rank's log."""


def bench(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A local checkpoint.", show_default=False)],
    ranks: Annotated[int, typer.Option(min=1, help="Processes to start on this machine.")] = 2,
    ds_config: Annotated[
        Path | None, typer.Option(help="JSON file; ZeRO-3 in bf16 by default.", exists=True, show_default=False)
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each method; the median counts.")] = 1,
    cold: Annotated[bool, typer.Option("--cold", help="Drop the files from the page cache before each run.")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Load onto this machine's accelerators.")] = False,
    as_json: Json = False,
) -> None:
    """Compare a load by stock ZeRO-3 and by lowmem_load.

    Measures seconds and peak memory, and compares the loaded weights. Each run starts fresh processes. The floor only
    reads each rank's share of the files' bytes into fresh memory. Exits with 1 if stock and lowmem_load load different
    weights.

    \b
    lowmem-load bench /models/Llama-3.1-8B --ranks 4 --cold --repeats 3
    """
    with working():
        from lowmem_load.config.ds_config import read_ds_config

        rows = compare(
            folder,
            read_ds_config(str(ds_config)) if ds_config is not None else DS_CONFIG,
            ranks=ranks,
            repeats=repeats,
            is_cold=cold,
            on_gpu=gpu,
            log=lambda line: typer.echo(line, err=True),
        )
    is_equal, verdict = _verdict(rows)
    columns = ("method", "slowest rank", "peak of host memory", "of device memory")
    cells = []
    for row in rows:
        device = size(row.device_peak_bytes) if row.device_peak_bytes else ""
        ran = row.method, f"{row.seconds:.2f} s", size(row.peak_bytes), device
        cells.append((row.method, row.skipped, "", "") if row.skipped else ran)
    answer(
        as_json,
        {"rows": [asdict(row) for row in rows], "equal_weights": is_equal},
        lambda: [table(f"{folder}, {ranks} ranks", columns, cells, right=columns[1:]), verdict],
    )
    if not is_equal:
        raise typer.Exit(NO)


def _verdict(rows: Sequence[Row]) -> tuple[bool | None, str]:
    """Return whether all runs ended with the same weights, None if stock's were not compared, and a sentence on it."""
    if len({digest for row in rows for digest in row.digests}) > 1:
        return False, "The weights differ; see the digests of --json."
    compared = [row.method for row in rows if row.digests]
    if {STOCK, STREAMED} <= set(compared):
        return True, f"All runs of {' and '.join(compared)} ended with the same weights."
    skipped = ", ".join(row.method for row in rows if row.skipped)
    return None, f"The weights were not compared: skipped {skipped}."


def compare(
    folder: str,
    ds_config: Mapping[str, Any],
    *,
    ranks: int,
    repeats: int,
    is_cold: bool,
    on_gpu: bool,
    log: Callable[[str], object] = str,
) -> list[Row]:
    """Run every method and return a row for each. `log` gets a line of text before each run."""
    from lowmem_load.cli.checkpoint_contents import weight_files

    files, rows = weight_files(folder), []
    for method in (STOCK, STREAMED, FLOOR):
        reason = _reason_to_skip(method, files)
        runs: list[list[dict[str, Any]]] = []
        for repeat in range(0 if reason else repeats):
            log(f"{method}, {ranks} ranks, run {repeat + 1} of {repeats}")
            (drop if is_cold else warm)(files)
            with tempfile.TemporaryDirectory(prefix="lowmem_load-bench-") as out:
                spec = {"method": method, "folder": folder, "files": files, "ds_config": ds_config, "out": out}
                texts = run_ranks("lowmem_load.cli.bench_worker", spec, Path(out), ranks, on_gpu=on_gpu)
            runs.append([json.loads(text) for text in texts])
        rows.append(Row(method, skipped=reason) if reason else _row(method, runs))
    return rows


def _reason_to_skip(method: str, files: Sequence[str]) -> str:
    """Return a reason if this machine lacks the memory: stock holds all files on rank 0 beside all partitions."""
    copies, free = {STOCK: 2, FLOOR: 1}.get(method, 0), available_bytes()
    needed = copies * sum(map(os.path.getsize, files))
    if free is None or needed <= free:
        return ""
    return f"would take {needed >> 20} MiB of host memory, {free >> 20} MiB are free"


def _row(method: str, runs: Sequence[Sequence[Mapping[str, Any]]]) -> Row:
    seconds = tuple(max(result["seconds"] for result in results) for results in runs)
    results = [result for each in runs for result in each]
    return Row(
        method=method,
        seconds=statistics.median(seconds),
        all_seconds=seconds,
        peak_bytes=max(result["peak_bytes"] for result in results),
        device_peak_bytes=max(result["device_peak_bytes"] for result in results),
        digests=tuple(sorted({result["digest"] for result in results} - {""})),
    )


def run_ranks(
    module: str, spec: Mapping[str, Any], out: Path, world_size: int, *, on_gpu: bool, cwd: Path | None = None
) -> list[str]:
    """Run `python -m module OUT/spec.json` in `world_size` processes; return the OUT/rank<N>.json that they write.

    With `on_gpu`, DeepSpeed looks for an accelerator; `cwd` is the working directory of the processes.
    """
    out.mkdir(parents=True, exist_ok=True)
    results = [out / f"rank{rank}.json" for rank in range(world_size)]
    for result in results:  # a result of an earlier run must not pass for one of this run
        result.unlink(missing_ok=True)
    spec_path = out / "spec.json"
    spec_path.write_text(json.dumps(spec))
    command = [sys.executable, "-m", module, str(spec_path)]
    with socket.socket() as server:  # finds a free port
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            environment = _environment(rank, world_size, port, on_gpu)
            with (out / f"rank{rank}.log").open("wb") as log:
                started = subprocess.Popen(command, cwd=cwd, env=environment, stdout=log, stderr=subprocess.STDOUT)
            processes.append(started)
        _wait(processes, out)
    finally:
        for process in processes:  # kill all before waiting for one: a second interrupt may end the wait
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait()
    return [result.read_text() for result in results]


def _wait(processes: list[subprocess.Popen[bytes]], out: Path) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while any(process.poll() is None for process in processes):
        # The first failure ends the run: the other ranks would wait for it until their own timeouts.
        if any(process.poll() for process in processes) or time.monotonic() > deadline_s:
            break
        time.sleep(POLL_S)
    for rank, process in enumerate(processes):
        if process.poll():
            log = out / f"rank{rank}.log"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
            raise GroupError(f"rank {rank} of {len(processes)} ended with status {process.returncode}; {log}:\n{tail}")
    if any(process.poll() is None for process in processes):
        raise GroupError(f"{len(processes)} ranks: not done after {TIMEOUT_S} s; logs in {out}")


def _environment(rank: int, world_size: int, port: int, on_gpu: bool) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        SWITCH: OFF,  # stock is not to be streamed
        # DeepSpeed compiles an extension on its first start on CPUs and looks for ninja on PATH.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        **({} if on_gpu else {"DS_ACCELERATOR": "cpu"}),
    }
