"""The stages in order, as far as one process can show it: what the progress bar counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm
from transformers import ResNetConfig, ResNetModel

from lowmem_load import DistributedInterface, load_model, load_report
from lowmem_load.stages import load as stages

BF16 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
FP32 = {"zero_optimization": {"stage": 3}}


@pytest.fixture(autouse=True)
def lone_process() -> Iterator[None]:
    interface = DistributedInterface()
    yield
    interface.destroy()


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    class Kept(tqdm):  # type: ignore[type-arg]
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            made.append(self)

    monkeypatch.setattr(stages, "tqdm", Kept)
    return made


@pytest.mark.parametrize("config", [BF16, FP32])
def test_the_progress_bar_ends_at_its_total(config: dict[str, Any], bars: list[Any], tmp_path: Path) -> None:
    """Bytes of buffers, here of batch norms, are among both; so are those that are read to be cast."""
    model = ResNetModel(ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1]))
    model.save_pretrained(tmp_path)
    report = load_report(load_model(tmp_path, config, progress=True))
    (bar,) = bars
    values = [*model.parameters(), *model.buffers()]
    assert bar.n == bar.total == report.needed_bytes == sum(value.nbytes for value in values)
    assert any(buffer.dtype == torch.float32 for buffer in model.buffers())


def test_no_bar_is_shown_unless_asked_for(bars: list[Any], tmp_path: Path) -> None:
    ResNetModel(ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1])).save_pretrained(tmp_path)
    load_model(tmp_path, FP32, progress=False)
    load_model(tmp_path, FP32)  # stderr is no terminal here
    assert [bar.disable for bar in bars] == [True, True]
