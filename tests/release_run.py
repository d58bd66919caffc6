"""Runs everything that a release must pass on one commit: `make release [ARGS="--only zoo faults"]`.

Each part is a process. Its log and its outcome are kept in .cache/release/<commit>, so parts may be run one by one: a
part that has passed on this commit is not run again unless `--again` says so. After each part docs/evidence.md is
written anew. Ends with status 1 if a part that was asked for has failed.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.machine import describe_machine
from tests.release_parts import Part, parts

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / ".cache" / "release"
PAGE = ROOT / "docs" / "evidence.md"
LIMIT_S = 6 * 3600.0
"""Of one part: the longest takes about two hours on two idle cores."""
TAIL_LINES = 25

WRITTEN = (
    "docs/evidence.md",
    "docs/compatibility.md",
    "docs/measured.md",
    "docs/pipelines/frameworks.md",
    "lowmem_load/tested.json",
    "benchmarks/frameworks/results.json",
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


def run(part: Part, folder: Path, limit_s: float = LIMIT_S) -> Outcome:
    """Run a part, with its log in a folder."""
    log = folder / f"{part.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # make hands ARGS on to every make below it, where they are meant for this program.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "ARGS"))}
    words = shlex.split(part.command)
    command = [sys.executable, *words[1:]] if words[0] == "python" else words
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            status = 124
    text = log.read_text(encoding="utf-8", errors="replace")
    machine = describe_machine()
    outcome = Outcome(
        status=status,
        counts=part.read(text),
        minutes=round((time.monotonic() - start) / 60, 1),
        date=dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        machine=f"{machine.lines()[0]}; python {machine.python}, {machine.versions_text()}",
        tail="",
    )
    return outcome if outcome.has_passed else replace(outcome, tail="\n".join(text.splitlines()[-TAIL_LINES:]))


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
    status = 0
    for part in chosen:
        outcome = read_outcomes(folder, [part.name]).get(part.name)
        if outcome is None or not outcome.has_passed or options.again:
            print(f"{part.name}: {part.command}", flush=True)
            outcome = run(part, folder)
            if clean_commit() != commit:
                sys.exit(f"make release: another commit was checked out while {part.name} ran: run it again")
            keep_outcome(folder, part.name, outcome)
        status |= not outcome.has_passed
        verdict = "passed" if outcome.has_passed else "FAILED"
        counts = ", ".join(f"{number} {name}" for name, number in outcome.counts.items())
        print(f"{part.name}: {verdict}; {counts or 'no counts'}; {outcome.minutes:g} minutes", flush=True)
        PAGE.write_text(page(commit, table, read_outcomes(folder, names)), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
