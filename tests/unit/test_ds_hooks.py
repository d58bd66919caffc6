"""Hooks on deepspeed.initialize: what they are given, what they decide, and that nothing is asked after they end."""

from collections.abc import Callable
from typing import Any

import deepspeed
import pytest

from lowmem_load.engines.hooks import Handler, hooked


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def initialize(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return "ordinary", args, kwargs

    monkeypatch.setattr(deepspeed, "initialize", initialize)
    return initialize


def recorder(seen: list[Any], answer: tuple[Any, ...] | None = None) -> Handler:
    def handler(given: dict[str, Any]) -> tuple[Any, ...] | None:
        seen.append(given)
        return answer

    return handler


def test_a_handler_may_answer(ordinary: Callable[..., Any]) -> None:
    outer: list[Any] = []
    with hooked(recorder(outer)), hooked(recorder([], ("ours",))):
        assert deepspeed.initialize(model=1) == ("ours",)
    assert outer == []


def test_what_cannot_be_bound_is_for_deepspeed_to_refuse() -> None:
    seen: list[Any] = []
    with hooked(recorder(seen)), pytest.raises(TypeError, match="unexpected keyword argument 'modell'"):
        deepspeed.initialize(modell=1)
    assert seen == []
