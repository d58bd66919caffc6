"""The verdict on a step: all ranks go on, or all raise, as the entries of all ranks say. Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MAX_FAILURES = 1_000_000
"""Characters of all messages of a verdict together, which every rank reads."""


class Entry(NamedTuple):
    """What one rank brings to a step. JSON data, as a verdict is."""

    title: str  # equal on all ranks that are at the same step
    name: str = ""  # what the step is about, for messages; it may differ between ranks
    error: str | None = None  # of this rank
    is_stopped: bool = False  # whether this rank only stopped because another one failed
    digest: Mapping[str, str] = {}  # values that must be equal on all ranks, by topic
    payload: Any = None  # for the other ranks

    @property
    def full_title(self) -> str:
        """The title with the name, for messages."""
        return f"{self.name}: {self.title}" if self.name else self.title


class Verdict(NamedTuple):
    """The outcome of a step."""

    title: str = ""  # of the step that failed; "" for any
    failures: Sequence[tuple[int, str]] = ()  # ranks of the world that failed, each with its message
    is_alike: bool = False  # whether all ranks failed with the same message
    is_complete: bool = False  # whether the entries of all ranks were there; else `failures` are those that were lost
    may_be_skipped: bool = False  # whether it holds only for ranks that are at this step: see `passes_over`
    payloads: Sequence[Any] = ()  # of all ranks, if the step succeeded and a rank brought one

    @classmethod
    def decoded(cls, content: str) -> tuple[Verdict, list[str]]:
        """Return the verdict that `encoded` wrote, without its payloads, and the keys that hold these."""
        keys, *fields = json.loads(content)
        verdict = cls(*fields)
        return verdict._replace(failures=[(rank, text) for rank, text in verdict.failures]), keys

    def encoded(self, keys: Sequence[str] = ()) -> str:
        """Return it as JSON, with the keys that hold its payloads in their place."""
        return json.dumps([keys, *self._replace(payloads=())])

    def passes_over(self, rank: int, title: str) -> bool:
        """Return whether a rank at a step of this title goes on as if there had been no step of the verdict's title."""
        return self.may_be_skipped and (rank in dict(self.failures) or title != self.title)


def verdict_on(entries: Mapping[int, Entry]) -> Verdict:
    """Return the verdict on the entries of all ranks, by rank in the world, in the group's order.

    Errors count before different titles, and those before different digests. A rank that stopped because of another
    one is named only if no other rank failed.
    """
    errors = {rank: entry.error for rank, entry in entries.items() if entry.error is not None}
    failures = (
        {rank: error for rank, error in errors.items() if not entries[rank].is_stopped}
        or errors
        or _differences({rank: repr(entry.title) for rank, entry in entries.items()}, "is at", "are at")
        or _differing_digests({rank: entry.digest for rank, entry in entries.items()})
    )
    if failures:
        is_alike = len(errors) == len(entries) and len(set(map(_comparable, errors.values()))) == 1
        title = next(entry for rank, entry in entries.items() if rank in failures).full_title
        limit = max(200, MAX_FAILURES // len(failures))
        return Verdict(title, [(rank, text[:limit]) for rank, text in failures.items()], is_alike, is_complete=True)
    payloads = [entry.payload for entry in entries.values()]
    has_payloads = any(payload is not None for payload in payloads)
    return Verdict(is_complete=True, payloads=payloads if has_payloads else ())


_OF_ONE_PROCESS = re.compile(r"\b0x[0-9a-fA-F]+|(?<=[a-z]:)[0-9]+")
"""The parts of one error's text that differ between ranks: addresses, and the indices of devices (cuda:1)."""


def _comparable(text: str) -> str:
    return _OF_ONE_PROCESS.sub("#", text)


def _differing_digests(digests: Mapping[int, Mapping[str, str]]) -> dict[int, str]:
    found: dict[int, list[str]] = {}
    for topic in dict.fromkeys(topic for digest in digests.values() for topic in digest):
        values = {rank: digest.get(topic, "none") for rank, digest in digests.items()}
        for rank, text in _differences(values, f"holds {topic}", "hold").items():
            found.setdefault(rank, []).append(text)
    return {rank: "; ".join(found[rank]) for rank in digests if rank in found}


def _differences(values: Mapping[int, str], this: str, others: str) -> dict[int, str]:
    # Of equally frequent values, the lowest rank's is the usual one.
    usual = Counter(values.values()).most_common(1)[0][0]
    usual_ranks = spell_ranks([rank for rank, value in values.items() if value == usual])
    return {
        rank: f"{this} {value}, where rank(s) {usual_ranks} {others} {usual}"
        for rank, value in values.items()
        if value != usual
    }


def spell_ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks with runs shortened: [0, 1, 2, 5] is `0-2, 5`."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
