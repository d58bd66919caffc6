"""Which rank is given up, when, and with what words."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import time
from typing import Any

import pytest

from lowmem_load.distributed import nodes
from lowmem_load.distributed.heartbeat import (
    Heartbeat,
    Limits,
    Peer,
    computing,
)
from lowmem_load.distributed.nodes import machine, pid_space, start_time
from lowmem_load.distributed.verdict import Entry
from lowmem_load.errors import ConfigError

HERE = Heartbeat(
    *(1, "model: reading", "3.0 of 8.0 MiB read, last from a.safetensors", 3, "world", 4, None, []),
    *(pid_space(), os.getpid(), start_time(os.getpid()) or "", "node1"),
)
ELSEWHERE = HERE._replace(pid_space="another machine")
ENTRY = Entry("model: reading", payload=[1])
LIMITS = Limits(silence_s=300, gone_s=11, absence_s=1800)


def seen(*heartbeats: tuple[float, Heartbeat]) -> Peer:
    """Another rank, of which this one has seen these; it looked at its process each time."""
    peer = Peer()
    for at, heartbeat in heartbeats:
        peer.note(heartbeat, at)
        peer.has_ended()
    return peer


def why(peer: Peer, now: float, waited_s: float | None = None, group: str = "world") -> str:
    return peer.why_lost(LIMITS, group, now, waited_s)


def changed(heartbeat: Heartbeat, **changes: Any) -> Heartbeat:
    return heartbeat._replace(**changes)


def test_a_heartbeat_survives_the_store() -> None:
    assert Heartbeat.decoded(json.dumps(HERE)) == HERE
    waiting = changed(HERE, entry=ENTRY)
    assert Heartbeat.decoded(json.dumps(waiting)) == waiting


def test_a_heartbeat_that_comes_late_is_old_news() -> None:
    peer = seen((0.0, changed(HERE, num_beats=7)), (1.0, changed(HERE, num_beats=6, entry=ENTRY)))
    found = peer.seen_in("world", 4)
    assert found is not None
    assert found.entry is None


def test_a_rank_that_makes_progress_is_waited_for_however_long_it_takes() -> None:
    peer = seen(*((at, changed(HERE, num_beats=at, amount=at)) for at in range(0, 100_000, 250)))
    assert why(peer, 100_000.0, waited_s=99_000.0) == ""


def test_a_rank_that_makes_no_progress_is_named_with_what_it_did() -> None:
    peer = seen((0.0, HERE), *((float(at), changed(HERE, num_beats=at)) for at in range(1, 301)))
    assert why(peer, 300.0) == ""
    words = why(peer, 300.5)
    for word in ("no progress for more than 300 s", "LOWMEM_LOAD_SILENCE_S", "model: reading", "a.safetensors", "pid"):
        assert word in words


def test_a_rank_that_waits_need_not_make_progress() -> None:
    waiting = [(float(at), changed(HERE, num_beats=at, entry=ENTRY)) for at in range(2000)]
    assert why(seen(*waiting), 2000.0) == ""


def test_a_process_here_that_lives_is_silent_and_never_gone() -> None:
    """Its heartbeats may wait for the interpreter's lock, or all of it is stopped."""
    assert why(seen((0.0, HERE)), 299.0) == ""
    assert "no progress for more than 300 s" in why(seen((0.0, HERE)), 301.0)
    assert "no progress" in why(seen((0.0, changed(HERE, entry=ENTRY))), 301.0)


def test_a_process_elsewhere_is_gone_when_its_heartbeats_stop_and_later_if_it_was_busy() -> None:
    assert why(seen((0.0, ELSEWHERE)), 16.0) == ""
    assert "no heartbeat for more than 16.5 s (LOWMEM_LOAD_GONE_S)" in why(seen((0.0, ELSEWHERE)), 17.0)
    waiting = seen((0.0, changed(ELSEWHERE, entry=ENTRY)))
    assert why(waiting, 11.0) == ""
    assert "no heartbeat for more than 11 s" in why(waiting, 11.5)


def ended_process() -> tuple[Heartbeat, Any]:
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    assert process.pid is not None
    return changed(HERE, pid=process.pid, started=start_time(process.pid)), process


def test_a_process_that_has_ended_is_known_at_once() -> None:
    heartbeat, process = ended_process()
    peer = seen((0.0, heartbeat))
    assert why(peer, 0.5) == ""
    process.kill()
    deadline = time.monotonic() + 10
    while not why(peer, 0.5) and time.monotonic() < deadline:
        time.sleep(0.01)  # not joined: a zombie has ended, too
    assert "has ended, while model: reading" in why(peer, 0.5)
    process.join()
    assert "has ended" in why(peer, 0.5)
    assert why(peer, 0.5).startswith(f"{peer.why_ended()}, while "), "ranks that lose the store with it say the same"


