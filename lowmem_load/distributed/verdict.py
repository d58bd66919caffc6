"""The verdict on a step: all ranks go on, or all raise, as the entries of all ranks say. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

MAX_FAILURES = 1_000_000
"""Characters of all messages of a verdict together, which every rank reads."""

_OF_ONE_PROCESS = re.compile(r"\b0x[0-9a-fA-F]+|(?<=[a-z]:)[0-9]+")
"""The parts of one error's text that differ between ranks: addresses, and the indices of devices (cuda:1)."""


class Entry(NamedTuple):
    """What one rank brings to a step. JSON data, as a verdict is."""

    title: str  # equal on all ranks that are at the same step
    name: str = ""  # what the step is about, for messages; it may differ between ranks
    error: str | None = None  # of this rank
    is_stopped: bool = False  # whether this rank only stopped because another one failed
    digest: Mapping[str, str] = {}  # values that must be equal on all ranks, by topic
    payload: str | Sequence[str] = ""  # for the other ranks: a text, or keys of the store that hold its parts

    @property
    def full_title(self) -> str:
        """The title with the name, for messages."""
        return f"{self.name}: {self.title}" if self.name else self.title


class Verdict(NamedTuple):
    """The outcome of a step."""

    title: str  # of the step, with its name
    failures: Sequence[tuple[int, str]] = ()  # ranks of the world that failed, and their messages
    is_alike: bool = False  # whether all ranks failed with the same message
    payloads: Sequence[str | Sequence[str]] = ()  # of all ranks, if the step succeeded and a rank brought one


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
    title = next(entry for rank, entry in entries.items() if not failures or rank in failures).full_title
    if failures:
        is_alike = (
            len(errors) == len(entries) and len({_OF_ONE_PROCESS.sub("#", text) for text in errors.values()}) == 1
        )
        max_chars = max(200, MAX_FAILURES // len(failures))
        return Verdict(title, [(rank, text[:max_chars]) for rank, text in failures.items()], is_alike)
    payloads = [entry.payload for entry in entries.values()]
    return Verdict(title, payloads=payloads if any(payloads) else ())


def _differing_digests(digests: Mapping[int, Mapping[str, str]]) -> dict[int, str]:
    texts: dict[int, list[str]] = {}
    for topic in dict.fromkeys(topic for digest in digests.values() for topic in digest):
        values = {rank: digest.get(topic, "none") for rank, digest in digests.items()}
        for rank, text in _differences(values, f"holds {topic}", "hold").items():
            texts.setdefault(rank, []).append(text)
    return {rank: "; ".join(texts[rank]) for rank in digests if rank in texts}


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
