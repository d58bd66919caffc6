"""Hooks on deepspeed.initialize: what they are given, what they decide, and that nothing is asked after they end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import deepspeed
import pytest

from lowmem_load.ds.hooks import Handler, hooked


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


def test_arguments_have_names_however_they_are_given(ordinary: Callable[..., Any]) -> None:
    seen: list[dict[str, Any]] = []
    positional = (None, "model", None, None, None, None, 29500, None, None, None, "config")
    with hooked(recorder(seen)):
        assert deepspeed.initialize(*positional) == ("ordinary", positional, {})
        assert deepspeed.initialize(None, "model", config="config") == (
            "ordinary",
            (None, "model"),
            {"config": "config"},
        )
    assert [(given["model"], given["config"]) for given in seen] == [("model", "config")] * 2
    assert "optimizer" not in seen[1]


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


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_hooks_end_in_any_order(order: tuple[int, ...], ordinary: Callable[..., Any]) -> None:
    stacks, seen = [ExitStack() for _ in range(3)], [[] for _ in range(3)]  # type: ignore[var-annotated]
    for stack, calls in zip(stacks, seen, strict=True):
        stack.enter_context(hooked(recorder(calls)))
    kept = deepspeed.initialize
    alive = {0, 1, 2}
    for number in order:
        stacks[number].close()
        alive.remove(number)
        for calls in seen:
            calls.clear()
        assert deepspeed.initialize(model=1)[0] == "ordinary"
        assert {index for index, calls in enumerate(seen) if calls} == alive
    assert deepspeed.initialize(model=1)[0] == "ordinary"
    assert kept(model=1) == ("ordinary", (), {"model": 1})
    assert not any(seen)


def test_what_somebody_else_put_there_stays(ordinary: Callable[..., Any]) -> None:
    seen: list[Any] = []
    with hooked(recorder(seen)):
        inner = deepspeed.initialize

        def foreign(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

        deepspeed.initialize = foreign
        deepspeed.initialize(model=1)
        with hooked(recorder(seen)):
            deepspeed.initialize(None, 2)
    assert [given["model"] for given in seen] == [1, 2, 2]
    assert deepspeed.initialize(model=3)[0] == "ordinary"
    assert len(seen) == 3
