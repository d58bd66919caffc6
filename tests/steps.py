"""Steps of ranks in tests: what all ranks bring, and a group whose other ranks are scripted."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lowmem_load.distributed.group import RankGroup, Step


def payloads(ranks: RankGroup, payload: Any) -> list[Any]:
    """Returns what all ranks bring to a step, by rank. Collective."""
    with ranks.step("telling") as step:
        step.payload = payload
    return step.payloads


class ScriptedRanks:
    """A `RankGroup` seen from one rank, without errors.

    Args:
        rank: of this process.
        others: for each step that is to come, what each rank brings to it, or what returns that, given what this rank
            brings; for this rank, its own counts.

    Attributes:
        titles: of the steps so far, with names.
        brought: by this rank to the steps so far.
    """

    def __init__(self, rank: int, *others: Sequence[Any] | Callable[[Any], Sequence[Any]]) -> None:
        self.rank, self._others = rank, iter(others)
        self.titles: list[str] = []
        self.brought: list[Any] = []
        self.progress: Any = None

    @contextlib.contextmanager
    def step(self, title: str, *, name: str = "", progress: Any = None) -> Iterator[Step]:
        self.titles.append(f"{name}: {title}" if name else title)
        self.progress = progress
        step = Step()
        yield step
        self.brought.append(json.loads(json.dumps(step.payload)))
        others = next(self._others, [None] * (self.rank + 1))
        given = others(self.brought[-1]) if callable(others) else others
        step.payloads = [self.brought[-1] if rank == self.rank else each for rank, each in enumerate(given)]

    def check(self) -> None:
        pass


class CountingClient:
    """A client of a store that counts the round trips that a rank waits for.

    `set` is not answered, and `multi_get` waits for the keys first. Nobody waits for `delete_key`, at the end of a
    load. To ask the same again in a step costs nothing: the rank waits for another one.
    """

    def __init__(self, client: Any, counts: Counter[str]) -> None:
        self._client, self._counts = client, counts
        self._asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)

        def counted(*arguments: Any) -> Any:
            is_look = name == "multi_get" or str(arguments[0]).startswith("rank/")  # at what other ranks have written
            question = "look" if is_look else f"{name} {arguments}"
            if name == "set":
                self._asked.clear()
            elif name != "delete_key" and question not in self._asked:
                self._counts[name] += 2 if name == "multi_get" else 1
            self._asked.add(question)
            return call(*arguments)

        return counted
