"""The tree of errors is the one that the docstring draws."""

from __future__ import annotations

import builtins
import inspect
import re

import pytest

from lowmem_load import errors
from lowmem_load.errors import LowMemLoadError, RankError, error_text


def drawn() -> dict[str, tuple[str | None, str | None]]:
    """Of each error in the docstring: the one above it and the builtin on its line, or on the next where it goes on."""
    assert errors.__doc__ is not None
    found: dict[str, tuple[str | None, str | None]] = {}
    above: list[str] = []
    for line in errors.__doc__.splitlines():
        builtin = re.search(r"\((\w+)\)$", line)
        entry = re.match(r"^    ((?:\|   |    )*(?:[|`]-- )?)([A-Z]\w+)(?:$|\s)", line)
        if entry:
            depth, name = len(entry[1]) // 4, entry[2]
            above = [*above[:depth], name]
            found[name] = (above[-2] if depth else None, None)
        if builtin and above:
            found[above[-1]] = (found[above[-1]][0], builtin[1])
    return found


def classes() -> dict[str, type[BaseException]]:
    found = inspect.getmembers(errors, inspect.isclass)
    return {name: cls for name, cls in found if issubclass(cls, LowMemLoadError)}


def test_every_error_is_drawn() -> None:
    assert drawn().keys() == classes().keys()
    assert len(drawn()) == 11


@pytest.mark.parametrize("name", sorted(classes()))
def test_an_error_derives_from_what_the_tree_shows(name: str) -> None:
    above, builtin = drawn()[name]
    bases = [base.__name__ for base in classes()[name].__bases__]
    assert bases == [base for base in (above or "Exception", builtin) if base]
    if builtin:
        assert issubclass(classes()[name], getattr(builtins, builtin))


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
