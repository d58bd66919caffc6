"""Runs everything that a release must pass on one commit: `make release [ARGS="--only zoo faults"]`.

Each part is a process. Its log and its outcome are kept in .cache/release/<commit>, so parts may be run one by one: a
part that has passed on this commit is not run again unless `--again` says so. Two parts run side by side where neither
measures time. After each part docs/evidence.md is written anew. The status is 1 if a part has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.machine import describe_machine
from tests.release_parts import Part, parts

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / ".cache" / "release"
PAGE = ROOT / "docs" / "evidence.md"
LIMIT_S = 2 * 3600.0
"""Of one part, downloads included."""
TAIL_LINES = 25

WRITTEN = (
    "docs/evidence.md",
    "docs/compatibility.md",
    "docs/measured.md",
    "docs/pipelines/frameworks.md",
    "lowmem_load/tested.json",
    "tests/frameworks/results.json",
)
"""Files that the parts themselves write: they may differ from the commit."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a part; `machine` and `date` are those of its run."""

    status: int
    counts: Mapping[str, int]
    minutes: float
    date: str
    machine: str
    tail: str

    @property
    def has_passed(self) -> bool:
        """Whether it ended well and its log has counts, none of them of failures."""
        return self.status == 0 and bool(self.counts) and not self.counts["failed"]


