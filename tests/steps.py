"""Steps of ranks in tests: what all ranks bring, and a group whose other ranks are scripted."""

from collections import Counter
from typing import Any

from lowmem_load.distributed.steps import RankGroup


def payloads(ranks: RankGroup, payload: Any) -> list[Any]:
    """Returns what all ranks bring to a step, by rank. Collective."""
    with ranks.step("telling") as step:
        step.payload = payload
    return step.payloads


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
