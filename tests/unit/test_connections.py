"""Ranks that tell each other their addresses are connected, strangers are not; in threads, over TCP."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lowmem_load.ranks import connections as module
from lowmem_load.ranks.connections import Address, Connections, connections
from lowmem_load.ranks.group import StoppedError
from tests.together import in_threads


class Ranks:
    """What `connections` needs of a group of ranks, for one thread."""

    def __init__(self, rank: int, told: dict[int, list[Any]], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, barrier.parties
        self._told, self._barrier, self._number = told, barrier, 0

    def all_gather_object(self, obj: Any) -> list[Any]:
        self._told.setdefault(self._number, [None] * self.world_size)[self.rank] = obj
        self._barrier.wait(20)
        self._number += 1
        return self._told[self._number - 1]

    def watch(self) -> Callable[[], None]:
        return lambda: None


def on_ranks(world_size: int, members: list[int], act: Callable[[int, Connections | None, str], Any]) -> list[Any]:
    """Returns what `act` returns or raises on each rank, connected with the other members if it is one."""
    barrier = threading.Barrier(world_size)
    told: dict[int, list[Any]] = {number: [None] * world_size for number in range(2)}

    def run(rank: int) -> Any:
        ranks: Any = Ranks(rank, told, barrier)
        with connections(ranks, members if rank in members else []) as (streams, why):
            return act(rank, streams, why)

    return in_threads(world_size, run)


def give_up() -> None:
    raise InterruptedError


def pass_on(rank: int, streams: Connections | None, why: str) -> str:
    """Sends each rank a word, and returns those that come."""
    if streams is None:
        return why
    heard = []
    for place in range(streams.num_ranks):
        streams.send(place, memoryview(f"{rank}".encode()), give_up)
    for place in range(streams.num_ranks):
        word = bytearray(1)
        streams.receive(place, memoryview(word), give_up)
        heard.append(word.decode())
    return "".join(heard)


def test_members_are_connected_with_each_other_and_themselves() -> None:
    assert on_ranks(4, [0, 2, 3], pass_on) == ["023", "", "023", "023"]


def test_other_machines_are_called_by_the_address_that_reaches_others(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (hosts := module._hosts()):
        pytest.skip("this machine has no network")
    monkeypatch.setattr(module, "_network", lambda rank: f"machine {rank}")
    monkeypatch.setattr(module, "_hosts", lambda: ("0.0.0.1", *hosts))  # the first one answers nobody
    assert on_ranks(2, [0, 1], pass_on) == ["01", "01"]


def test_strangers_are_not_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come first, know the port and how to speak, but not the secret."""
    ordinary, strangers = module._connected, []

    def connected(place: int, members: Any, addresses: list[Address], *rest: Any) -> Any:
        if place == 0:
            for hello in (
                b"",
                b"GET / HTTP/1.0\r\n\r\n" + b" " * 30,
                module._CALL.pack(1, bytes(32)),
                b"",
                *[b"?"] * 20,
            ):
                strangers.append(socket.create_connection(("127.0.0.1", addresses[0].port)))
                strangers[-1].sendall(hello)
            strangers[0].close()  # and others stay, saying nothing, or too little
        else:
            time.sleep(0.2)
        return ordinary(place, members, addresses, *rest)

    monkeypatch.setattr(module, "_connected", connected)
    monkeypatch.setattr(module, "CONNECT_S", 3)
    monkeypatch.setattr(module, "MAX_CALLERS", 8)
    assert on_ranks(2, [0, 1], pass_on) == ["01", "01"]
    assert strangers[2].recv(32) == b"", "who does not know it is not answered either"
    for each in strangers:
        each.close()


def test_a_rank_that_calls_one_that_does_not_answer_looks_around() -> None:
    """It may be stopped, and the system takes calls for it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = [Address("here", (), silent.getsockname()[1], b"secret")] * 2
        began = time.monotonic()
        with pytest.raises(StoppedError):
            module._connected(1, [0, 1], addresses, silent, give_up_after(0.2))
    assert time.monotonic() - began < 5


def test_of_what_nobody_takes_the_system_holds_little() -> None:
    def fill(rank: int, streams: Connections | None, why: str) -> Any:
        assert streams is not None, why
        if rank == 1:
            return ready.wait(20)
        sizes: list[int] = []
        with contextlib.suppress(InterruptedError):
            while len(sizes) < 1 << 10:
                streams.send(1, memoryview(bytes(1 << 14)), give_up)
                sizes.append(1 << 14)
        ready.set()
        return sum(sizes)

    ready = threading.Event()
    assert 0 < on_ranks(2, [0, 1], fill)[0] <= 1 << 20


def give_up_after(seconds: float) -> Callable[[], None]:
    until = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > until:
            raise StoppedError

    return check


def test_where_one_cannot_be_reached_all_of_the_group_hear_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_network", lambda rank: f"machine {rank}")
    monkeypatch.setattr(module, "_hosts", tuple)
    monkeypatch.setattr(module, "CONNECT_S", 0.3)
    found = on_ranks(3, [0, 1], pass_on)
    assert found[0] == found[1] and found[2] == ""
    assert "rank 0: rank(s) [1] have not connected within 0.3 s" in found[0]
    assert "rank 1: rank 0 cannot be reached at port " in found[0]


def test_a_connection_that_ends_is_noticed_after_what_was_sent_before() -> None:
    def end(rank: int, streams: Connections | None, why: str) -> Any:
        assert streams is not None, why
        if rank == 1:
            streams.send(0, memoryview(b"last"), give_up)
            streams.end()
            return None
        word = bytearray(4)
        streams.receive(1, memoryview(word), give_up)
        with pytest.raises(StoppedError, match="the connection to rank 1 was lost"):
            streams.receive(1, memoryview(word), give_up)
        return word

    assert on_ranks(2, [0, 1], end) == [b"last", None]


def test_who_waits_looks_around() -> None:
    def wait(rank: int, streams: Connections | None, why: str) -> Any:
        assert streams is not None, why
        with pytest.raises(InterruptedError):
            streams.receive(rank, memoryview(bytearray(1)), give_up)
        with pytest.raises(InterruptedError):
            streams.send(rank, memoryview(bytes(1 << 26)), give_up)  # more than it holds

    assert on_ranks(2, [0, 1], wait) == [None, None]
