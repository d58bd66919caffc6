"""What errors of ranks say, and that allocators' errors name what the memory was for."""

import errno
import mmap
from collections.abc import Callable

import pytest
import torch

from lowmem_load.errors import MemoryShortageError, RankError, error_text
from lowmem_load.files.memory import naming_shortage


def test_the_failures_of_all_ranks_are_in_the_message_by_rank() -> None:
    failures = {3: "OSError: gone", 0: "ValueError: bad"}
    error = RankError("model: reading", failures)
    assert str(error) == (
        "model: reading failed on 2 rank(s), so it was stopped on all:\nrank 0: ValueError: bad\nrank 3: OSError: gone"
    )
    failures.clear()
    assert error.failures == {0: "ValueError: bad", 3: "OSError: gone"}


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (OSError("0123456"), "OSError: 0123456"),
        (OSError("01234567"), "OSError: 0123456 ..."),
        (Mute(), "Mute (its text cannot be had)"),
    ],
)
def test_an_error_is_spelled_with_its_class_at_a_bounded_length(error: Exception, expected: str) -> None:
    assert error_text(error, 16) == expected


def of_a_device() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")


@pytest.mark.parametrize("fail", [lambda: torch.empty(1 << 60), lambda: mmap.mmap(-1, 1 << 60), of_a_device])
def test_what_failed_is_named(fail: Callable[[], object]) -> None:
    with (
        pytest.raises(MemoryShortageError, match=r"^parameter x: 3\.00 MiB of memory cannot be allocated: .") as caught,
        naming_shortage("the load", 1),
        naming_shortage("parameter x", 3 << 20),
    ):
        fail()
    assert caught.value.__cause__ is not None
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no kernel"), OSError(errno.EIO, "x"), RankError("reading", {1: "CUDA out of memory"})],
)
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, naming_shortage("parameter x", 1):
        raise error
    assert caught.value is error
