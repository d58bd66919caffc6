"""Runs frameworks as their users start them, as they are and behind `lowmem-load run`: `python -m tests.frameworks`.

Each framework has an environment of its own under .cache/frameworks. The result of each case is kept as it comes, in
results.json, and goes from there into the table of tests/frameworks/RESULTS.md. A case that fails is a result, too.
The command ends with status 1 if a case failed, or differs from the default loader where cases.yaml does not say why.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from packaging.requirements import Requirement

from tests.frameworks import page
from tests.frameworks.cases import Case, read_cases
from tests.frameworks.compare import compare, is_equal, read_run
from tests.frameworks.run import OUT, WAYS, RunError, run
from tests.pipelines.pipeline import import_example
from tests.venvs import CACHE, InstallError

REPORTED = ("deepspeed", "transformers", "accelerate", "peft", "trl", "datasets")


def main(arguments: Sequence[str] | None = None) -> int:
    cases = {case.name: case for case in read_cases()}
    parser = argparse.ArgumentParser(prog="python -m tests.frameworks", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=cases, default=list(cases), metavar="CASE", help="instead of all")
    parser.add_argument("--keep", action="store_true", help="leave what the runs have saved in .cache/frameworks/out")
    options = parser.parse_args(arguments)
    failed = []
    for name in options.only:
        result = measure(cases[name])
        print(f"{name}: {page.verdict(result)}", flush=True)
        page.keep(cases[name], result)
        if "error" in result or not (is_equal(result) or cases[name].differs):
            failed.append(name)
        elif not options.keep:
            shutil.rmtree(OUT / name)
    if failed:
        print(f"not as expected: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def measure(case: Case) -> dict[str, Any]:
    """Return what a case came to, as data for JSON; {"error": ...} if it could not be run both ways."""
    model = CACHE / "frameworks" / f"model-{case.model}"
    if not model.is_dir():  # an interrupted run leaves no half of it
        part = model.with_suffix(".part")
        import_example("make_model").main([str(part), "--size", case.model])
        part.rename(model)
    result: dict[str, Any] = {}
    try:
        environment = case.environment
        environment.venv.make(environment.packages, environment.leave_out)
        framework = Requirement(environment.packages[0]).name
        result["versions"] = environment.venv.versions([framework, *REPORTED])
        result.update(compare(*(read_run(run(case, way, model)) for way in WAYS)))
    except (InstallError, RunError, FileNotFoundError, subprocess.SubprocessError) as error:
        result["error"] = str(error)
    return result


if __name__ == "__main__":
    sys.exit(main())
