"""Untrusted input: each of the corpus, then seconds of fresh ones, gives a result or an error of lowmem_load.

`make fuzz` is the campaign: a minute of it in CI, longer by hand. What it finds becomes a file of the corpus, and so a
test.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.fuzz.targets import CORPUS, TARGETS, check, fresh_inputs

SECONDS = float(os.environ.get("FUZZ_SECONDS", "4"))
"""For all targets together."""

SEED = int(os.environ.get("FUZZ_SEED", random.SystemRandom().randrange(1 << 32)))


@pytest.mark.parametrize("name", TARGETS)
def test_corpus(name: str) -> None:
    files = sorted((CORPUS / name).iterdir())
    assert files
    for file in files:
        check(name, file.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_fresh_inputs(name: str, tmp_path: Path) -> None:
    count = 0
    seconds = SECONDS * TARGETS[name].share / sum(each.share for each in TARGETS.values())
    for data in fresh_inputs(name, SEED, seconds):
        count += 1
        try:
            check(name, data)
        except AssertionError:
            kept = tmp_path / "input"
            kept.write_bytes(data)
            print(f"FUZZ_SEED={SEED}, input {count} of {name}: {kept}\n{data[:1000]!r}")
            raise
    print(f"{name}: {count} inputs, FUZZ_SEED={SEED}")
