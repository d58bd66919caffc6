"""Files are described once, from the sources that will be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lowmem_load.errors import HeaderError
from lowmem_load.formats.safetensors import Safetensors
from lowmem_load.io.source import LocalFile, OpenSources
from lowmem_load.planning.expression import Expression
from lowmem_load.planning.regions import FlatRange
from lowmem_load.symbolic.context import Context
from lowmem_load.symbolic.initialise import Initialiser


class Noted(LocalFile):
    """Notes the sources that were opened, and how often each was closed."""

    made: list[Noted]

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.num_closed = 0
        self.made.append(self)

    def close(self) -> None:
        self.num_closed += 1
        super().close()


def read_nothing(expression: Expression, reason: str) -> torch.Tensor:
    raise AssertionError(f"{reason} read {expression}")


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenSources]:
    monkeypatch.setattr(Noted, "made", [], raising=False)
    sources = OpenSources(Noted)
    yield sources
    sources.close()
    assert [source.num_closed for source in Noted.made] == [1] * len(Noted.made)


@pytest.fixture
def context(sources: OpenSources) -> Context:
    initialiser = Initialiser(read_nothing)
    keeps_of: Any = lambda _: lambda parameter: FlatRange(0, parameter.numel())  # noqa: E731
    return Context(read_nothing, initialiser, keeps_of, lambda model: None, sources.reading)


def test_a_file_is_opened_and_described_once(context: Context, sources: OpenSources, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.safetensors", "b.safetensors")]
    for number, path in enumerate(paths):
        save_file({f"w{number}": torch.ones(3)}, path)
    found = [context.file(path, Safetensors()) for path in (*paths, *paths)]
    assert [file.names for file in found] == [("w0",), ("w1",)] * 2
    assert found[0] is found[2] and found[1] is found[3]
    assert context.files == {paths[0]: found[0], paths[1]: found[1]}
    with sources.reading(paths[0]) as source:  # for its data
        assert source is Noted.made[0]
    assert [(source.path, source.num_closed) for source in Noted.made] == [(path, 0) for path in paths]


def test_a_file_that_cannot_be_described_is_not_kept(context: Context, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00[]")
    with pytest.raises(HeaderError):
        context.file(str(path), Safetensors())
    assert context.files == {}
