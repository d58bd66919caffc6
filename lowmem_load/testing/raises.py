"""Expecting an error, without pytest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def raises(kind: type[Exception], naming: str) -> Iterator[None]:
    """Assert that the block raises an error of `kind` whose message has `naming` in it."""
    caught: Exception | None = None
    try:
        yield
    except kind as error:
        caught = error
    assert caught is not None, f"no {kind.__name__} was raised"
    assert naming in str(caught)
