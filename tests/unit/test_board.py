"""What one rank of a node finds out for the others: threads stand for ranks, and share a file in memory."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowmem_load.ranks.board import _SIZES, Board, board
from lowmem_load.ranks.group import StoppedError
from lowmem_load.ranks.nodes import Nodes
from lowmem_load.ranks.shared_memory import make_memory, new_name, open_memory

NODES = ("a", "b", "b", "b")  # rank 1 is the first of its node


def untroubled() -> None:
    pass


@pytest.fixture
def made() -> Iterator[Callable[..., Board]]:
    memory = os.memfd_create("test")
    boards: list[Board] = []

    def make(rank: int, *, check: Callable[[], None] = untroubled, pid: int | None = None) -> Board:
        ranks: Any = SimpleNamespace(watch=lambda: check)
        boards.append(Board(ranks, Nodes(rank, NODES), os.dup(memory), os.getpid() if pid is None else pid))
        return boards[-1]

    yield make
    for each in boards:
        each.close()
    os.close(memory)


def found(board: Board, key: str, value: str, *, is_packed: bool = True) -> str:
    return board.once(key, lambda: value, lambda text: text.encode() * is_packed, bytes.decode)


def test_the_others_take_what_the_first_has_found(made: Callable[..., Board]) -> None:
    first, second, third = (made(rank) for rank in (1, 2, 3))
    taken: list[str] = []

    def take() -> None:
        with second.stage():
            taken.extend(found(second, key, "own") for key in ("b", "a"))

    waiting = threading.Thread(target=take)
    waiting.start()
    with first.stage():
        assert found(first, "a", "x" * 100_000) == "x" * 100_000
        assert found(first, "b", "y") == "y"
    waiting.join(10)
    assert taken == ["y", "x" * 100_000]
    with third.stage():  # later
        assert found(third, "a", "own") == "x" * 100_000
    assert (first.source, second.source, third.source) == (1, 1, 1)


def test_what_the_first_has_not_found_each_finds_itself(made: Callable[..., Board]) -> None:
    first, second = made(1), made(2)
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


def test_nobody_waits_for_a_first_rank_that_has_ended(made: Callable[..., Board]) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    second = made(2, pid=ended.pid)
    with second.stage():
        assert found(second, "a", "own") == "own"


def test_nobody_waits_for_a_first_rank_that_has_left(made: Callable[..., Board]) -> None:
    """By an error that it has before the stage, of which it goes on: its process stays."""
    first, second = made(1), made(2)
    taken: list[str] = []

    def take() -> None:
        with second.stage():
            taken.append(found(second, "a", "own"))

    waiting = threading.Thread(target=take, daemon=True)
    waiting.start()
    time.sleep(0.05)
    first.close()
    waiting.join(10)
    assert taken == ["own"]


def test_waiting_ends_when_another_rank_is_in_trouble(made: Callable[..., Board]) -> None:
    def trouble() -> None:
        raise StoppedError("stopped because of rank(s) 0")

    second = made(2, check=trouble)
    with pytest.raises(StoppedError), second.stage():
        found(second, "a", "own")


def test_a_first_rank_that_has_failed_is_no_reason_to_stop(made: Callable[..., Board]) -> None:
    """It ends its stage before it tells of its failure, which is that of the others, too, or else an error."""
    first = made(1)

    def trouble() -> None:
        with first.stage():  # between two looks
            pass
        raise StoppedError("stopped because of rank(s) 1")

    second = made(2, check=trouble)
    with second.stage():
        assert found(second, "a", "own") == "own"


def test_half_a_record_is_not_taken(made: Callable[..., Board]) -> None:
    second = made(2)
    record = _SIZES.pack(3, 4) + b"1 a" + b"half"
    for end in range(len(record)):
        os.pwrite(second._descriptor, record[end - 1 : end], max(0, end - 1))
        second._look()
        assert not second._places
    os.pwrite(second._descriptor, record[-1:], len(record) - 1)
    with second.stage():
        assert found(second, "a", "own") == "half"


def test_a_rank_without_others_makes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", None)
    fake = SimpleNamespace(rank=517, world_size=1024, is_fake=True, all_gather_object=lambda mine: [mine] * 1024)
    for ranks in (fake, Alone()):
        with board(ranks, "this") as (alone, nodes, said), alone.stage():  # type: ignore[arg-type]
            assert found(alone, "a", "own") == "own"
            assert alone.source == nodes.rank
            assert said[0] == "this"


def test_where_no_memory_can_be_had_each_finds_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError("no memory for you")

    monkeypatch.setattr(os, "memfd_create", refuse)
    ranks: Any = SimpleNamespace(
        rank=1, world_size=2, is_fake=False, all_gather_object=lambda mine: [("node", (1, -1, "", "first")), mine]
    )
    with board(ranks, "second") as (alone, _, said), alone.stage():
        assert found(alone, "a", "own") == "own"
        assert said == ["first", "second"]


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


class Alone:
    rank, world_size, is_fake = 0, 1, False

    def all_gather_object(self, said: Any) -> list[Any]:
        return [said]
