"""What one rank of a node finds out for the others: threads stand for ranks, and share a file in memory."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowmem_load.distributed.node_cache import NodeCache
from lowmem_load.distributed.nodes import make_memory, new_name, open_memory
from lowmem_load.distributed.store_channel import StoppedError


def untroubled() -> None:
    pass


@pytest.fixture
def made() -> Iterator[Callable[..., list[NodeCache]]]:
    """Makes the caches of ranks of one node. Of each: what `check` does, once they have met."""
    caches: list[NodeCache] = []

    def make(*checks: Callable[[], None], pid: int | None = None) -> list[NodeCache]:
        for rank, check in enumerate(checks):
            ranks: Any = SimpleNamespace(rank=rank, is_fake=False, hears_of_failures=True, check=check)
            caches.append(NodeCache(ranks))
        offers = json.loads(json.dumps([cache.offer for cache in caches]))
        if pid is not None:
            offers[0][1] = pid
        for cache in caches:
            assert cache.meet(offers).neighbours == tuple(range(len(checks)))
        return caches

    yield make
    for cache in caches:
        cache.__exit__()


def found(cache: NodeCache, key: str, value: str, *, is_packed: bool = True) -> str:
    return cache.once(key, lambda: value, lambda text: text.encode() * is_packed, bytes.decode)


def taken(cache: NodeCache, *keys: str) -> Callable[[], list[str]]:
    """Begins to take these in a thread; returns what waits for them."""
    results: list[str] = []

    def take() -> None:
        with cache.stage():
            results.extend(found(cache, key, "own") for key in keys)

    waiting = threading.Thread(target=take, daemon=True)
    waiting.start()

    def result() -> list[str]:
        waiting.join(10)
        return results

    return result


def test_the_others_take_what_the_first_has_found(made: Callable[..., list[NodeCache]]) -> None:
    first, second, third = made(untroubled, untroubled, untroubled)
    result = taken(second, "b", "a")
    with first.stage():
        assert found(first, "a", "x" * 100_000) == "x" * 100_000
        assert found(first, "b", "y") == "y"
    assert result() == ["y", "x" * 100_000]
    with third.stage():  # later
        assert found(third, "a", "own") == "x" * 100_000
    assert (first.source, second.source, third.source) == (0, 0, 0)


def test_what_the_first_has_not_found_each_finds_itself(made: Callable[..., list[NodeCache]]) -> None:
    first, second = made(untroubled, untroubled)
    with first.stage(), pytest.raises(ZeroDivisionError):
        first.once("fails", lambda: 1 / 0, repr, float)  # type: ignore[arg-type]
    with first.stage():
        found(first, "b", "of the second stage")
        found(first, "not for others", "x", is_packed=False)
    with second.stage():
        assert found(second, "fails", "own") == "own"
        assert found(second, "b", "own") == "own"
    with second.stage():
        assert found(second, "not for others", "own") == "own"
        assert found(second, "b", "own") == "of the second stage"
    assert found(second, "b", "outside") == "outside"


def test_nobody_waits_for_a_first_rank_that_has_ended() -> None:
    code = "from tests.unit import test_node_cache; test_node_cache.offer_and_wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as first:
        assert first.stdout is not None
        offer = json.loads(first.stdout.readline())
        ranks: Any = SimpleNamespace(rank=1, is_fake=False, hears_of_failures=True, check=untroubled)
        with NodeCache(ranks) as second:
            assert second.meet([offer, second.offer]).first == 0
            assert second.source == 0, "its memory was opened"
            result = taken(second, "a")
            time.sleep(0.1)
            first.kill()
            assert result() == ["own"]


def offer_and_wait() -> None:
    """What the first rank of a node does in a process of its own."""
    ranks: Any = SimpleNamespace(rank=0, is_fake=False, hears_of_failures=True, check=untroubled)
    with NodeCache(ranks) as cache:
        print(json.dumps(cache.offer), flush=True)
        sys.stdin.read()


def test_nobody_waits_for_a_first_rank_that_has_left(made: Callable[..., list[NodeCache]]) -> None:
    """By an error that it has before the stage, of which it goes on: its process stays."""
    first, second = made(untroubled, untroubled)
    result = taken(second, "a")
    time.sleep(0.05)
    first.__exit__()
    assert result() == ["own"]


def test_waiting_ends_when_another_rank_has_failed(made: Callable[..., list[NodeCache]]) -> None:
    def trouble() -> None:
        raise StoppedError("stopped because of rank(s) 0")

    _, second = made(untroubled, trouble)
    with pytest.raises(StoppedError), second.stage():
        found(second, "a", "own")


def test_a_first_rank_that_has_failed_is_no_reason_to_stop(made: Callable[..., list[NodeCache]]) -> None:
    """It ends its stage before it tells of its failure, which is that of the others, too, or else an error."""
    caches: list[NodeCache] = []

    def trouble() -> None:
        with caches[0].stage():  # between two looks
            pass
        raise StoppedError("stopped because of rank(s) 0")

    caches += made(untroubled, trouble)
    with caches[1].stage():
        assert found(caches[1], "a", "own") == "own"


def test_half_a_record_is_not_taken(made: Callable[..., list[NodeCache]]) -> None:
    first, second = made(untroubled, untroubled)
    result = taken(second, "a")
    record = struct.pack("<QQ", 3, 4) + b"1 a" + b"half"
    for byte in record:
        os.write(first.offer[2], bytes([byte]))
        time.sleep(0.005)
    assert result() == ["half"]


def test_a_rank_without_others_makes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", None)
    fake: Any = SimpleNamespace(rank=517, is_fake=True, hears_of_failures=False)
    lone: Any = SimpleNamespace(rank=0, is_fake=False, hears_of_failures=False)
    for ranks, world_size in ((fake, 1024), (lone, 1)):
        with NodeCache(ranks) as alone:
            nodes = alone.meet([alone.offer] * world_size)
            with alone.stage():
                assert found(alone, "a", "own") == "own"
            assert (alone.source, nodes.neighbours) == (ranks.rank, (ranks.rank,))


def test_where_no_memory_can_be_had_each_finds_for_itself(
    made: Callable[..., list[NodeCache]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError("no memory for you")

    monkeypatch.setattr(os, "memfd_create", refuse)
    for cache in made(untroubled, untroubled):
        with cache.stage():
            assert found(cache, "a", "own") == "own"


def test_what_each_rank_offers_is_short(made: Callable[..., list[NodeCache]]) -> None:
    """Each rank is sent the offers of all: at a thousand ranks a hundred bytes each are a hundred million."""
    (cache,) = made(untroubled)
    assert len(json.dumps(cache.offer)) <= 56


def test_a_file_that_lies_where_the_memory_was_is_left_alone(tmp_path: Path) -> None:
    name = new_name()
    with (tmp_path / name).open("w+b") as other, pytest.raises(OSError, match="another file"):
        open_memory(os.getpid(), other.fileno(), name, os.O_RDWR)
    descriptor = make_memory(name)
    try:
        os.close(open_memory(os.getpid(), descriptor, name, os.O_RDWR))
        with pytest.raises(OSError, match="another file"):
            open_memory(os.getpid(), descriptor, new_name(), os.O_RDWR)
    finally:
        os.close(descriptor)
