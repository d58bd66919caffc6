"""Which rank is given up, when, and with what words."""

import time
from typing import Any

import pytest

from lowmem_load.distributed.peers import Entry, Heartbeat, Limits, packed
from lowmem_load.errors import ConfigError
from lowmem_load.phases import computing

HERE = Heartbeat(
    who="pid 4711 on node1",
    step="world/4",
    title="model: reading",
    detail="3.0 of 8.0 MiB read, last from a.safetensors",
)
ENTRY = Entry("reading", payload="[]")
LIMITS = Limits(silence_s=300, gone_s=25, absence_s=1800)


def changed(**changes: Any) -> Heartbeat:
    return HERE._replace(**changes)


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_rank_that_makes_no_progress_gives_itself_up(is_measured: bool) -> None:
    limit_s, origin = (300.0, "LOWMEM_LOAD_SILENCE_S") if is_measured else (1800.0, "the timeout of the process group")
    assert LIMITS.why_stuck(HERE, limit_s, is_measured=is_measured) == ""
    text = LIMITS.why_stuck(HERE, limit_s + 1, is_measured=is_measured)
    assert f"no progress for more than {limit_s:g} s ({origin}), while model: reading, 3.0 of" in text
    assert "(pid 4711 on node1)" in text


@pytest.mark.parametrize("entry", [None, ENTRY])
def test_a_rank_whose_heartbeats_stop_is_lost(entry: Entry | None) -> None:
    beat = changed(entry=entry)
    assert Heartbeat.read(packed(beat)) == beat
    assert LIMITS.why_lost(beat, 25.0, "world/4", 0.0) == ""
    words = LIMITS.why_lost(beat, 25.5, "world/4", 0.0)
    assert "no heartbeat for more than 25 s (LOWMEM_LOAD_GONE_S): its process (pid 4711 on node1)" in words


@pytest.mark.parametrize(
    ("heartbeat", "is_late"),
    [
        (Heartbeat(), True),
        (changed(title=""), True),
        (HERE, False),  # it gives itself up
        (changed(entry=ENTRY), False),  # it waits in the same group
        (changed(step="other/4"), False),
        (changed(step="other/4", entry=ENTRY), True),  # for this rank, perhaps
    ],
)
def test_a_rank_that_has_not_come_is_waited_for_as_long_as_the_group_says(heartbeat: Heartbeat, is_late: bool) -> None:
    assert LIMITS.why_lost(heartbeat, 0.0, "world/4", 1800.0) == ""
    assert ("has not come to this point in 1800 s" in LIMITS.why_lost(heartbeat, 0.0, "world/4", 1801.0)) is is_late


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
