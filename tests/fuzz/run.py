"""The long campaign: `python -m tests.fuzz.run --target pickle --seconds 600`, or `make fuzz`.

Inputs are mutated at random from the corpus. Findings go to `--findings`, one for each message.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
import zlib
from pathlib import Path

from tests.fuzz.targets import TARGETS, Finding, check, fresh_inputs

FINDINGS = Path(__file__).resolve().parents[2] / ".cache" / "fuzz" / "findings"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", help="by name; all of them when absent")
    parser.add_argument("--seconds", type=float, default=60, help="per target")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1, 1 << 31), help="printed")
    parser.add_argument("--findings", type=Path, default=FINDINGS)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    found = False
    for name in options.target or TARGETS:
        (options.findings / name).mkdir(parents=True, exist_ok=True)
        before = set((options.findings / name).iterdir())
        start = time.perf_counter()
        num_inputs = _campaign(name, options)
        seconds = time.perf_counter() - start
        new = set((options.findings / name).iterdir()) - before
        found = found or bool(new)
        print(f"{name}: {num_inputs} inputs in {seconds:.0f} s, {len(new)} new findings", *sorted(new), flush=True)
    sys.exit(found)


def _campaign(name: str, options: argparse.Namespace) -> int:
    """Return the number of inputs that were run."""
    count = 0
    for data in fresh_inputs(name, options.seed, options.seconds):
        count += 1
        try:
            check(name, data)
        except Finding as finding:
            _keep(finding, data, options.findings / name)
    return count


def _keep(finding: Exception, data: bytes, folder: Path) -> None:
    """Write an input down unless one with such a message is there: numbers and names differ, words do not."""
    words = re.sub(r"'[^']*'|\"[^\"]*\"|[0-9.]+", "", str(finding))[:120]
    path = folder / f"{zlib.crc32(words.encode()):08x}"
    if not path.exists():
        path.write_bytes(data)
        path.with_suffix(".txt").write_text(f"{finding}\n{type(finding.__cause__).__name__}: {finding.__cause__}\n")


if __name__ == "__main__":
    main()
