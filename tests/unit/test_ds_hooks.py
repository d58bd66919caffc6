"""Handlers of deepspeed.initialize: what they are given, and what they decide."""

from typing import Any

from lowmem_load.engines.hooks import asked_first
from lowmem_load.foreign_names import INITIALIZE


def ordinary(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return "ordinary", args, kwargs


def test_a_handler_gets_the_arguments_by_name_and_may_answer() -> None:
    """What cannot be bound is for DeepSpeed to refuse."""
    seen: list[Any] = []

    def answer(arguments: dict[str, Any]) -> str | None:
        seen.append(arguments)
        return "ours" if arguments["model"] == 1 else None

    call = asked_first(INITIALIZE, answer)
    assert call(ordinary, None, 1) == "ours"
    assert call(ordinary, model=2) == ("ordinary", (), {"model": 2})
    assert call(ordinary, modell=1) == ("ordinary", (), {"modell": 1})
    assert seen == [{"args": None, "model": 1}, {"model": 2}]
