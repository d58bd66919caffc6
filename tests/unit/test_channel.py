"""Steps and heartbeats over a store of torch.distributed; each rank is a thread of this process."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from lowmem_load.distributed import steps
from lowmem_load.distributed.channel import FAREWELL_S, KEPT, Group, StoppedError, StoreChannel
from lowmem_load.distributed.peers import Entry, Limits, Verdict, verdict_on
from lowmem_load.distributed.process_group import look_into
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.phases import Progress
from tests.steps import CountingClient

LIMITS = Limits(silence_s=0.6, gone_s=5.0, absence_s=2.0)
BEAT_S = 0.05


class Ranked(RankGroup):
    """The ranks of a group, of which each is a thread with a channel of its own."""

    def __init__(self, channel: StoreChannel, members: Sequence[int], loop: Group | None = None) -> None:
        super().__init__(None, loop)
        self.channel, self.members = channel, tuple(members)

    @property
    def world_ranks(self) -> tuple[int, ...]:
        return self.members

    def _joined(self) -> Group:
        return self._loop or self.channel.groups.setdefault("group", Group(self.channel, "group", self.members))

    def loop(self) -> Ranked:
        return Ranked(self.channel, self.members, super().loop()._loop)


@pytest.fixture(autouse=True)
def live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)


def channel_of(
    open_client: Callable[[], Any], rank: int, limits: Limits = LIMITS, beat_s: float = BEAT_S
) -> StoreChannel:
    channel = StoreChannel(open_client, rank, beat_s)
    channel.limits = limits
    return channel


class Ranks:
    """The channels of all ranks of a group, and a thread for each."""

    def __init__(self, world_size: int, store: Any = None, first: int = 0, limits: Limits = LIMITS) -> None:
        self.store = store or dist.HashStore()
        self.members = [first + rank for rank in range(world_size)]
        self.channels = [channel_of(self.store.clone, rank, limits) for rank in self.members]
        self.pool = ThreadPoolExecutor(world_size)

    def all(self, work: Callable[[Ranked, int], Any]) -> list[Any]:
        """Runs `work` on every rank; returns what each gives."""

        def run(place: int) -> Any:
            return work(Ranked(self.channels[place], self.members), place)

        return list(self.pool.map(run, range(len(self.members))))

    def step(self, title: str = "step", **brought: Any) -> list[Outcome]:
        return self.all(lambda group, _: step(group, title, **brought))


class Outcome(NamedTuple):
    """What comes of a step on one rank."""

    failures: Sequence[tuple[int, str]]
    payloads: Sequence[Any]


def step(group: RankGroup, title: str = "step", payload: Any = None, **brought: Any) -> Outcome:
    with group._doing(title):
        verdict = group._agree(Entry(title, payload="" if payload is None else json.dumps(payload), **brought))
        return Outcome(verdict.failures, [json.loads(text or "null") for text in verdict.payloads])


def failed(verdict: Outcome | Verdict) -> dict[int, str]:
    return dict(verdict.failures)


def busy(amount: Callable[[], int] = time.monotonic_ns) -> Callable[[], Progress]:
    return lambda: Progress(amount(), f"{amount()} bytes read" if amount is not time.monotonic_ns else "")


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def stopped(channel: StoreChannel) -> bool:
    try:
        channel.check()
    except StoppedError:
        return True
    return False


@pytest.fixture(params=["hash", "tcp", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), 1)
    return dist.TCPStore("127.0.0.1", 0, is_master=True)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_every_rank_gets_the_payloads_of_all(store: Any, world_size: int) -> None:
    ranks = Ranks(world_size, store)
    for turn in range(5):
        found = ranks.all(lambda group, rank, turn=turn: step(group, payload=[turn, rank % 3]))
        assert [verdict.payloads for verdict in found] == [
            [[turn, rank % 3] for rank in range(world_size)]
        ] * world_size


def test_payloads_of_many_megabytes_are_compressed() -> None:
    ranks = Ranks(2, dist.TCPStore("127.0.0.1", 0, is_master=True))
    found = ranks.all(lambda group, rank: step(group, payload=str(rank) * 5_000_000))
    assert [[len(text) for text in verdict.payloads] for verdict in found] == [[5_000_000] * 2] * 2


def test_the_store_does_not_grow(store: Any) -> None:
    ranks = Ranks(3, store)

    def steps(number: int) -> None:
        ranks.all(lambda group, rank: [step(group, payload=number * "x") for number in range(number)])
        ranks.all(lambda group, rank: step(group, error="no" if rank == 1 else None))
        ranks.step()

        for leaver in range(3):
            ranks.all(lambda group, rank, leaver=leaver: leave_or_come(group.loop(), rank == leaver))
        ranks.step()

    def leave_or_come(loop: RankGroup, leaves: bool) -> None:
        step(loop)
        loop.leave("left it") if leaves else step(loop)

    steps(KEPT + 10)
    before = store.num_keys()
    steps(50)
    assert store.num_keys() == before
    assert max(len(channel.groups["group"].read) for channel in ranks.channels) <= KEPT + 1


@pytest.mark.parametrize("world_size", [2, 3])
def test_ten_steps_take_at_most_25_round_trips(world_size: int) -> None:
    """No load has more. The leader makes some more: its machine has the store.

    Heartbeats, which come too seldom to disturb here, are not counted.
    """
    store, counts = dist.HashStore(), [Counter[str]() for _ in range(world_size)]
    channels = [
        channel_of(lambda rank=rank: CountingClient(store, counts[rank]), rank, Limits(), beat_s=60.0)
        for rank in range(world_size)
    ]

    def load(rank: int) -> None:
        group = Ranked(channels[rank], range(world_size))
        with group._doing("loading"):
            for number in range(10):
                assert not failed(step(group, f"{number}", payload=number if number < 3 else None))

    for _ in range(2):
        for count in counts:
            count.clear()
        with ThreadPoolExecutor(world_size) as pool:
            list(pool.map(load, range(world_size)))
        limits = [40] + [25] * (world_size - 1)
        assert all(0 < count.total() <= limit for count, limit in zip(counts, limits, strict=True)), counts


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_makes_no_progress_is_named_by_all_and_hears_of_it(late: int) -> None:
    ranks, times = Ranks(3, first=4), dict[int, float]()

    def work(group: Ranked, rank: int) -> Outcome:
        start = time.monotonic()
        try:
            with group._doing("reading", busy(lambda: 7)):
                if rank == late:
                    time.sleep(2 * LIMITS.silence_s)
                    wait_for(lambda: stopped(group.channel))
                return step(group)
        finally:
            times[rank] = time.monotonic() - start

    found = ranks.all(work)
    assert found == [found[0]] * 3
    assert list(failed(found[0])) == [4 + late]
    message = failed(found[0])[4 + late]
    assert "no progress for more than 0.6 s" in message
    assert "while reading, 7 bytes read" in message
    assert all(seconds < 2.5 * LIMITS.silence_s + FAREWELL_S for rank, seconds in times.items() if rank != late), times
    assert all(not failed(verdict) for verdict in ranks.step())


def test_the_leader_does_not_wait_until_a_lost_rank_has_read_the_verdict() -> None:
    ranks = Ranks(2, limits=LIMITS._replace(gone_s=0.5))
    ranks.step()

    def work(group: Ranked, rank: int) -> str:
        if rank == 0:
            return failed(step(group))[1]
        with group._doing("step"):
            group.channel.end()
            group.channel._thread.join()
        return ""

    start = time.monotonic()
    assert "has sent no heartbeat for more than 0.5 s" in ranks.all(work)[0]
    assert time.monotonic() - start < FAREWELL_S


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_rank_that_aborts_is_named_at_once_and_all_can_go_on(leaver: int) -> None:
    ranks = Ranks(3)
    ranks.step()
    start = time.monotonic()
    found = ranks.all(lambda group, rank: group.abort("it", OSError("no")) if rank == leaver else step(group))
    assert time.monotonic() - start < LIMITS.absence_s
    assert [failed(found[rank]) for rank in range(3) if rank != leaver] == [{leaver: "left it: OSError: no"}] * 2

    def late(group: Ranked, rank: int) -> Outcome:
        time.sleep(0.5 * (rank == leaver))  # what it said is not counted a second time
        return step(group)

    assert all(not failed(verdict) for verdict in ranks.all(late))


def test_ranks_that_all_leave_a_loop_lose_nothing() -> None:
    def work(group: Ranked, rank: int) -> Outcome:
        loop = group.loop()
        step(loop, "loop")
        time.sleep(0.1 * rank)
        loop.leave("left it")
        step(group.loop(), "another loop")
        return step(group)

    ranks = Ranks(3)
    ranks.step()
    assert all(not failed(verdict) for verdict in ranks.all(work))


def test_a_loop_that_one_rank_has_not_begun_does_not_disturb_the_next_one() -> None:
    def work(group: Ranked, rank: int) -> Outcome:
        if rank != 1:
            group.loop()
        step(group)
        return step(group.loop(), "loop")

    assert all(not failed(verdict) for verdict in Ranks(3).all(work))


def test_ranks_that_wait_for_each_other_in_and_outside_of_a_loop_fail() -> None:
    def work(group: Ranked, rank: int) -> Outcome:
        loop = group.loop()
        step(loop, "loop")
        return step(group, "after") if rank == 1 else step(loop, "loop")

    ranks = Ranks(3, limits=LIMITS._replace(gone_s=0.5, absence_s=99.0))
    ranks.step()
    found = [failed(outcome) for outcome in ranks.all(work)]
    assert found == [found[0]] * 3
    ((rank, text),) = found[0].items()
    assert rank in (0, 1)  # whoever notices it first
    assert "waits elsewhere, after " in text


def test_ranks_that_left_together_are_in_line_again() -> None:
    ranks = Ranks(3)
    found = ranks.all(lambda group, rank: step(group) if rank == 2 else group.abort("it", OSError(rank)))
    assert failed(found[2]).items() <= {0: "left it: OSError: 0", 1: "left it: OSError: 1"}.items(), (
        "the first one counts"
    )
    assert all(not failed(verdict) for verdict in ranks.step())


def test_a_store_that_is_gone_is_an_error_and_no_hang() -> None:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True)
    ranks = Ranks(2, dist.TCPStore("127.0.0.1", master.port, is_master=False))
    ranks.step()
    del master
    start = time.monotonic()
    assert all("cannot be reached" in failed(verdict)[0] for verdict in ranks.step())
    assert time.monotonic() - start < 5


class Stuck:
    """A client of a store that answers for a while."""

    def __init__(self, client: Any, is_stuck: threading.Event, end: threading.Event) -> None:
        self._client, self._is_stuck, self._end = client, is_stuck, end

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if self._is_stuck.is_set():
                assert self._end.wait(20)
            return getattr(self._client, name)(*arguments)

        return call


@pytest.fixture
def stuck() -> Iterator[tuple[Callable[[], Any], threading.Event, threading.Event]]:
    store, is_stuck, end = dist.HashStore(), threading.Event(), threading.Event()
    yield lambda: Stuck(store, is_stuck, end), is_stuck, end
    end.set()


def test_a_store_that_falls_silent_is_an_error_and_no_hang(stuck: Any, caplog: pytest.LogCaptureFixture) -> None:
    open_client, is_stuck, end = stuck
    channels = [channel_of(open_client, rank, Limits(gone_s=0.3)) for rank in range(2)]
    groups = [Ranked(channel, (0, 1)) for channel in channels]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: step(groups[rank]), range(2)))
    with groups[1]._doing("reading", busy()):
        is_stuck.set()
        start = time.monotonic()
        wait_for(lambda: stopped(channels[1]))  # a busy rank notices
        assert time.monotonic() - start < 2
        found = step(groups[1])
        assert "has not answered for 0.3 s" in failed(found)[0]
        assert time.monotonic() - start < 2
    assert "has not answered for 0.3 s" in failed(step(groups[1]))[0]
    end.set()
    is_stuck.clear()
    assert "has not answered for 0.3 s" in failed(step(groups[1]))[0], "also when the store is back"
    assert re.search(r"rank 1 gives up the store, which its thread asks in .+ \(line \d+\)", caplog.text)


def test_a_rank_that_computes_for_long_does_not_take_the_store_for_silent() -> None:
    """No other thread of a process runs while C code holds the interpreter's lock."""
    ranks = Ranks(2, limits=Limits(gone_s=0.3))

    def work(group: Ranked, rank: int) -> Outcome:
        with group._doing("computing", busy()):
            start = time.monotonic()
            while rank == 1 and time.monotonic() - start < 1.5:
                sum(itertools.repeat(1, 100_000_000))
                group.channel.check()
            return step(group)

    ranks.step()
    assert all(not failed(verdict) for verdict in ranks.all(work))


