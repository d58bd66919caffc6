"""The benchmark's command line."""

from __future__ import annotations

from pathlib import Path

from benchmarks.compare import parse_arguments


def test_a_run_that_is_also_cold_does_the_same_loads_again() -> None:
    options = ["--preset", "llama-1.5b", "--ranks", "1", "2", "--repeats", "3", "--once", "stock", "--out", "found"]
    [plan] = parse_arguments(options)
    warm, cold = parse_arguments([*options, "--also-cold"])
    assert warm == plan
    assert (warm.cold, cold.cold) == (False, True)
    assert cold.loads == warm.loads
    assert (cold.repeats, cold.once) == (3, ("stock",))
    assert cold.out == Path("found/cold").resolve()
