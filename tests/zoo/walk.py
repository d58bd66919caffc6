"""Walks transformers' model types: python -m tests.zoo.walk [--types a b] [--world-sizes 2 3] [--precision fp32 bf16].

One set of ranks handles many types in sequence, since starting ranks costs more than a load. A set that dies, hangs
or raises is started again behind the type that did it.
"""

import argparse
import itertools
import json
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.ranks import RankFailure, run_ranks, set_environment

set_environment()

from tests.zoo import checks, meshes  # noqa: E402  the environment comes first
from tests.zoo.checks import Case  # noqa: E402
from tests.zoo.configs import model_types  # noqa: E402

SET_SIZE = 60
"""Types per set of ranks: each leaves its modelling code in memory."""

MESH_SET_SIZE = 12
"""Where loads make device meshes: each leaves groups with threads, of which a process may have too many otherwise."""

LIMIT_S = 90.0
"""Seconds per type. Tiny ones need about one."""

BUILD_LIMIT_S = 45.0

STATUSES = ("exact", "unsteady", "unloadable", "unshardable", "differs", "raises")
"""What comes of a load. Unloadable: the ordinary load raises; unshardable: torch or transformers cannot shard it."""

CACHE = Path(tempfile.gettempdir()) / "lowmem-load-zoo"


@dataclass(slots=True)
class Outcome:
    """What came of one case on all ranks, or of building one type."""

    name: str
    results: list[dict[str, Any]] = field(default_factory=list)
    crash: str = ""

    @property
    def error(self) -> str:
        """The first line of what went wrong; empty when nothing did."""
        errors = [result["error"] for result in self.results if "error" in result]
        own = [error for error in errors if not error.startswith("RankError")]
        if errors:
            return str((own or errors)[0])
        lines = [line for result in self.results for line in result.get("differences", [])]
        if lines:
            return f"{len(set(lines))} differences: {lines[0]}"
        return self.crash

    @property
    def traceback(self) -> str:
        """The traceback of the rank that `error` names."""
        found = [result["traceback"] for result in self.results if "traceback" in result]
        own = [text for text in found if "RankError" not in text.strip().splitlines()[-1]]
        return str((own or found or [self.crash])[0])

    @property
    def status(self) -> str:
        """One of `STATUSES`."""
        for status in ("unloadable", "unshardable"):
            if any(status in result for result in self.results):
                return status
        if self.error:
            return "raises" if self.crash or any("error" in result for result in self.results) else "differs"
        return "unsteady" if any(result.get("unsteady") for result in self.results) else "exact"

    def found(self, key: str) -> Any:
        """What the first rank says; None if nothing."""
        return self.results[0].get(key) if self.results else None


def build(types: Sequence[str], root: Path) -> dict[str, dict[str, Any]]:
    """Returns, by type, what was built or the error; checkpoints that `root` holds are kept."""
    index = root / "index.json"
    known: dict[str, dict[str, Any]] = json.loads(index.read_text()) if index.exists() else {}
    todo = [name for name in types if "error" in known.get(name, {"error": ""}) or not (root / name).is_dir()]
    root.mkdir(parents=True, exist_ok=True)
    for outcome in run_sets(checks.build_all, todo, (str(root),), world_size=1, limit_s=BUILD_LIMIT_S):
        known[outcome.name] = outcome.results[0] if outcome.results else {"error": outcome.crash}
        if outcome.error:
            known[outcome.name]["error"] = outcome.error
        index.write_text(json.dumps(known, indent=1))
    return {name: known[name] for name in types}


def cases_of(built: dict[str, dict[str, Any]], root: Path, *, cross: bool = True) -> list[Case]:
    """Returns the loads to compare: the class that was saved and, with `cross`, another from the same checkpoint."""
    cases = []
    for name, info in built.items():
        if "error" not in info:
            classes = info["classes"] if cross else info["classes"][:1]
            cases += [Case(f"{name}/{cls}", cls, str(root / name)) for cls in classes]
    return cases


def compare(
    cases: Sequence[Case], *, world_size: int, precision: str, method: str, saves: bool = False
) -> list[Outcome]:
    """Returns what came of each case; with `saves`, of saving it again as well."""
    args, set_size = (method, precision, saves), MESH_SET_SIZE if method in meshes.LOADS else SET_SIZE
    return run_sets(checks.compare_all, cases, args, world_size=world_size, set_size=set_size)


def run_sets(
    fn: Callable[..., None],
    items: Sequence[Any],
    args: tuple[Any, ...],
    *,
    world_size: int,
    set_size: int = SET_SIZE,
    limit_s: float = LIMIT_S,
) -> list[Outcome]:
    """Calls fn(items, *args, journal folder, limit) on sets of ranks until every item has an outcome."""
    outcomes: list[Outcome] = []
    rest = list(items)
    while rest:
        batch = rest[:set_size]
        folder = tempfile.mkdtemp(prefix="zoo-")
        failure = ""
        try:
            run_ranks(fn, batch, *args, folder, limit_s, world_size=world_size, timeout_s=limit_s * (len(batch) + 1))
        except RankFailure as error:
            failure = str(error)
        entries = [_read_journal(Path(folder) / f"rank{rank}.jsonl") for rank in range(world_size)]
        shutil.rmtree(folder, ignore_errors=True)
        # the last item that some rank began is the one at fault; earlier ones are done on every rank
        begun = max(len(started) for started, _ in entries)
        if failure and begun == 0:
            raise RuntimeError(f"no rank came to its first item: {failure}")
        for number, item in enumerate(batch[:begun]):
            name = item if isinstance(item, str) else item.name
            outcome = Outcome(name, [results[name] for _, results in entries if name in results])
            if failure and number == begun - 1 and not outcome.error:
                outcome.crash = _essence(failure)
            outcomes.append(outcome)
            if outcome.error:
                print(f"{name}: {outcome.error[:200]}")
        rest = rest[begun:]
        print(f"... {len(outcomes)} of {len(outcomes) + len(rest)}")
    return outcomes


