"""What errors of ranks say."""

import pytest

from lowmem_load.errors import RankError, error_text


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
