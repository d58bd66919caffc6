"""What errors of ranks say, what allocators' errors name, and sizes and digests as text."""

import errno
import mmap
from collections.abc import Callable

import pytest
import torch

from lowmem_load.errors import MemoryShortageError, RankError, error_text
from lowmem_load.files.memory import naming_shortage
from lowmem_load.text import count, fingerprint, size, spell_ranks


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
    "error", [RuntimeError("no kernel"), OSError(errno.EIO, "x"), RankError("reading", {1: "CUDA out of memory"})]
)
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, naming_shortage("parameter x", 1):
        raise error
    assert caught.value is error


# -- sizes and digests -------------------------------------------------------------------------------------------------


def test_sizes_are_written() -> None:
    assert [size(nbytes) for nbytes in (0, 1023, 1024, 10 << 10, 3 << 29, 5 << 50)] == [
        *("0 B", "1023 B", "1.00 KiB", "10.0 KiB", "1.50 GiB", "5120.0 TiB")
    ]
    assert [count(number) for number in (0, 1234, 8.03e9, 1.5e6, 2e12)] == ["0", "1,234", "8.03 B", "1.50 M", "2.00 T"]


def test_equal_lines_have_equal_digests_in_every_process() -> None:
    expected = "911169ddaaf146af"  # printf 'a\nb\n' | sha256sum
    assert fingerprint(["a", "b"]) == fingerprint(line for line in ("a", "b")) == expected
    assert len({fingerprint(lines) for lines in ([], [""], ["ab"], ["a", "b", ""], ["\ud800"])} | {expected}) == 6


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([0, 2, 3], "0, 2-3"), (range(512), "0-511")]
)
def test_spell_ranks(ranks: list[int], text: str) -> None:
    assert spell_ranks(list(ranks)) == text
