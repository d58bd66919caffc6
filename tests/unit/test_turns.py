"""Whose turn it is to read. The other ranks are threads that meet at a barrier."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lowmem_load.report import LoadReport
from lowmem_load.stages.turns import READING, turn, turn_of


class Meeting:
    """A `RankGroup` of one thread; `agree` returns when all have come to it, or raises once one has failed."""

    def __init__(self, rank: int, world_size: int, barrier: threading.Barrier) -> None:
        self.rank, self.world_size, self._barrier = rank, world_size, barrier
        self.num_exchanges = 0

    def agree(self, step: str, error: BaseException | None, *, name: str) -> None:
        assert (step, name) == (READING, "model")
        self.num_exchanges += 1
        if error is not None:
            self._barrier.abort()
        self._barrier.wait(timeout=20)


def in_turns(world_size: int, readers: int, failing: int = -1) -> tuple[list[set[int]], list[Any], list[LoadReport]]:
    """Returns which ranks have read between two meetings, what came of each rank, and the reports."""
    read: list[set[int]] = [set()]
    barrier = threading.Barrier(world_size, action=lambda: read.append(set()))
    reports = [LoadReport("model", readers=readers) for _ in range(world_size)]

    def load(rank: int) -> Any:
        ranks: Any = Meeting(rank, world_size, barrier)
        try:
            with turn(ranks, reports[rank]):
                read[-1].add(rank)
                ranks.agree(READING, OSError() if rank == failing else None, name="model")
        except threading.BrokenBarrierError as error:
            return error
        return ranks.num_exchanges

    with ThreadPoolExecutor(world_size) as pool:
        found = list(pool.map(load, range(world_size)))
    return read, found, reports


@pytest.mark.parametrize(
    ("readers", "turns"),
    [
        (0, [{0, 1, 2, 3, 4}]),
        (5, [{0, 1, 2, 3, 4}]),
        (3, [{0, 2, 4}, {1, 3}]),
        (2, [{0, 3}, {1, 4}, {2}]),
        (1, [{0}, {1}, {2}, {3}, {4}]),
    ],
)
def test_each_rank_reads_once_and_no_more_at_a_time_than_may(readers: int, turns: list[set[int]]) -> None:
    read, found, reports = in_turns(5, readers)
    assert read == [*turns, set()]
    assert found == [len(turns)] * 5
    assert all(("turn" in report.seconds) is (len(turns) > 1) for report in reports)


def test_one_that_fails_in_its_turn_ends_the_load_of_all() -> None:
    read, found, _ = in_turns(4, 1, failing=1)
    assert read == [{0}, {1}], "of those whose turn had not come, too"
    assert all(isinstance(error, threading.BrokenBarrierError) for error in found)


@pytest.mark.parametrize(("world_size", "readers"), [(1, 1), (8, 3), (1024, 100), (1000, 999)])
def test_no_turn_has_more_ranks_than_may_read(world_size: int, readers: int) -> None:
    turns = [turn_of(rank, world_size, readers)[0] for rank in range(world_size)]
    assert max(turns.count(number) for number in set(turns)) <= readers
    assert set(turns) == set(range(turn_of(0, world_size, readers)[1]))
