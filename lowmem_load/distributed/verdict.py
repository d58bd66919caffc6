"""The verdict on a step: all ranks go on, or all raise, as the entries of all ranks say. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lowmem_load.text import spell_ranks

MAX_FAILURES = 1_000_000
"""Characters of all messages of a verdict together, which every rank reads."""

_OF_ONE_PROCESS = re.compile(r"\b0x[0-9a-fA-F]+|(?<=[a-z]:)[0-9]+")
"""The parts of one error's text that differ between ranks: addresses, and the indices of devices (cuda:1)."""


class Entry(NamedTuple):
    """What one rank brings to a step. JSON data, as a verdict is."""

    title: str  # equal on all ranks that are at the same step
    error: str | None = None  # of this rank
    is_stopped: bool = False  # whether this rank only stopped because another one failed
    digest: Mapping[str, str] = {}  # values that must be equal on all ranks, by topic
    num_parts: int = 0  # of its payload, which are keys of the store
    loop: str = ""  # that the step belongs to; see `RankGroup.step`


class Verdict(NamedTuple):
    """The outcome of a step."""

    failures: Sequence[tuple[int, str]] = ()  # ranks of the world that failed, and their messages
    is_alike: bool = False  # whether all ranks failed with the same message
    num_parts: int = 0  # of the payloads of all ranks
    title: str = ""  # of the step, as the leader calls it; "" where no leader has written it
    loop: str = ""  # that the step belonged to, where it failed because ranks have left that


def verdict_on(entries: Mapping[int, Entry]) -> Verdict:
    """Return the verdict on the entries of all ranks, by rank in the world, in the group's order.

    Errors count before different titles, and those before different digests. A rank that stopped because of another
    one is named only if no other rank failed.
    """
    errors = {rank: entry.error for rank, entry in entries.items() if entry.error is not None}
    failures = (
        {rank: error for rank, error in errors.items() if not entries[rank].is_stopped}
        or errors
        or _differences("is at", "are at", {rank: repr(entry.title) for rank, entry in entries.items()})
        or _differing_digests({rank: entry.digest for rank, entry in entries.items()})
    )
    texts = {_OF_ONE_PROCESS.sub("#", error) for error in errors.values()}
    max_chars = max(200, MAX_FAILURES // max(1, len(failures)))
    return Verdict(
        failures=[(rank, text[:max_chars]) for rank, text in failures.items()],
        is_alike=len(errors) == len(entries) and len(texts) == 1,
    )


def _differing_digests(digests: Mapping[int, Mapping[str, str]]) -> dict[int, str]:
    texts = defaultdict[int, list[str]](list)
    for topic in dict.fromkeys(topic for digest in digests.values() for topic in digest):
        values = {rank: digest.get(topic, "none") for rank, digest in digests.items()}
        for rank, text in _differences(f"holds {topic}", "hold", values).items():
            texts[rank].append(text)
    return {rank: "; ".join(texts[rank]) for rank in sorted(texts)}


def _differences(this: str, others: str, values: Mapping[int, str]) -> dict[int, str]:
    # Of equally frequent values, the lowest rank's is the usual one.
    usual = Counter(values.values()).most_common(1)[0][0]
    where = f"where rank(s) {spell_ranks([rank for rank in values if values[rank] == usual])} {others} {usual}"
    return {rank: f"{this} {value}, {where}" for rank, value in values.items() if value != usual}
