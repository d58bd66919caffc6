"""The verdict of a step: all ranks go on, or all raise, by what each of them brought to it. Pure."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

T = TypeVar("T", bound="Stored")


class Stored:
    """A dataclass that ranks tell each other through the store, as JSON."""

    __slots__ = ()

    def encoded(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))  # type: ignore[call-overload]

    @classmethod
    def decoded(cls: type[T], content: bytes | str) -> T:
        """Return what `encoded` made JSON of; sequences are lists then."""
        return cls(**json.loads(content))


@dataclass(frozen=True, slots=True)
class Entry(Stored):
    """What one rank brings to a step.

    Attributes:
        title: of the step; equal on all ranks that are at the same one.
        name: of what it is done with, for people; it may differ between ranks.
        error: what went wrong on this rank; None if nothing did.
        is_stopped: whether the error is only that this rank stopped because of another one.
        digest: fingerprint of what must be equal on all ranks; None after an error.
        payload: for the other ranks, JSON data.
    """

    title: str
    name: str = ""
    error: str | None = None
    is_stopped: bool = False
    digest: str | None = None
    payload: Any = None

    @property
    def whole_title(self) -> str:
        """What is done with what, for people."""
        return f"{self.name}: {self.title}" if self.name else self.title


@dataclass(frozen=True, slots=True)
class Verdict(Stored):
    """What comes of a step.

    Attributes:
        title: of the step that failed, for people.
        failures: ranks of the world that failed, each with its message.
        lost: those of them that did not come.
        is_alike: whether all ranks failed with the same message.
        payloads: of all ranks if none failed; neighbours that are equal once, with their number.
        may_be_skipped: whether ranks that did not come go on as if there had been no such step.
    """

    title: str = ""
    failures: Sequence[tuple[int, str]] = ()
    lost: Sequence[int] = ()
    is_alike: bool = False
    payloads: Sequence[tuple[int, Any]] = ()
    may_be_skipped: bool = False

    def by_rank(self) -> list[Any]:
        """Return the payload of each rank of the group."""
        return [payload for number, payload in self.payloads for _ in range(number)]


def verdict_on(entries: Mapping[int, Entry]) -> Verdict:
    """Return what comes of a step, given the entry of each rank, by rank in the world and in the group's order.

    Errors come first, those of ranks that stopped because of another one last of them; then titles, then digests.
    """
    failed = {rank: entry.error for rank, entry in entries.items() if entry.error is not None}
    failures = (
        {rank: error for rank, error in failed.items() if not entries[rank].is_stopped}
        or failed
        or _minorities({rank: entry.title for rank, entry in entries.items()}, "is at {!r}", "are at {!r}")
        or _minorities({rank: entry.digest for rank, entry in entries.items()}, "holds digest {}", "hold {}")
    )
    if failures:
        is_alike = len(failed) == len(entries) and len(set(map(_comparable, failed.values()))) == 1
        title = next(entry for rank, entry in entries.items() if rank in failures).whole_title
        return Verdict(title, list(failures.items()), is_alike=is_alike)
    alike = itertools.groupby(entry.payload for entry in entries.values())
    return Verdict(payloads=[(len(list(equal)), payload) for payload, equal in alike])


_OF_ONE_PROCESS = re.compile(r"\b0x[0-9a-fA-F]+|(?<=[a-z]:)[0-9]+")
"""What differs between ranks in the text of one and the same error: addresses, and the indices of devices (cuda:1)."""


def _comparable(text: str) -> str:
    return _OF_ONE_PROCESS.sub("#", text)


def _minorities(held: Mapping[int, Any], this: str, others: str) -> dict[int, str]:
    """Return a message for each rank that does not hold what most do (of equals: what the lowest rank does)."""
    usual = Counter(held.values()).most_common(1)[0][0]
    holders = spell_ranks([rank for rank, one in held.items() if one == usual])
    return {
        rank: f"{this.format(one)}, where rank(s) {holders} {others.format(usual)}"
        for rank, one in held.items()
        if one != usual
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
