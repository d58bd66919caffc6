"""Runs everything that a release must pass: `make release [ARGS="--only zoo faults"]`.

Each part is a process with a log in .cache/release. At the end there is a summary, also in summary.md beside the logs,
to be attached to the release. The status is 1 if a part has failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import machine_lines
from tests.compat.__main__ import ENVIRONMENTS

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / ".cache" / "release"

FRAMEWORKS = (
    "trl-dpo-full",
    "llama-factory-sft-lora",
    "ms-swift-sft-full",
    "axolotl-sft-full",
    "openrlhf-sft-full-bf16",
    "sentence-transformers-contrastive-full",
    "lightning-sft-full",
)
"""A case of each framework; the others differ from these in the trainer's own code."""

COMPAT = "make compat ARGS='--environments {}'"

PARTS = {
    "test": "make test",
    "more-tests": "python -m pytest -n 2 --dist loadfile -m release --ignore tests/faults",
    "device": "make test-device",
    "main-table": "make bench ARGS='--repeats 3 --once stock --also-cold --docs'",
    "scale": "python -m benchmarks.scale --all --docs",
    "faults": "make faults",
    "zoo": "make zoo ARGS='--world-sizes 2 --precision bf16 --methods lowmem --once'",
    "frameworks": f"make frameworks ARGS='--only {' '.join(FRAMEWORKS)}'",
    **{f"compat/{name}": COMPAT.format(name) for name in ENVIRONMENTS},
}
"""Commands by name, in the order in which they run. Each ends with another status than 0 if something failed."""


def run(name: str) -> tuple[int, float]:
    """Run a part; return its status and its minutes."""
    log, start = KEPT / f"{name}.log", time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    # make hands ARGS on to every make below it, where they are meant for this program.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "ARGS"))}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    with log.open("wb") as output:
        status = subprocess.call(
            PARTS[name], shell=True, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    return status, (time.monotonic() - start) / 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.release_run", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    names = parser.parse_args(arguments).only or list(PARTS)
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    text = [f"commit {commit}; {'; '.join(machine_lines())}"]
    text += ["", "| part | command | result | minutes |", "|---|---|---|---|"]
    num_failed = 0
    for name in names:
        print(f"{name}: {PARTS[name]}", flush=True)
        status, minutes = run(name)
        num_failed += bool(status)
        text.append(f"| {name} | `{PARTS[name]}` | {f'FAILED ({status})' if status else 'passed'} | {minutes:.1f} |")
        print(text[-1], flush=True)
    text += ["", f"{len(names) - num_failed} of {len(PARTS)} parts passed, {num_failed} failed. Logs: {KEPT}"]
    (KEPT / "summary.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    print(*text, sep="\n")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
