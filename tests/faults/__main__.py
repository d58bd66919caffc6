"""Runs the matrix and prints it: `python -m tests.faults [words...]`, of rows whose names have all the words.

Each fault strikes at each moment once, on the first or the last of 2 or 3 ranks in turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.faults import cases, subset
from tests.faults.matrix import Matrix, line
from tests.faults.shim import Unavailable


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only rows whose names have them all")
    parser.add_argument("--subset", action="store_true", help="the rows that CI runs")
    arguments = parser.parse_args()
    chosen = [
        case
        for case in (subset() if arguments.subset else cases())
        if all(word in case.name for word in arguments.words)
    ]
    start, verdicts = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder:
        try:
            matrix = Matrix(Path(folder))
        except Unavailable as reason:
            print(f"nothing was run: {reason}")
            return 1
        with matrix:
            for case in chosen:
                verdict = matrix.run(case)
                verdicts.append(verdict)
                print(line(verdict), flush=True)
                for problem in [*verdict.problems, *verdict.left]:
                    print(f"    {problem}")
                if verdict.problems and verdict.text:
                    print("    | " + verdict.text[-3000:].replace("\n", "\n    | "), flush=True)
    unclean = [verdict for verdict in verdicts if not verdict.is_clean]
    skipped = [verdict for verdict in verdicts if verdict.skipped]
    seconds = [verdict.seconds for verdict in verdicts if verdict.seconds is not None]
    print(
        f"{len(verdicts)} rows in {time.monotonic() - start:.0f} s: {len(unclean)} unclean, {len(skipped)} skipped; "
        f"errors on all ranks after {statistics.median(seconds or [0]):.2f} s in the median, "
        f"{max(seconds, default=0):.2f} s at most"
    )
    return bool(unclean)


if __name__ == "__main__":
    sys.exit(main())
