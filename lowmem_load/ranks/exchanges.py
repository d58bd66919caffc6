"""The exchanges of a group as they lie in its store: numbered, of one session, each settled by one answer.

[Note: sessions] A store may outlive a group (that of torchrun's agent does) and hold keys of an earlier one of the same
name. So the first rank draws a session that all keys begin with. Its life signs say which, while it is not idle.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lowmem_load.errors import LowMemLoadError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class LostError(LowMemLoadError):
    """An exchange that did not come about.

    Attributes:
        ranks: what is the matter, by rank in the world, with those that are not waited for.
    """

    def __init__(self, ranks: dict[int, str]) -> None:
        super().__init__(str(ranks))
        self.ranks = ranks


class Exchanges:
    """What this rank has to do with a group's exchanges in the store. Used by one thread.

    Args:
        store: for these alone.
        name: of the group.
        members: the group's ranks, as ranks in the world.
        rank: of this process in the group.
        leaves: see `Line`; what answers say is noted in it.

    Attributes:
        session: see [Note: sessions]; "" as long as this rank has not heard of it.
        number: of the next exchange.
    """

    def __init__(self, store: Store, name: str, members: Sequence[int], rank: int, leaves: dict[str, int]) -> None:
        self.session = secrets.token_hex(8) if rank == 0 else ""
        self.number = 0
        self._store, self._name, self._rank, self._leaves = store, name, rank, leaves
        self._members = members
        self._last_answer = -1, 0  # number of the exchange, and how many ranks will read it
        self._last_read = -1  # number of the exchange whose answer this rank has read without saying so

    def join(self, session: str) -> None:
        """Take part in the exchanges of a session from now on."""
        self.session, self.number = session, 0
        self.skip_old()

    def skip_old(self) -> None:
        """Leave out exchanges that were given up before this rank came."""
        while self.session and self._has(self.number, "answer"):
            self.take_leaves(json.loads(self._get(self.number, "answer")).get("leaves", {}))
            self.number += 1

    def give(self, number: int, content: str) -> None:
        """Contribute to an exchange; not for the first rank."""
        self._store.set(self._key(number, f"from {self._rank}"), content)

    def have_given(self, number: int, ranks: Sequence[int]) -> bool:
        """Return whether these ranks of the group have contributed to an exchange."""
        return bool(self._store.check([self._key(number, f"from {rank}") for rank in ranks]))

    def given(self, number: int, rank: int) -> str:
        """Return what a rank of the group has contributed."""
        return self._get(number, f"from {rank}")

    def is_settled(self, number: int) -> bool:
        """Return whether an exchange has its answer."""
        return self._has(number, "answer")

    def settle_with(self, number: int, contents: Sequence[str]) -> list[str]:
        """Answer an exchange with the contents of all ranks. See `settle_without`."""
        distinct = {content: place for place, content in enumerate(dict.fromkeys(contents))}  # most are equal
        return self._settle(number, {"contents": list(distinct), "of": [distinct[content] for content in contents]})

    def settle_without(self, number: int, lost: Mapping[int, str], leaves: Mapping[str, int]) -> list[str]:
        """Answer an exchange, unless somebody has, with the ranks that are given up; return the contents if not so.

        Args:
            number: of the exchange.
            lost: what is the matter with them, by rank in the world; may be empty, where there is an answer.
            leaves: how often they have gone away from exchanges, by group.

        Raises:
            LostError: the answer is that ranks are given up.
        """
        return self._settle(number, {"lost": dict(lost), "leaves": dict(leaves)})

    def acknowledge(self) -> None:
        """Say that this rank has read the last answer, if it is another one's."""
        number, self._last_read = self._last_read, -1
        if number >= 0:
            self._store.add(self._key(number, "read"), 1)

    def clear(self, number: int) -> None:
        """Remove what this rank has left of an exchange that all ranks have done with."""
        of = ("answer", "read", "warning") if self._rank == 0 else (f"from {self._rank}",)
        for what in of:
            self._store.delete_key(self._key(number, what))

    def warn(self, number: int, ranks: Mapping[int, str]) -> None:
        """Say of which ranks, by rank in the world, an exchange will fail; the first to say so is heard."""
        if self.session and not self._has(number, "warning"):
            self._store.set(self._key(number, "warning"), json.dumps(ranks))

    def warning(self) -> dict[int, str]:
        """Return of which ranks, by rank in the world, the next exchange will fail."""
        if not self.session or not self._has(self.number, "warning"):
            return {}
        return _ranks_of(json.loads(self._get(self.number, "warning")))

    def take_leaves(self, leaves: Mapping[str, int]) -> None:
        """Note how often ranks have gone away that were given up for that."""
        for line, number in leaves.items():
            self._leaves[line] = max(number, self._leaves.get(line, 0))

    def wait_until_read(self, limit_s: float) -> None:
        """Wait until the ranks that wait for this one's last answer have read it, for `limit_s` seconds at most."""
        number, num_readers = self._last_answer
        until = time.monotonic() + limit_s
        while num_readers and time.monotonic() < until:
            if self._store.add(self._key(number, "read"), 0) >= num_readers:
                break
            time.sleep(0.001)
        self._last_answer = -1, 0

    def _settle(self, number: int, answer: dict[str, Any]) -> list[str]:
        """Answer an exchange, unless somebody has; return the contents, or raise LostError as the answer says.

        `acknowledge` follows, in either case.
        """
        settled = json.loads(self._store.compare_set(self._key(number, "answer"), "", json.dumps(answer)))
        self.number = number + 1
        if self._rank == 0:
            self._last_answer = number, len(self._members) - 1 - len(settled.get("lost", {}))
        else:
            self._last_read = number
        if "lost" in settled:
            self.take_leaves(settled["leaves"])
            raise LostError(_ranks_of(settled["lost"]))
        return [settled["contents"][place] for place in settled["of"]]

    def _has(self, number: int, what: str) -> bool:
        return bool(self._store.check([self._key(number, what)]))

    def _get(self, number: int, what: str) -> str:
        return str(self._store.get(self._key(number, what)).decode())

    def _key(self, number: int, what: str) -> str:
        return f"{self._name}/{self.session}/{number}/{what}"


def _ranks_of(found: dict[str, str]) -> dict[int, str]:
    return {int(rank): why for rank, why in found.items()}