@pytest.mark.parametrize("is_within", [False, True])
@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_aborts_and_ends_before_the_others_have_come_is_named(leaver: int, is_within: bool) -> None:
    ranks = Ranks(3, limits=LIMITS._replace(gone_s=0.5, absence_s=9.0))

    def work(group: Ranked, rank: int) -> Any:
        if rank == leaver:
            with group._doing("the load") if is_within else contextlib.nullcontext():
                group.abort("it", OSError("no"))
            return group.channel.end()
        time.sleep(FAREWELL_S + 0.5 if rank == 0 or leaver == 0 else 0.0)
        return step(group)

    found = ranks.all(work)
    assert [failed(found[rank]) for rank in range(3) if rank != leaver] == [{leaver: "left it: OSError: no"}] * 2


@pytest.mark.parametrize(
    ("leavers", "pause_s", "num_inner"), [([0], 0.0, 0), ([2], 0.5, 0), ([0, 1], 0.0, 2), ([2], 0.0, 2), ([0], 0.5, 2)]
)
def test_a_rank_that_leaves_a_loop_comes_to_another_step(leavers: list[int], pause_s: float, num_inner: int) -> None:
    def work(group: Ranked, rank: int) -> Outcome:
        loop = group.loop()
        step(loop, "loop")
        for _ in range(num_inner):
            step(group, "within the loop")
        if rank not in leavers:
            time.sleep(0.5 - pause_s)
            found = failed(step(loop, "loop"))
            assert found and set(found.items()) <= {(each, "left it") for each in leavers}
        else:
            thread = threading.Thread(target=loop.leave, args=("left it",))  # as the garbage collector may
            thread.start()
            thread.join()
            time.sleep(pause_s)  # others may give it up, or be at their step together with it
            with group._doing("computing", busy()):
                time.sleep(3 * BEAT_S)
                assert not stopped(group.channel)
        return step(group, "after")

    ranks = Ranks(3)
    ranks.step()
    for _ in range(2):
        assert all(not failed(verdict) for verdict in ranks.all(work))


