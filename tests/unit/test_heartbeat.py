"""Which rank is given up, when, and with what words."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from lowmem_load.distributed.heartbeat import (
    Heartbeat,
    Limits,
    Peer,
    computing,
)
from lowmem_load.distributed.verdict import Entry
from lowmem_load.errors import ConfigError

HERE = Heartbeat(
    num_beats=1,
    who="pid 4711 on node1",
    group="world",
    number=4,
    title="model: reading",
    amount=3,
    detail="3.0 of 8.0 MiB read, last from a.safetensors",
)
ENTRY = Entry("reading", num_parts=1)
LIMITS = Limits(silence_s=300, gone_s=25, absence_s=1800)


class SeenPeer(Peer):
    """Another rank, and when this one looked last."""

    last_s = 0.0

    def look(self, heartbeat: Heartbeat | None, now_s: float) -> None:
        if heartbeat is not None:
            self.note(heartbeat, now_s - self.last_s)
        self.last_s = now_s


def seen(*heartbeats: tuple[float, Heartbeat]) -> SeenPeer:
    """Another rank, of which this one has seen these."""
    peer = SeenPeer()
    for at, heartbeat in heartbeats:
        peer.look(heartbeat, at)
    return peer


def why(peer: SeenPeer, now: float, waited_s: float | None = None, group: str = "world") -> str:
    peer.look(peer.heartbeat, now)
    return peer.why_lost(LIMITS, (group, 4), waited_s)


def changed(heartbeat: Heartbeat, **changes: Any) -> Heartbeat:
    return heartbeat._replace(**changes)


def test_a_heartbeat_survives_the_store() -> None:
    assert Heartbeat.decoded(json.dumps(HERE)) == HERE
    waiting = changed(HERE, entry=ENTRY)
    assert Heartbeat.decoded(json.dumps(waiting)) == waiting


def test_a_rank_that_makes_progress_is_waited_for_however_long_it_takes() -> None:
    peer = seen(*((at, changed(HERE, num_beats=at, amount=at)) for at in range(0, 10_000, 20)))
    assert why(peer, 10_000.0, waited_s=9_000.0) == ""


def test_a_rank_that_makes_no_progress_is_named_with_what_it_did() -> None:
    peer = seen((0.0, HERE), *((float(at), changed(HERE, num_beats=at)) for at in range(1, 301)))
    assert why(peer, 300.0) == ""
    words = why(peer, 300.5)
    for word in ("no progress for more than 300 s", "LOWMEM_LOAD_SILENCE_S", "model: reading", "a.safetensors", "pid"):
        assert word in words


def test_a_rank_that_waits_need_not_make_progress() -> None:
    waiting = [(float(at), changed(HERE, num_beats=at, entry=ENTRY)) for at in range(2000)]
    assert why(seen(*waiting), 2000.0) == ""


@pytest.mark.parametrize("heartbeat", [None, changed(HERE, title="")])
def test_a_rank_that_has_not_come_is_waited_for_as_long_as_the_group_says(heartbeat: Heartbeat | None) -> None:
    peer = seen(*([(0.0, heartbeat)] if heartbeat else []))
    assert why(peer, 1e6) == ""  # nobody waits
    assert why(peer, 1e6, waited_s=1800.0) == ""
    assert "has not come to this point in 1800 s" in why(peer, 1e6, waited_s=1801.0)


def test_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Limits.from_environment(7.0) == Limits(300.0, 25.0, 7.0)
    monkeypatch.setenv("LOWMEM_LOAD_SILENCE_S", "60")
    monkeypatch.setenv("LOWMEM_LOAD_GONE_S", "2.5")
    assert Limits.from_environment(7.0) == Limits(60.0, 2.5, 7.0)
    assert Limits.from_environment(7.0, is_prompt=True) == Limits(60.0, 2.5, 60.0)


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


def test_a_rank_that_waits_in_another_group_is_not_waited_for_for_ever() -> None:
    elsewhere = [(float(at), changed(HERE, num_beats=at, entry=ENTRY, group="other")) for at in range(2000)]
    assert why(seen(*elsewhere), 2000.0, waited_s=1800.0) == ""
    assert "has not come to this point" in why(seen(*elsewhere), 2000.0, waited_s=1801.0)


def test_a_rank_that_waits_with_an_error_in_another_group_is_given_up_soon() -> None:
    """Those that it waits for may wait for this rank."""
    failed = changed(HERE, entry=ENTRY._replace(error="ValueError: no"), group="other")
    beats = [(float(at), changed(failed, num_beats=at)) for at in range(27)]
    assert why(seen(*beats[:-1]), 25.0, waited_s=25.0) == ""
    assert why(seen(*beats), 26.0, waited_s=26.0) == "ValueError: no"


@pytest.mark.parametrize("entry", [None, ENTRY])
def test_a_rank_whose_heartbeats_stop_is_lost(entry: Entry | None) -> None:
    peer = seen((0.0, changed(HERE, entry=entry)))
    assert why(peer, 25.0) == ""
    assert "no heartbeat for more than 25 s (LOWMEM_LOAD_GONE_S): its process (pid 4711 on node1)" in why(peer, 25.5)


@pytest.mark.parametrize("title", ["", "model: finishing"])
def test_a_rank_that_is_past_the_step_is_not_waited_for(title: str) -> None:
    assert "has gone on without the others" in why(seen((0.0, changed(HERE, number=5, title=title))), 0.5)


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
    assert (Peer().is_at(("world", 4)), Peer().absence) == (False, "has not called lowmem_load")
    assert seen((0.0, HERE)).is_at(("world", 4))
    assert seen((0.0, changed(HERE, entry=ENTRY))).entry_at(("world", 4)) == ENTRY
    idle = seen((0.0, changed(HERE, title="")))
    assert (idle.is_at(("world", 4)), idle.absence) == (False, "was last seen between loads (pid 4711 on node1)")
    assert not seen((0.0, HERE)).is_at(("other", 4))
    assert seen((0.0, changed(HERE, entry=ENTRY))).entry_at(("other", 4)) is None
    assert seen((0.0, HERE)).absence.startswith("was last seen while model: reading, 3.0 of")
