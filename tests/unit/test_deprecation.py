"""deprecation.py: a keyword that is gone is accepted once more, with a warning."""

from __future__ import annotations

import inspect

import pytest

import lowmem_load
from lowmem_load.deprecation import without_progress


@pytest.mark.parametrize(
    "name", ["load_model", "load_into", "streaming", "install", "save_model", "load_checkpoint", "consolidate"]
)
def test_functions_that_had_progress_ignore_it_and_say_what_to_set(name: str) -> None:
    function = getattr(lowmem_load, name)
    assert "progress" not in inspect.signature(function).parameters
    assert function.__code__ is without_progress(int).__code__


def test_the_warning_names_the_function_and_the_caller() -> None:
    def double(number: int) -> int:
        return 2 * number

    with pytest.warns(FutureWarning, match="double: progress= is ignored. Set LOWMEM_LOAD_PROGRESS") as caught:
        assert without_progress(double)(2, progress=True) == 4
    assert caught[0].filename == __file__
