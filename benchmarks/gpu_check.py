"""Checks lowmem_load on the GPUs of this machine, in one command: python -m benchmarks.gpu_check.

Small checkpoints against ordinary loads, training against stock ZeRO-3, what goes wrong on a device only, device
memory, and the time of a load beside the rates of storage and pinned copies that are measured in the same run. Prints
a table fit for the README, with the machine named, and writes raw results as JSON. With --simulated it runs on the
simulated device of tests/device, and says so: its figures are of no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint import checkpoint_of
from benchmarks.gpu_worker import CheckResult, CheckSpec, run
from benchmarks.launch import REPOSITORY, run_on_ranks
from benchmarks.machine import Machine, describe_machine
from benchmarks.results import log, markdown

SIMULATED = "SIMULATED DEVICE: no GPU was used, and none of these figures is one of a GPU."


def checkpoints(folder: Path) -> dict[str, str]:
    """Return small checkpoints by what they show: as it lies, cast and sharded, tied, fused on load."""
    from tests import builders

    made = {
        "llama": builders.tiny_llama(folder),
        "llama, odd sizes, sharded, cast": builders.tiny_llama(folder, torch.float32, "20KB", **builders.ODD_SIZES),
        "qwen2, tied": builders.tiny_qwen2_tied(folder),
        "mixtral, experts fused on load": builders.tiny_mixtral(folder),
    }
    return {name: str(path) for name, path in made.items()}


def failures(results: Sequence[CheckResult]) -> list[str]:
    """Return a line for each check that was not right on some rank."""
    return [
        f"{name}, rank {result.rank}: {found}"
        for result in results
        for name, found in result.checks.items()
        if found != "ok"
    ]


def table(results: Sequence[CheckResult]) -> list[list[str]]:
    """Return the cells of the timed loads, header first; seconds and bytes of the slowest rank, rates of all."""
    head = ["load", "ranks", "seconds", "GB/s of all", "of min(storage, copies)"]
    cells = [[*head, "read / needed", "HBM beside partitions"]]
    pinned = sum(result.gbps["pinned"] for result in results)
    storage = sum(result.gbps["storage"] for result in results)
    for name in results[0].loads:
        loads = [result.loads[name] for result in results]
        read_s = max(load["read_seconds"] for load in loads)
        rate = sum(load["read_bytes"] for load in loads) / read_s / 1e9
        limit = pinned if "cached" in name else min(storage, pinned)
        over = max(load["read_bytes"] / load["needed_bytes"] for load in loads)
        above = max(load["bytes_above_held"] for load in loads) / (1 << 20)
        total_s = max(load["seconds"] for load in loads)
        line = [name, str(len(results)), f"{total_s:.2f}", f"{rate:.2f}", f"{rate / limit:.0%}"]
        cells.append([*line, f"{over:.4f}", f"{above:.1f} MiB"])
    return cells


def text(results: Sequence[CheckResult], machine: Machine, is_simulated: bool) -> str:
    num_checks = len(results[0].checks)
    wrong = failures(results)
    rates = {name: sum(result.gbps[name] for result in results) for name in results[0].gbps}
    lines = [
        *([SIMULATED, ""] if is_simulated else []),
        f"{len(results)} x {results[0].device}",
        *machine.lines(),
        "measured, all ranks at once: "
        + ", ".join(f"{name} {rate:.2f} GB/s" for name, rate in rates.items())
        + " (storage: not cached; copies to the device)",
        "",
        markdown(table(results)),
        f"{num_checks} checks on each of {len(results)} ranks, {len(wrong)} failed",
        *wrong,
        *(["", SIMULATED] if is_simulated else []),
    ]
    return "\n".join(lines)


def num_devices(is_simulated: bool) -> int:
    """Return how many ranks there can be; raises SystemExit where there is no accelerator."""
    if is_simulated:
        return 2  # unless SIM_DEVICES says otherwise, which the ranks see
    if not torch.accelerator.is_available():
        raise SystemExit("gpu_check: torch finds no accelerator on this machine; --simulated runs on the simulated one")
    return torch.accelerator.device_count()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--params", type=int, default=1_500_000_000, help="parameters of the Llama whose load is timed")
    parser.add_argument("--ranks", type=int, help="one for each device by default")
    parser.add_argument("--cache", type=Path, default=REPOSITORY / ".cache" / "benchmarks", help="for that checkpoint")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "gpu_check")
    parser.add_argument("--simulated", action="store_true", help="on the simulated device of tests/device")
    options = parser.parse_args(arguments)
    num_ranks = options.ranks or num_devices(options.simulated)
    machine = describe_machine()
    with (
        tempfile.TemporaryDirectory() as folder,
        checkpoint_of(options.params, options.cache, keep=False, log=log) as big,
    ):
        spec = CheckSpec(checkpoints(Path(folder)), str(big), options.simulated, 1 << 28)
        log(f"{num_ranks} ranks; logs in {options.out}")
        answers = run_on_ranks(run, asdict(spec), out=options.out, world_size=num_ranks, on_gpu=not options.simulated)
    results = [CheckResult(**answer) for answer in answers]
    raw: dict[str, Any] = {"is_simulated": options.simulated, "machine": asdict(machine), "params": options.params}
    raw["ranks"] = [asdict(result) for result in results]
    (options.out / "gpu_check.json").write_text(json.dumps(raw, indent=1))
    found = text(results, machine, options.simulated)
    (options.out / "gpu_check.md").write_text(found + "\n")
    log(found)
    return int(bool(failures(results)))


if __name__ == "__main__":
    sys.exit(main())
