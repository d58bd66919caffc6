"""The parts of `make release`: what is run, and how its log says how many passed, failed and were skipped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.compat.environments import read_environments

PYTEST = {"passed": "passed", "failed": "failed", "error": "failed", "errors": "failed"}
PYTEST |= {"skipped": "skipped", "xfailed": "skipped"}


def count(passed: int = 0, failed: int = 0, skipped: int = 0) -> dict[str, int]:
    """Return counts by outcome, or nothing where nothing was counted."""
    counts = {"passed": passed, "failed": failed, "skipped": skipped}
    return counts if any(counts.values()) else {}


def read_pytest(log: str) -> dict[str, int]:
    """Return the counts of pytest's last line."""
    lines = [line for line in log.splitlines() if re.search(r"\d+ \w+.* in [\d.]+s\b", line)]
    found: Counter[str] = Counter()
    for number, word in re.findall(r"(\d+) (\w+)", lines[-1] if lines else ""):
        if word in PYTEST:
            found[PYTEST[word]] += int(number)
    return count(**found)


def read_zoo(log: str) -> dict[str, int]:
    """Return the counts of all streamed runs; those of stock are what stock gets wrong."""
    total: Counter[str] = Counter()
    for line in re.findall(r"^== lowmem, .*$", log, re.MULTILINE):
        total.update({name: int(number) for name, number in re.findall(r"(\w+) (\d+)", line)})
    return count(total["exact"] + total["unsteady"], total["failed"], total["unloadable"])


def read_compat(log: str) -> dict[str, int]:
    """Return the counts of the groups of tests of one environment."""
    found = re.findall(r"took \d+ s; so far: (.*)", log)
    total: Counter[str] = Counter()
    for item in found[-1].split(", ") if found else []:
        named, other = re.fullmatch(r"\w+ (\d+)", item), re.fullmatch(r"(\d+) (failed|skipped)", item)
        if named:
            total["passed"] += int(named[1])
        elif other:
            total[other[2]] += int(other[1])
    return count(**total)


def read_faults(log: str) -> dict[str, int]:
    """Return the counts of the matrix's rows."""
    found = re.search(r"^(\d+) rows in \d+ s: (\d+) unclean, (\d+) skipped", log, re.MULTILINE)
    rows, unclean, skipped = map(int, found.groups()) if found else (0, 0, 0)
    return count(rows - unclean - skipped, unclean, skipped)


def read_frameworks(log: str) -> dict[str, int]:
    """Return how many cases were as expected."""
    cases = re.findall(r"^[\w.-]+: (?:equal|losses|failed|nothing was)\b", log, re.MULTILINE)
    failed = [name for names in re.findall(r"^not as expected: (.*)$", log, re.MULTILINE) for name in names.split(", ")]
    return count(len(cases) - len(failed), len(failed))


def lines(passed: str, failed: str = "(?!)", skipped: str = "(?!)") -> Callable[[str], dict[str, int]]:
    """Return a reader that counts the different lines of a log that begin with the patterns."""

    def read(log: str) -> dict[str, int]:
        return count(*(len(set(re.findall(f"^{each}.*", log, re.MULTILINE))) for each in (passed, failed, skipped)))

    return read


@dataclass(frozen=True, slots=True)
class Part:
    """What is run: a name, what it shows, the command, and how its counts are read from its log.

    Attributes:
        minutes: on two idle cores, once what it downloads is there.
        lane: 0 runs alone. A part of lane 1 and one of lane 2 run side by side.
        downloads: GB, the first time.
    """

    name: str
    shows: str
    command: str
    read: Callable[[str], Mapping[str, int]]
    minutes: float
    lane: int = 0
    downloads: float = 0


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


def parts() -> list[Part]:
    """Return the table of parts, in the order in which they start."""
    compat = "make compat ARGS='--again --groups seams parity sharded comparison pins --environments {}'"
    scale, zoo = "python -m benchmarks.scale --all --docs", "--world-sizes 2 --precision bf16 --methods lowmem --once"
    bench, cases = "make bench ARGS='--repeats 3 --once stock --also-cold --docs'", " ".join(FRAMEWORKS)
    others = "python -m pytest -n 2 --dist loadfile -m release"
    return [
        Part("test", "formatting, lint, types and all tests", "make test", read_pytest, 9),
        Part("more-tests", "other numbers of ranks, launchers, examples", others, read_pytest, 8),
        Part("device", "a simulated accelerator", "make test-device", read_pytest, 6),
        Part("main-table", "1.5 B parameters", bench, lines("done: ", "FAILED: ", "skipped: "), 12),
        Part("scale", "the largest published models", scale, lines("done: ", "failed: "), 4),
        Part("faults", "every fault at every moment", "make faults", read_faults, 12, lane=1),
        Part("zoo", "all model types", f"make zoo ARGS='{zoo}'", read_zoo, 11, lane=1),
        Part(
            "frameworks",
            "frameworks, stock and streamed",
            f"make frameworks ARGS='--only {cases}'",
            read_frameworks,
            minutes=14,
            lane=1,
            downloads=8,
        ),
        *(
            Part(
                f"compat/{each.name}",
                "releases",
                compat.format(each.name),
                read_compat,
                minutes=2,
                lane=2,
                downloads=3,
            )
            for each in read_environments()
        ),
    ]