def _read_journal(path: Path) -> tuple[list[str], dict[str, dict[str, Any]]]:
    started: list[str] = []
    results: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        entry = json.loads(line)
        if "start" in entry:
            started.append(entry["start"])
        else:
            results[entry["name"]] = entry
    return started, results


def _essence(failure: str) -> str:
    """Returns what a crash or hang looks like, in a line that starts with the kind."""
    kind = "timed out" if "Timeout (" in failure else failure.strip().splitlines()[0]
    stacks = failure.split("Thread 0x")
    stack = next((text for text in stacks if "tests/zoo/checks.py" in text), failure)  # not that of a helper thread
    frames = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    return f"{kind}: {' < '.join(frames[:4])}"[:600]


_NAMES = re.compile(r"`[A-Z]\w+`|\[\w+\.py:\d+\]$")
"""What differs from type to type in a reason."""


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns counts and names."""
    counts = Counter(outcome.status for outcome in outcomes)
    return {
        "cases": len(outcomes),
        **{status: counts[status] for status in STATUSES},
        "failed": counts["differs"] + counts["raises"],
        **{key: sum(1 for outcome in outcomes if outcome.found(key)) for key in ("recast", "missing", "saved")},
        "saved_as_default": {o.name: names for o in outcomes if (names := o.found("as_default"))},
        "refused": {o.name: reason for o in outcomes if (reason := o.found("refused"))},
        "failing": {o.name: f"{o.status}: {o.error}" for o in outcomes if o.status in ("differs", "raises")},
        "unshardable_because": dict(
            Counter(_NAMES.sub("...", reason) for o in outcomes if (reason := o.found("unshardable")))
        ),
        "slow_paths": dict(Counter(reason for o in outcomes for reason in o.found("slow_paths") or [])),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 when a load of ours failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", nargs="*", help="model types; all when left out")
    parser.add_argument("--world-sizes", nargs="*", type=int, default=[2])
    parser.add_argument("--precision", nargs="*", choices=["fp32", "bf16"], default=["fp32"])
    parser.add_argument("--methods", nargs="*", choices=["lowmem", "default", *meshes.LOADS], default=["lowmem"])
    parser.add_argument("--saves", action="store_true", help="save what we loaded, and load that ordinarily")
    parser.add_argument("--once", action="store_true", help="only the class that was saved of each type")
    parser.add_argument("--out", type=Path, help="JSON file of all results")
    parser.add_argument("--root", type=Path, default=CACHE, help="where the checkpoints are kept")
    options = parser.parse_args(arguments)
    types = options.types or model_types()
    started = time.monotonic()
    built = build(types, options.root)
    unbuilt = {name: info["error"] for name, info in built.items() if "error" in info}
    print(f"\n{len(types)} model types, {len(built) - len(unbuilt)} built in {time.monotonic() - started:.0f} s")
    report: dict[str, Any] = {"types": len(types), "built": len(built) - len(unbuilt), "unbuilt": unbuilt, "runs": {}}
    status = 0
    for method, world_size, precision in itertools.product(options.methods, options.world_sizes, options.precision):
        started = time.monotonic()
        cases = cases_of(built, options.root, cross=method == "lowmem" and not options.once)
        saves = options.saves and method == "lowmem"
        outcomes = compare(cases, world_size=world_size, precision=precision, method=method, saves=saves)
        run = summary(outcomes)
        run["seconds"] = round(time.monotonic() - started)
        run["details"] = {
            outcome.name: {"status": outcome.status, "results": outcome.results, "traceback": outcome.traceback}
            for outcome in outcomes
            if outcome.status != "exact"
        }
        title = f"{method}, {world_size} ranks, {precision}"
        report["runs"][title] = run
        print_run(title, run)
        status |= int(not method.startswith("default") and run["failed"] > 0)
        if options.out:
            options.out.write_text(json.dumps(report, indent=1))
    return status


def print_run(title: str, run: dict[str, Any]) -> None:
    """Prints the counts and the failures."""
    figures = ", ".join(f"{key} {value}" for key, value in run.items() if isinstance(value, int))
    print(f"\n== {title}: {figures}")
    for name, error in run["failing"].items():
        print(f"  {name:60} {error[:180]}")
    for reason, count in sorted(run["unshardable_because"].items(), key=lambda item: -item[1]):
        print(f"  cannot be sharded, {count} cases: {reason[:180]}")
    for name, reason in run["refused"].items():
        print(f"  not saved: {name}: {reason[:180]}")
    for name, tensors in run["saved_as_default"].items():
        print(f"  saved as transformers saves it, and loads otherwise: {name}: {', '.join(tensors[:3])}")
    for reason, count in sorted(run["slow_paths"].items(), key=lambda item: -item[1]):
        print(f"  slow path in {count} cases: {reason}")


if __name__ == "__main__":
    sys.exit(main())
