"""Which rank is given up, when, and with what words."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import platform
import time
from typing import Any

import pytest

from lowmem_load.errors import ConfigError
from lowmem_load.ranks import life
from lowmem_load.ranks.life import (
    ANY_LINE,
    BUSY,
    IDLE,
    WAITING,
    LifeSign,
    Limits,
    Position,
    Sighting,
    computing,
    machine,
    pid_space,
    started,
)

HERE = LifeSign(
    *(
        1,
        BUSY,
        "model: reading",
        "3.0 of 8.0 MiB read, last from a.safetensors",
        "0 3",
        True,
        "world",
        4,
        0,
        "",
        "5e55",
    ),
    *(pid_space(), os.getpid(), started(os.getpid()), "node1"),
)
ELSEWHERE = dataclasses.replace(HERE, pid_space="another machine")
LIMITS = Limits(silence_s=300, gone_s=15, absence_s=1800)
POSITION = Position("world", "5e55", 4, {})


def seen(*signs: tuple[float, LifeSign]) -> Sighting:
    sighting = Sighting()
    for at, sign in signs:
        sighting.note(sign, at)
    return sighting


def trouble(sighting: Sighting, now: float, waited_s: float | None = None, position: Position = POSITION) -> str:
    return sighting.trouble(now, LIMITS, waited_s, position)


def changed(sign: LifeSign, **changes: Any) -> LifeSign:
    return dataclasses.replace(sign, **changes)


def test_a_sign_survives_the_store() -> None:
    assert LifeSign.decoded(HERE.encoded().encode()) == HERE


def test_a_rank_that_gets_on_is_waited_for_however_long_it_takes() -> None:
    sighting = seen(*((at, changed(HERE, count=at, mark=f"0 {at}")) for at in range(0, 100_000, 250)))
    assert trouble(sighting, 100_000.0, waited_s=99_000.0) == ""


def test_a_rank_that_does_not_get_on_is_named_with_what_it_did() -> None:
    sighting = seen((0.0, HERE), *((float(at), changed(HERE, count=at)) for at in range(1, 301)))
    assert trouble(sighting, 300.0) == ""
    words = trouble(sighting, 300.5)
    for word in ("no progress for more than 300 s", "LOWMEM_LOAD_SILENCE_S", "model: reading", "a.safetensors", "pid"):
        assert word in words


def test_a_rank_that_waits_need_not_get_on() -> None:
    waiting = [(float(at), changed(HERE, count=at, state=WAITING)) for at in range(2000)]
    assert trouble(seen(*waiting), 2000.0) == ""


def test_a_stopped_process_here_gets_the_longer_limit_and_one_elsewhere_the_shorter() -> None:
    assert trouble(seen((0.0, HERE)), 16.0) == ""
    assert "no life sign for more than 15 s" in trouble(seen((0.0, ELSEWHERE)), 16.0)
    assert trouble(seen((0.0, ELSEWHERE)), 14.0) == ""
    assert "no progress" in trouble(seen((0.0, changed(HERE, state=WAITING))), 301.0)


def test_a_process_that_has_ended_is_known_at_once() -> None:
    ended = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    ended.start()
    assert ended.pid is not None
    sign = changed(HERE, pid=ended.pid, started=started(ended.pid))
    assert trouble(seen((0.0, sign)), 0.5) == ""
    ended.kill()
    deadline = time.monotonic() + 10
    while not trouble(seen((0.0, sign)), 0.5) and time.monotonic() < deadline:
        time.sleep(0.01)  # not joined: a zombie has ended, too
    assert "has ended, while model: reading" in trouble(seen((0.0, sign)), 0.5)
    ended.join()
    assert "has ended" in trouble(seen((0.0, sign)), 0.5)


def test_a_number_that_another_process_has_now_is_not_the_old_one() -> None:
    assert "has ended" in trouble(seen((0.0, changed(HERE, started="1"))), 0.5)


def test_where_boots_are_not_told_apart_no_process_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pid_space().startswith(machine())
    monkeypatch.setattr(life, "_boot_id", lambda: "")
    assert (pid_space.__wrapped__(), machine()) == ("", platform.node())
    assert changed(HERE, pid_space="").has_ended is None


@pytest.mark.parametrize("sign", [None, changed(HERE, state=IDLE)])
def test_a_rank_that_has_not_come_is_waited_for_as_long_as_the_group_says(sign: LifeSign | None) -> None:
    sighting = seen(*([(0.0, sign)] if sign else []))
    assert trouble(sighting, 1e6) == ""  # nobody waits
    assert trouble(sighting, 1e6, waited_s=1800.0) == ""
    assert "has not come to this point in 1800 s" in trouble(sighting, 1e6, waited_s=1801.0)


def test_a_rank_that_went_away_is_named_to_those_who_wait_and_have_not_done_so_as_often() -> None:
    left = changed(HERE, state=IDLE, leaves=2, left="left streaming(): ValueError: no")
    assert trouble(seen((0.0, left)), 1.0) == ""
    assert trouble(seen((0.0, left)), 1.0, 0.5) == left.left
    assert trouble(seen((0.0, left)), 1.0, 0.5, Position("world", "5e55", 4, {"world": 2})) == ""
    assert trouble(seen((0.0, left)), 1.0, 0.5, Position("other", "e1e5", 4, {})) == ""
    of_any = changed(left, line=ANY_LINE)
    assert trouble(seen((0.0, of_any)), 1.0, 0.5, Position("other", "e1e5", 4, {})) == left.left
    assert trouble(seen((0.0, changed(left, state=BUSY))), 1.0, 0.5) == ""  # it came after all


def test_a_rank_that_went_on_without_the_others_is_out_of_step() -> None:
    ahead = changed(HERE, number=5)
    assert "not in step" in trouble(seen((0.0, ahead)), 1.0, 0.5)
    assert trouble(seen((0.0, ahead)), 1.0) == ""
    assert trouble(seen((0.0, changed(ahead, line="other"))), 1.0, 0.5) == ""
    assert trouble(seen((0.0, changed(ahead, session="of an earlier group"))), 1.0, 0.5) == ""


def test_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Limits.from_environment(7.0) == Limits(300.0, 15.0, 7.0)
    monkeypatch.setenv("LOWMEM_LOAD_SILENCE_S", "60")
    monkeypatch.setenv("LOWMEM_LOAD_GONE_S", "2.5")
    assert Limits.from_environment(7.0) == Limits(60.0, 2.5, 7.0)


@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan", "inf"])
def test_limits_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LOWMEM_LOAD_GONE_S", text)
    with pytest.raises(ConfigError, match="LOWMEM_LOAD_GONE_S"):
        Limits.from_environment(1.0)


def test_of_a_step_that_says_nothing_the_groups_timeout_counts() -> None:
    signs = [(float(at), changed(HERE, count=at, is_measured=False)) for at in range(1801)]
    assert trouble(seen(*signs), 1800.0) == ""
    assert "more than 1800 s (the timeout of the process group)" in trouble(
        seen(*signs, (1801.0, changed(HERE, count=-1, is_measured=False))), 1801.5
    )
    stopped = seen((0.0, changed(HERE, is_measured=False)))
    assert trouble(stopped, 300.0) == ""
    assert "more than 300 s (LOWMEM_LOAD_SILENCE_S)" in trouble(stopped, 300.5)


def test_a_rank_that_waits_in_another_group_is_not_waited_for_for_ever() -> None:
    elsewhere = [(float(at), changed(HERE, count=at, state=WAITING, line="other")) for at in range(2000)]
    assert trouble(seen(*elsewhere), 2000.0, waited_s=1800.0) == ""
    assert "has not come to this point" in trouble(seen(*elsewhere), 2000.0, waited_s=1801.0)


def test_computing_counts_as_progress_and_sleeping_does_not() -> None:
    progress = computing()
    before = progress().amount
    time.sleep(0.3)
    assert progress().amount == before
    until = time.thread_time() + 0.3
    while time.thread_time() < until:
        pass
    assert progress().amount > before
