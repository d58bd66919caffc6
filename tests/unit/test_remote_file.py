"""Requests of files in remote stores: what is made again, how often, and how many at a time."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lowmem_load.errors import CheckpointError, TruncatedFileError
from lowmem_load.files import remote_file
from lowmem_load.files.executor import Executor
from lowmem_load.files.remote_file import (
    MAX_IN_FLIGHT,
    MIN_IN_FLIGHT,
    Counts,
    RemoteFile,
    Traffic,
    TransientError,
    requests_in_flight,
)
from lowmem_load.files.source import read_bytes

CONTENT = bytes(range(256)) * 16

pytestmark = pytest.mark.usefixtures("traffic")


class Memory:
    """A `RemoteObject` in memory, whose first requests fail."""

    name, nbytes, version = "s3://bucket/file", len(CONTENT), '"1"'

    def __init__(self, *errors: Exception, act: Callable[[], object] = int) -> None:
        self.asked: list[tuple[int, int]] = []
        self.at_s: list[float] = []
        self._errors, self._act = list(errors), act

    def fetch(self, offset: int, memory: memoryview, check: Callable[[], object]) -> None:
        self.asked.append((offset, memory.nbytes))
        self.at_s.append(time.monotonic())
        self._act()
        check()
        if self._errors:
            raise self._errors.pop(0)
        memory[:] = CONTENT[offset : offset + memory.nbytes]


# -- reading -----------------------------------------------------------------------------------------------------------


def test_a_file_is_read_by_requests_of_limited_size(monkeypatch: pytest.MonkeyPatch, traffic: Traffic) -> None:
    monkeypatch.setattr(remote_file, "REQUEST_BYTES", 100)
    item = Memory()
    assert read_bytes(RemoteFile(item), 10, 250) == CONTENT[10:260]
    assert item.asked == [(10, 100), (110, 100), (210, 50)]
    assert traffic.counts == Counts(num_requests=3, received_bytes=250)


def test_the_first_bytes_are_not_asked_for_again(traffic: Traffic) -> None:
    item = Memory()
    source = RemoteFile(item, CONTENT[:100])
    assert read_bytes(source, 0, 100) == CONTENT[:100]
    assert read_bytes(source, 99, 1) == CONTENT[99:100]
    assert (item.asked, traffic.counts) == ([], Counts())
    assert read_bytes(source, 99, 2) == CONTENT[99:101]
    assert item.asked == [(99, 2)]


def test_nothing_beyond_the_end_is_asked_for() -> None:
    item = Memory()
    with pytest.raises(TruncatedFileError, match=r"s3://bucket/file: ended at byte 4096 \(4 short\)"):
        RemoteFile(item).read_into(4000, memoryview(bytearray(100)))
    RemoteFile(item).read_into(0, memoryview(bytearray()))
    assert item.asked == []


def wait(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have requests wait for so long before another attempt."""
    monkeypatch.setattr("random.uniform", lambda *_: seconds)


# -- again -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [CheckpointError("was replaced"), RuntimeError("a defect")])
def test_what_does_not_pass_is_asked_for_once(error: Exception, traffic: Traffic) -> None:
    item = Memory(error)
    with pytest.raises(type(error), match=str(error)):
        read_bytes(RemoteFile(item), 0, 8)
    assert (len(item.asked), traffic.counts) == (1, Counts(num_requests=1))


def test_a_wait_beyond_patience_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    wait(monkeypatch, 6)
    monkeypatch.setattr(remote_file, "PATIENCE_S", 5)
    began_s = time.monotonic()
    with pytest.raises(CheckpointError, match=r"x \(1 attempts in 0 s\)"):
        read_bytes(RemoteFile(Memory(TransientError("x"))), 0, 8)
    assert time.monotonic() - began_s < 5


def test_who_is_told_to_slow_down_has_more_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_file, "PATIENCE_S", 0.05)
    monkeypatch.setattr(remote_file, "THROTTLED_PATIENCE_S", 5)
    wait(monkeypatch, 0.2)
    assert read_bytes(RemoteFile(Memory(TransientError("x", is_throttled=True))), 0, 8) == CONTENT[:8]
    with pytest.raises(CheckpointError):
        read_bytes(RemoteFile(Memory(TransientError("x"))), 0, 8)


# -- at a time ---------------------------------------------------------------------------------------------------------


def test_slow_down_halves_the_requests_in_flight(traffic: Traffic) -> None:
    for expected in (8, 4, 2, 1, 1):
        read_bytes(RemoteFile(Memory(TransientError("x", is_throttled=True))), 0, 8)
        assert expected <= traffic.limit <= expected + 1  # and the success has added a little
        traffic.limit = expected
    for _ in range(MAX_IN_FLIGHT**2):
        read_bytes(RemoteFile(Memory()), 0, 8)
    assert traffic.limit == MAX_IN_FLIGHT


@pytest.mark.parametrize("limit", [1, 3])
def test_there_are_never_more_requests_than_the_limit(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_flight, most, lock = 0, 0, threading.Lock()

    def act() -> None:
        nonlocal in_flight, most
        with lock:
            in_flight += 1
            most = max(most, in_flight)
        time.sleep(0.02)
        with lock:
            in_flight -= 1

    monkeypatch.setattr(remote_file, "TRAFFIC", Traffic(limit))
    source = RemoteFile(Memory(act=act))
    with ThreadPoolExecutor(2 * MAX_IN_FLIGHT) as pool:
        list(pool.map(lambda number: read_bytes(source, number, 8), range(2 * MAX_IN_FLIGHT)))
    assert most == limit


def test_ranks_of_a_node_share_its_requests() -> None:
    assert [requests_in_flight(ranks) for ranks in (1, 4, 8, 16, 64)] == [
        MAX_IN_FLIGHT,
        MAX_IN_FLIGHT,
        8,
        MIN_IN_FLIGHT,
        MIN_IN_FLIGHT,
    ]


# -- an end to it ------------------------------------------------------------------------------------------------------


def test_closing_a_file_ends_the_wait_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    wait(monkeypatch, 15)
    source = RemoteFile(Memory(TransientError("x")))
    timer = threading.Timer(0.2, source.close)
    timer.start()
    began_s = time.monotonic()
    with pytest.raises(CheckpointError, match="was closed while it was read"):
        read_bytes(source, 0, 8)
    assert time.monotonic() - began_s < 5
    timer.join()
    source.close()  # again
    with pytest.raises(CheckpointError, match="was closed"):
        read_bytes(source, 0, 8)


@pytest.mark.parametrize("wait_s", [0.0, 15.0])
def test_an_interrupt_ends_a_load_from_a_store_that_does_not_answer(
    wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it waits for the answer, or before another attempt."""
    wait(monkeypatch, wait_s)
    released = threading.Event()
    item = Memory(TransientError("x"), act=lambda: wait_s or released.wait(15))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    began_s = time.monotonic()

    def load() -> None:
        with Executor(num_threads=4, open_source=lambda path: RemoteFile(item)) as executor:
            timer.start()
            executor.tasks.run(lambda: executor.read_range("path", 0, torch.empty(8, dtype=torch.uint8), "'w'"))
            executor.finish()

    try:
        with pytest.raises(KeyboardInterrupt):
            load()
        assert 0.2 < time.monotonic() - began_s < 5  # and not 15
    finally:
        released.set()
        timer.join()