def test_a_store_that_another_group_has_used_is_refused(store: Any) -> None:
    first = Ranks(2, store)
    first.step()
    for channel in first.channels:
        channel.end()
    assert all("has been used by an earlier group" in failed(verdict)[0] for verdict in Ranks(2, store).step())


def test_what_ranks_do_can_be_seen_from_outside() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    ranks = Ranks(2, dist.PrefixStore("0", dist.PrefixStore("lowmem_load", store)))

    def work(group: Ranked, rank: int) -> None:
        with group._doing("reading", busy(lambda: 7)):
            if rank == 0:
                step(group)  # waits for rank 1
            else:
                seen.extend(look_into("127.0.0.1", store.port, 0.3))
                step(group)

    seen: list[dict[str, Any]] = []
    ranks.all(work)
    assert [(one["prefix"], one["rank"], one["silent"]) for one in seen] == [
        ("lowmem_load/0", rank, False) for rank in (0, 1)
    ]
    assert [one["does"] for one in seen] == ["after step", "while reading, 7 bytes read"]


@pytest.mark.parametrize("late", [[1, 2], [0], [0, 2]])
def test_waiting_ranks_say_who_has_not_come_and_to_what(late: list[int], caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("lowmem_load.distributed.channel.NOTICE_S", 0.2)

    def work(group: Ranked, rank: int) -> Outcome:
        if rank in late:
            time.sleep(1.2)
        with group._doing("in the step"):
            time.sleep(0.8 * (rank not in late))  # of who is slow, but there, nothing is said
            return step(group, "tiny: reading")

    ranks = Ranks(3)
    ranks.step()
    assert all(not failed(verdict) for verdict in ranks.all(work))
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    names = "rank(s) 0 (" if 0 in late else "rank(s) 1-2 ("  # rank 0 says it of all ranks, the others of rank 0
    for rank in {0, 1, 2} - {*late}:
        own = [line for line in lines if line.startswith(f"lowmem_load: rank {rank} has waited ")]
        assert 1 <= len(own) <= 3, "at growing intervals"
        assert all(" s at 'tiny: reading' for " in line and "was last seen between loads (pid " in line for line in own)
        assert all(names in line for line in own), own
    assert not any(f"rank {rank} has waited" in line for rank in late for line in lines)


# -- what comes of a step, by what each rank brings to it ------------------------------------------------------------


def entry(**brought: Any) -> Entry:
    return Entry("planning", **brought)


STOPPED = entry(error="")


@pytest.mark.parametrize(
    ("entries", "failures"),
    [
        ([entry(), entry(error="no"), entry(error="not"), entry()], {1: "no", 2: "not"}),
        ([STOPPED, entry(), entry(error="no")], {2: "no"}),
        ([STOPPED, entry(), entry()], {0: "stopped because another rank has failed"}),  # there is no other to name
        ([entry(digest="b"), Entry("saving", digest="a"), entry(error="no")], {2: "no"}),
        (
            [entry(digest="b"), Entry("saving", digest="a"), entry(digest="b")],
            {1: "is at 'saving', where rank(s) 0, 2 are at 'planning'"},
        ),
    ],
)
def test_each_rank_that_failed_is_named(entries: list[Entry], failures: dict[int, str]) -> None:
    found = verdict_on(dict(enumerate(entries)))
    assert (dict(found.failures), found.is_alike, found.differs) == (failures, False, False)


def test_each_topic_that_differs_is_compared_with_what_most_have() -> None:
    usual = {"commit": "c1", "files": "f1", "configuration": "k1"}
    digests = [{**usual, "commit": "c2", "files": "f2"}, usual, usual, {"commit": "c1", "files": "f1"}]
    assert steps._differing([4, 5, 6, 7], [json.dumps(digest) for digest in digests]) == [
        (4, "has commit c2, where rank(s) 5-7 have c1; has files f2, where rank(s) 5-7 have f1"),
        (7, "has configuration none, where rank(s) 4-6 have k1"),
    ]
