"""Exchanges and life signs over a store of torch.distributed, each rank a thread of this process."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from lowmem_load.ranks import line as line_module
from lowmem_load.ranks.exchanges import LostError
from lowmem_load.ranks.life import Limits, Progress
from lowmem_load.ranks.line import Line

LIMITS = Limits(silence_s=0.6, gone_s=5.0, absence_s=2.0)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "SIGN_EVERY_S", 0.05)


class Ranks:
    """Lines of all ranks of a group, and a thread for each."""

    def __init__(self, world_size: int, store: Any = None, first: int = 0) -> None:
        self.store = store or dist.HashStore()
        members = [first + rank for rank in range(world_size)]
        self.lines = [Line(self.store.clone(), "group", members, rank, {}) for rank in range(world_size)]
        for line in self.lines:
            line.limits = LIMITS
        self.pool = ThreadPoolExecutor(world_size)

    def all(self, work: Callable[[Line, int], Any]) -> list[Any]:
        """Runs `work` on every rank; returns what each gives, or raises."""

        def run(rank: int) -> Any:
            try:
                return work(self.lines[rank], rank)
            except LostError as error:
                return error.ranks

        return list(self.pool.map(run, range(len(self.lines))))


@pytest.fixture(params=["hash", "tcp"])
def store(request: pytest.FixtureRequest) -> Any:
    return dist.HashStore() if request.param == "hash" else dist.TCPStore("127.0.0.1", 0, is_master=True)


def exchange(line: Line, content: str) -> list[str]:
    with line.doing("exchanging"):
        return line.exchange(content)


@pytest.mark.parametrize("world_size", [2, 3, 16])
def test_every_rank_gets_the_contents_of_all(store: Any, world_size: int) -> None:
    ranks = Ranks(world_size, store)
    for turn in range(5):
        found = ranks.all(lambda line, rank, turn=turn: exchange(line, f"{turn} {rank % 3}"))
        assert found == [[f"{turn} {rank % 3}" for rank in range(world_size)]] * world_size


def test_the_store_does_not_grow(store: Any) -> None:
    ranks = Ranks(3, store)
    ranks.all(lambda line, rank: [exchange(line, "x") for _ in range(3)])
    before = store.num_keys()
    ranks.all(lambda line, rank: [exchange(line, "x") for _ in range(50)])
    assert store.num_keys() == before


def test_no_thread_stays() -> None:
    before = set(threading.enumerate())
    Ranks(3).all(lambda line, rank: exchange(line, "x"))
    assert not {thread.name for thread in set(threading.enumerate()) - before if "lowmem_load" in thread.name}


def test_a_slow_rank_that_gets_on_is_waited_for() -> None:
    def work(line: Line, rank: int) -> list[str]:
        start = time.monotonic()
        with line.doing("reading", lambda: Progress(int((time.monotonic() - start) * 10), "on it")):
            if rank == 1:
                time.sleep(3 * LIMITS.silence_s)
            return line.exchange("x")

    assert Ranks(3).all(work) == [["x"] * 3] * 3


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_does_not_get_on_is_named_by_all_and_hears_of_it(late: int) -> None:
    ranks = Ranks(3, first=4)
    times: dict[int, float] = {}

    def work(line: Line, rank: int) -> Any:
        start = time.monotonic()
        try:
            with line.doing("reading", lambda: Progress(7, "7 bytes read")):
                if rank == late:
                    time.sleep(3 * LIMITS.silence_s)
                return line.exchange("x")
        finally:
            times[rank] = time.monotonic() - start

    found = ranks.all(work)
    assert found == [found[0]] * 3
    assert list(found[0]) == [4 + late]
    assert "no progress for more than 0.6 s" in found[0][4 + late]
    assert "while reading, 7 bytes read" in found[0][4 + late]
    assert all(seconds < 2 * LIMITS.silence_s for rank, seconds in times.items() if rank != late)
    assert ranks.all(lambda line, rank: exchange(line, "again")) == [["again"] * 3] * 3


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_never_comes_is_named(missing: int) -> None:
    ranks = Ranks(3)
    found = ranks.all(lambda line, rank: None if rank == missing else exchange(line, "x"))
    assert found[2] == found[1 - missing]
    assert "has not come to this point in 2 s" in found[2][missing]


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_rank_that_goes_away_is_named_at_once_and_all_can_go_on(leaver: int) -> None:
    ranks = Ranks(3)
    ranks.all(lambda line, rank: exchange(line, "x"))
    start = time.monotonic()
    found = ranks.all(lambda line, rank: line.leave("left: no") if rank == leaver else exchange(line, "y"))
    assert time.monotonic() - start < LIMITS.absence_s
    assert [found[rank] for rank in range(3) if rank != leaver] == [{leaver: "left: no"}] * 2
    assert ranks.all(lambda line, rank: exchange(line, "z")) == [["z"] * 3] * 3


def test_a_rank_in_the_middle_is_told_of_an_exchange_that_was_given_up() -> None:
    ranks = Ranks(2)

    def work(line: Line, rank: int) -> Any:
        with line.doing("reading", lambda: Progress(1, "")):
            line.exchange("begun")
            if rank == 1:
                time.sleep(2 * LIMITS.silence_s)
            return exchange_or_lost(line)

    found = ranks.all(work)
    assert found[0] == found[1]
    assert "no progress" in found[1][1]


def exchange_or_lost(line: Line) -> Any:
    try:
        return exchange(line, "x")
    except LostError as error:
        return error.ranks


def test_ranks_that_all_go_away_can_all_come_again() -> None:
    ranks = Ranks(3)
    for _ in range(2):
        ranks.all(lambda line, rank: line.leave("left: no"))

        def work(line: Line, rank: int) -> list[str]:
            time.sleep(0.2 * rank)
            return exchange(line, "x")

        assert ranks.all(work) == [["x"] * 3] * 3


def test_a_warning_reaches_ranks_that_are_busy() -> None:
    ranks = Ranks(3)

    def work(line: Line, rank: int) -> dict[int, str]:
        heard: dict[int, str] = {}
        with line.doing("reading", lambda: Progress(time.monotonic_ns(), "")):
            if rank == 1:
                line.warn("the disk is gone")
            else:
                deadline = time.monotonic() + 5
                while not line.trouble and time.monotonic() < deadline:
                    time.sleep(0.01)
                heard = line.trouble
            assert line.exchange("x") == ["x"] * 3
            assert line.trouble == {}
        return heard

    assert ranks.all(work) == [{1: "the disk is gone"}, {}, {1: "the disk is gone"}]


def test_busy_ranks_hear_of_one_that_is_lost() -> None:
    ranks = Ranks(3)

    def work(line: Line, rank: int) -> Any:
        with line.doing("reading", lambda: Progress(5 if rank == 2 else time.monotonic_ns(), "")):
            deadline = time.monotonic() + 5
            while rank != 2 and not line.trouble and time.monotonic() < deadline:
                time.sleep(0.01)
            heard = dict(line.trouble)
            if rank == 2:
                time.sleep(4 * LIMITS.silence_s)
            with contextlib.suppress(LostError):
                line.exchange("x")
            return heard

    heard = ranks.all(work)
    assert heard[0] == heard[1]
    assert "no progress" in heard[0][2]


def test_keys_of_an_earlier_group_of_the_same_name_do_no_harm(store: Any) -> None:
    first = Ranks(2, store)
    first.all(lambda line, rank: exchange(line, "old"))
    second = Ranks(2, store)

    def work(line: Line, rank: int) -> list[str]:
        time.sleep(0.0 if rank else 0.3)  # the other one finds the old session first
        return exchange(line, f"new {rank}")

    assert second.all(work) == [["new 0", "new 1"]] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_while_waiting_tells_the_others(rank: int) -> None:
    ranks = Ranks(2)
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        exchange(ranks.lines[rank], "x")
    assert "interrupted" in exchange_or_lost(ranks.lines[1 - rank])[rank]
    assert ranks.all(lambda line, rank: exchange(line, "x")) == [["x"] * 2] * 2


def test_a_store_that_is_gone_is_an_error_and_no_hang() -> None:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True)
    ranks = Ranks(2, dist.TCPStore("127.0.0.1", master.port, is_master=False))
    assert ranks.all(lambda line, rank: exchange(line, "x")) == [["x", "x"]] * 2
    del master
    found = ranks.all(lambda line, rank: exchange(line, "x"))
    assert all("cannot be reached" in found[rank][0] for rank in range(2))


def test_a_store_that_does_not_answer_is_an_error_and_no_hang() -> None:
    class Stuck:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: time.sleep(3)

    line = Line(Stuck(), "group", [0, 1], 1, {})  # type: ignore[arg-type]
    line.limits = Limits(gone_s=0.3)
    start = time.monotonic()
    assert "has not answered for 0.3 s" in exchange_or_lost(line)[0]
    assert time.monotonic() - start < 1.5


def test_a_thread_whose_store_is_gone_does_not_spin() -> None:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True)
    line = Line(dist.TCPStore("127.0.0.1", master.port, is_master=False), "group", [0, 1], 1, {})
    with line.doing("reading"):
        del master
        deadline = time.monotonic() + 5
        while not line.trouble and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "cannot be reached" in line.trouble[0]
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.2


def test_time_in_which_this_process_was_stopped_is_nobodys_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(dist.HashStore(), "group", [0, 1], 1, {})
    clock = [0.0]
    monkeypatch.setattr(line_module.time, "monotonic", lambda: clock[0])
    line._open()
    line._work.put(None)
    assert line._thread is not None
    line._thread.join()
    before = line._watched_s
    clock[0] += 3600
    line._look()
    assert line._watched_s - before <= 2 * line_module.SIGN_EVERY_S


class Stalling:
    """A store whose calls that contribute to an exchange have not come through yet."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        if "/from " not in key:
            self._store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_what_a_rank_said_before_it_was_given_up_does_not_stand_for_what_it_says_now() -> None:
    ranks = Ranks(2)
    ranks.all(lambda line, rank: exchange(line, "x"))
    late = ranks.lines[1]
    late._exchanges.give(1, "of an attempt whose store stalled")
    late._exchanges._store = Stalling(late._store)  # type: ignore[assignment]
    found = ranks.all(lambda line, rank: (time.sleep(0.3 - 0.3 * rank), exchange(line, "y"))[1])
    assert found[0] == ["y", "of an attempt whose store stalled"]
    assert "came too late" in found[1][1]
