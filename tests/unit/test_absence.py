"""What waiting ranks say of those that have not come."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lowmem_load.distributed import absence, store_channel
from tests.unit.test_store_channel import Ranks, failed, step


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has ranks say it after 0.2 s, 0.4 s, ..."""
    monkeypatch.setattr(absence, "NOTICE_S", 0.2)
    monkeypatch.setattr(store_channel, "NOTICE_S", 0.2)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("late", [[1, 2], [0], [0, 2]])
def test_waiting_ranks_say_who_has_not_come_and_to_what(late: list[int], capsys: Any) -> None:
    def work(channel: Any, group: Any, rank: int) -> Any:
        if rank in late:
            time.sleep(1.2)
        return step(channel, group, "tiny: reading")

    ranks = Ranks(3)
    ranks.step()
    assert all(not failed(verdict) for verdict in ranks.all(work))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lowmem_load: ")]
    names = "rank(s) 0 (" if 0 in late else "rank(s) 1-2 ("  # rank 0 says it of all ranks, the others of rank 0
    for rank in {0, 1, 2} - {*late}:
        own = [line for line in lines if line.startswith(f"lowmem_load: rank {rank} has waited ")]
        assert 2 <= len(own) <= 3, "at growing intervals"
        assert all(" s at 'tiny: reading' for " in line and "was last seen between loads (pid " in line for line in own)
        assert all(names in line for line in own), own
    assert not any(f"rank {rank} has waited" in line for rank in late for line in lines)


@pytest.mark.usefixtures("soon")
def test_nothing_is_said_of_slow_ranks_that_are_in_the_step(capsys: Any) -> None:
    def work(channel: Any, group: Any, rank: int) -> Any:
        with channel.doing(group, "reading"):
            time.sleep(0.8 * rank)
            return step(channel, group)

    assert all(not failed(verdict) for verdict in Ranks(2).all(work))
    assert capsys.readouterr().err == ""
