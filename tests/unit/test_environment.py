"""Variables of the environment that say which rank this is; `test_process_group.py` has what is made of them."""

import os
from datetime import timedelta

import pytest

from lowmem_load.distributed import environment
from lowmem_load.errors import ConfigError


def test_launcher_variable_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "one")
    with pytest.raises(ConfigError, match="LOCAL_RANK: the environment has 'one', expected an integer"):
        environment.integer("LOCAL_RANK")


def test_default_timeout_is_thirty_minutes_or_what_deepspeed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPSPEED_TIMEOUT", raising=False)
    assert environment.default_timeout() == timedelta(minutes=30)
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "120")
    assert environment.default_timeout() == timedelta(minutes=120)


def test_what_was_set_here_is_removed_unless_somebody_has_changed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THERE", "1")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("CHANGED", "")
    added = environment.set_missing({"THERE": "2", "EMPTY": "3", "CHANGED": "4"})
    assert (os.environ["THERE"], added) == ("1", {"EMPTY": "3", "CHANGED": "4"})
    os.environ["CHANGED"] = "5"
    environment.unset(added)
    assert ("EMPTY" in os.environ, os.environ["CHANGED"]) == (False, "5")


@pytest.mark.parametrize(
    ("allowed", "local_ranks", "cores"),
    [
        (64, 8, 8),  # no mask
        (8, 8, 8),  # bound by the launcher, each to its own
        (16, 8, 2),  # a container's, for all of its ranks
        (4, 8, 4),
        (2, 64, 1),
        (64, 1, 64),
    ],
)
def test_cores_of_a_rank(monkeypatch: pytest.MonkeyPatch, allowed: int, local_ranks: int, cores: int) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)))
    assert environment.cores(local_ranks) == cores