class Run:
    """A part that is running, with its log in a folder."""

    def __init__(self, part: Part, folder: Path, limit_s: float = LIMIT_S) -> None:
        self.part, self._limit_s = part, limit_s
        self._log = folder / f"{part.name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        # make hands ARGS on to every make below it, where they are meant for this program.
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "ARGS"))
        }
        words = shlex.split(part.command)
        command = [sys.executable, *words[1:]] if words[0] == "python" else words
        self._start = time.monotonic()
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def outcome(self) -> Outcome | None:
        """Return what came of it, or None while it runs. It is ended at its limit."""
        seconds = time.monotonic() - self._start
        status = self._process.poll()
        if status is None and seconds < self._limit_s:
            return None
        self.end()
        text, machine = self._log.read_text(encoding="utf-8", errors="replace"), describe_machine()
        found = Outcome(
            status=124 if status is None else status,
            counts=self.part.read(text),
            minutes=round(seconds / 60, 1),
            date=dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            machine=f"{machine.lines()[0]}; python {machine.python}, {machine.versions_text()}",
            tail="",
        )
        return found if found.has_passed else replace(found, tail="\n".join(text.splitlines()[-TAIL_LINES:]))

    def end(self) -> None:
        """Kill what still runs of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def run_all(chosen: Sequence[Part], folder: Path, limit_s: float = LIMIT_S) -> Iterator[tuple[Part, Outcome]]:
    """Run parts in order, side by side where their lanes allow it; yield each outcome as it comes."""
    waiting, running = list(chosen), list[Run]()
    try:
        while waiting or running:
            for part in startable(waiting, [run.part for run in running]):
                waiting.remove(part)
                print(f"{part.name}: {part.command}", flush=True)
                running.append(Run(part, folder, limit_s))
            for run in list(running):
                if (outcome := run.outcome()) is not None:
                    running.remove(run)
                    yield run.part, outcome
            time.sleep(0.2)
    finally:
        for run in running:
            run.end()


def startable(waiting: Sequence[Part], running: Sequence[Part]) -> list[Part]:
    """Return the parts that may start now: one that runs alone, or the next of each free lane."""
    if not waiting or any(part.lane == 0 for part in running):
        return []
    if waiting[0].lane == 0:
        return [] if running else [waiting[0]]
    heads = {part.lane: part for part in reversed(waiting) if part.lane}
    return [part for lane, part in sorted(heads.items()) if lane not in {each.lane for each in running}]


def estimate(chosen: Sequence[Part]) -> str:
    """Return what a run will take, as a table."""
    lanes = [sum(part.minutes for part in chosen if part.lane == lane) for lane in range(3)]
    lines = [f"{part.minutes:4g} minutes{', alone' * (part.lane == 0)}: {part.name}" for part in chosen]
    total = f"{lanes[0] + lanes[1] + lanes[2]:g} minutes one by one on two idle cores, "
    lines.append(total + f"{lanes[0] + max(lanes[1:]):g} or more with two side by side")
    if downloads := sum(part.downloads for part in chosen):
        lines.append(f"The first time {downloads:g} GB of downloads come on top.")
    return "\n".join(lines)


def keep_outcome(folder: Path, name: str, outcome: Outcome) -> None:
    """Write down what came of a part."""
    (folder / f"{name}.json").write_text(json.dumps(asdict(outcome), indent=1), encoding="utf-8")


def read_outcomes(folder: Path, names: Iterable[str]) -> dict[str, Outcome]:
    """Return the outcomes that a folder holds, by part."""
    files = {name: folder / f"{name}.json" for name in names}
    return {name: Outcome(**json.loads(path.read_text("utf-8"))) for name, path in files.items() if path.is_file()}


def page(commit: str, table: Sequence[Part], outcomes: Mapping[str, Outcome]) -> str:
    """Return docs/evidence.md."""
    dates = sorted(each.date for each in outcomes.values())
    failed = {name: each for name, each in outcomes.items() if not each.has_passed}
    not_run = len(table) - len(outcomes)
    text = [
        "# Evidence",
        "`make release` wrote this page. It runs everything below on one commit.",
        "\n".join(
            [
                f"- commit: `{commit}`",
                f"- date: {f'{dates[0]} to {dates[-1]}' if dates else 'nothing was run yet'}",
                *sorted({f"- {each.machine}" for each in outcomes.values()}),
            ]
        ),
        f"{len(outcomes) - len(failed)} of {len(table)} parts passed, {len(failed)} failed, {not_run} not run.",
        "\n".join(
            [
                "| part | shows | command | passed | failed | skipped | minutes |",
                "|---|---|---|---|---|---|---|",
                *(_row(part, outcomes.get(part.name)) for part in table),
            ]
        ),
    ]
    for name, each in failed.items():
        text.append(f"## {name} failed\n\nExit status {each.status}. Its log ends so:\n\n```text\n{each.tail}\n```")
    return "\n\n".join(text) + "\n"


def _row(part: Part, outcome: Outcome | None) -> str:
    if outcome is None:
        cells = ["not run", "", "", ""]
    else:
        counts = [str(outcome.counts.get(name, "not counted")) for name in ("passed", "failed", "skipped")]
        cells = [*counts, f"{outcome.minutes:g}"]
    return f"| {' | '.join([part.name, part.shows, f'`{part.command}`', *cells])} |"


def changed(status: str) -> list[str]:
    """Return the files that differ from the commit, of what `git status --porcelain` says; not what parts write."""
    names = [line[3:] for line in status.splitlines()]
    return [name for name in names if not name.startswith(WRITTEN)]


def clean_commit(root: Path = ROOT) -> str:
    """Return the commit that is checked out.

    Raises:
        SystemExit: other files differ from it.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout

    if found := changed(git("status", "--porcelain")):
        sys.exit(f"make release: commit or remove {', '.join(found)} first: a run is evidence of one commit")
    return git("rev-parse", "HEAD").strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    table = parts()
    groups = {part.name.partition("/")[0] for part in table}
    parser = argparse.ArgumentParser(prog="python -m tests.release_run", description=__doc__.splitlines()[0])
    choices = sorted({part.name for part in table} | groups)
    parser.add_argument("--only", nargs="+", choices=choices, metavar="PART", help=f"of {', '.join(sorted(groups))}")
    parser.add_argument("--again", action="store_true", help="run parts that have passed on this commit, too")
    options = parser.parse_args(arguments)
    commit = clean_commit()
    folder = KEPT / commit
    chosen = [
        part for part in table if options.only is None or {part.name, part.name.partition("/")[0]} & set(options.only)
    ]
    names = [part.name for part in table]
    kept = {} if options.again else read_outcomes(folder, names)
    todo = [part for part in chosen if part.name not in kept or not kept[part.name].has_passed]
    print(estimate(todo), flush=True)
    for part, outcome in run_all(todo, folder):
        if clean_commit() != commit:
            sys.exit(f"make release: another commit was checked out while {part.name} ran: run it again")
        keep_outcome(folder, part.name, outcome)
        verdict = "passed" if outcome.has_passed else "FAILED"
        counts = ", ".join(f"{number} {name}" for name, number in outcome.counts.items())
        print(f"{part.name}: {verdict}; {counts or 'no counts'}; {outcome.minutes:g} minutes", flush=True)
        PAGE.write_text(page(commit, table, read_outcomes(folder, names)), encoding="utf-8")
    done = read_outcomes(folder, [part.name for part in chosen])
    return int(any(not outcome.has_passed for outcome in done.values()))


if __name__ == "__main__":
    sys.exit(main())
