"""The benchmark's command line."""

from __future__ import annotations

from pathlib import Path

from benchmarks.compare import parse_arguments


def test_each_state_of_memory_and_page_cache_has_the_same_loads() -> None:
    options = ["--preset", "llama-1.5b", "--ranks", "1", "2", "--repeats", "3", "--once", "stock", "--out", "found"]
    found, touched = parse_arguments(options)
    *both, cold = parse_arguments([*options, "--also-cold"])
    assert both == [found, touched]
    assert [(each.cold, each.is_touched) for each in (found, touched, cold)] == [
        (False, False),
        (False, True),
        (True, False),
    ]
    assert cold.loads == touched.loads == found.loads
    assert (cold.repeats, cold.once) == (3, ("stock",))
    assert touched.out == Path("found/touched").resolve()
    assert cold.out == Path("found/cold").resolve()