def test_a_process_that_ends_at_once_is_known_if_it_was_heard_of_before() -> None:
    heartbeat, process = ended_process()
    peer = Peer()
    peer.note(heartbeat, 0.0)
    process.kill()
    process.join()
    assert "has ended" in why(peer, 0.1)


def test_a_look_is_trusted_only_after_it_found_that_process() -> None:
    """Clones of one virtual machine have equal boot ids, and each other's process numbers are others or none there."""
    of_a_clone = changed(HERE, started="1")
    assert why(seen((0.0, of_a_clone)), 0.5) == ""
    assert "no heartbeat" in why(seen((0.0, of_a_clone)), 17.0)
    heartbeat, process = ended_process()
    process.kill()
    process.join()
    assert why(seen((0.0, heartbeat)), 0.5) == ""
    again = seen((0.0, HERE), (1.0, of_a_clone))  # what was found was another process
    assert why(again, 1.5) == ""


def test_where_boots_are_not_told_apart_no_process_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pid_space().startswith(machine())
    monkeypatch.setattr(nodes, "boot_id", lambda: "")
    assert (pid_space.__wrapped__(), machine()) == ("", platform.node())
    assert seen((0.0, changed(HERE, pid_space=""))).has_ended() is None


@pytest.mark.parametrize("heartbeat", [None, changed(HERE, title="")])
def test_a_rank_that_has_not_come_is_waited_for_as_long_as_the_group_says(heartbeat: Heartbeat | None) -> None:
    peer = seen(*([(0.0, heartbeat)] if heartbeat else []))
    assert why(peer, 1e6) == ""  # nobody waits
    assert why(peer, 1e6, waited_s=1800.0) == ""
    assert "has not come to this point in 1800 s" in why(peer, 1e6, waited_s=1801.0)


def test_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Limits.from_environment(7.0) == Limits(300.0, 11.0, 7.0)
    monkeypatch.setenv("LOWMEM_LOAD_SILENCE_S", "60")
    monkeypatch.setenv("LOWMEM_LOAD_GONE_S", "2.5")
    assert Limits.from_environment(7.0) == Limits(60.0, 2.5, 7.0)


@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan", "inf"])
def test_limits_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LOWMEM_LOAD_GONE_S", text)
    with pytest.raises(ConfigError, match="LOWMEM_LOAD_GONE_S"):
        Limits.from_environment(1.0)


def test_of_a_step_that_says_nothing_the_groups_timeout_counts() -> None:
    beats = [(float(at), changed(HERE, num_beats=at, amount=None)) for at in range(1801)]
    assert why(seen(*beats), 1800.0) == ""
    beats.append((1801.0, changed(HERE, num_beats=1801, amount=None)))
    assert "more than 1800 s (the timeout of the process group)" in why(seen(*beats), 1801.5)
    stopped = seen((0.0, changed(HERE, amount=None)))
    assert why(stopped, 300.0) == ""
    assert "more than 300 s (LOWMEM_LOAD_SILENCE_S)" in why(stopped, 300.5)


def test_a_rank_that_waits_in_another_group_is_not_waited_for_for_ever() -> None:
    elsewhere = [(float(at), changed(HERE, num_beats=at, entry=ENTRY, group="other")) for at in range(2000)]
    assert why(seen(*elsewhere), 2000.0, waited_s=1800.0) == ""
    assert "has not come to this point" in why(seen(*elsewhere), 2000.0, waited_s=1801.0)


def test_computing_counts_as_progress_and_sleeping_does_not() -> None:
    progress = computing()  # in units of 100 ms, so a moment of computing may complete one that had begun
    before = progress().amount
    time.sleep(0.3)
    slept = progress().amount
    assert slept <= before + 1
    until = time.thread_time() + 0.3
    while time.thread_time() < until:
        pass
    assert progress().amount >= slept + 2


def test_of_a_rank_that_is_not_in_the_step_it_is_known_what_it_does() -> None:
    assert Peer().absence("world", 4) == "has not called lowmem_load"
    assert seen((0.0, HERE)).absence("world", 4) == ""
    assert seen((0.0, changed(HERE, entry=ENTRY))).absence("world", 4) == ""
    pid = os.getpid()
    assert (
        seen((0.0, changed(HERE, title=""))).absence("world", 4) == f"was last seen between loads (pid {pid} on node1)"
    )
    assert seen((0.0, HERE)).absence("other", 4).startswith("was last seen while model: reading, 3.0 of")


def test_a_rank_of_another_machine_that_ended_while_it_waited_in_another_group_is_named_at_once() -> None:
    waiting = seen((0.0, changed(ELSEWHERE, entry=ENTRY, group="other")))
    assert why(waiting, 11.0, waited_s=11.0) == ""
    assert "no heartbeat for more than 11 s" in why(waiting, 11.5, waited_s=11.5)
