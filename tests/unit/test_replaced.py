"""Handlers that stand in for functions: where they are called, and what is left of them."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from lowmem_load.replaced import replaced


def base() -> str:
    return "base"


class Base:
    def method(self) -> str:
        return "base"

    @classmethod
    def of_class(cls) -> str:
        return f"base of {cls.__name__}"

    @staticmethod
    def static() -> str:
        return "base"


class Heir(Base):
    pass


@pytest.fixture
def module() -> Any:
    made = ModuleType("theirs")
    made.base = base
    return made


def other(ordinary: Callable[..., str], *args: Any) -> str:
    return f"other than {ordinary(*args)}"


def in_thread(function: Callable[[], str]) -> str:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_a_function_of_a_module_is_replaced_for_the_block(module: Any) -> None:
    def fail_inside() -> None:
        with replaced((module, "base", other)):
            assert module.base() == "other than base"
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert module.base() == "base"
    assert module.base.__name__ == "base"


@pytest.mark.parametrize("owner", [Base, Heir])
def test_methods_of_any_kind_are_replaced(owner: type[Base]) -> None:
    with replaced((owner, "method", other), (owner, "of_class", other), (owner, "static", other)):
        assert [owner().method(), owner.static()] == ["other than base"] * 2
        assert owner.of_class() == owner().of_class() == f"other than base of {owner.__name__}"
    assert [owner().method(), owner.static()] == ["base"] * 2
    assert owner.of_class() == f"base of {owner.__name__}"
    assert not {"method", "of_class", "static"} & set(vars(Heir)), "they are inherited still"


def test_other_threads_call_the_function_itself(module: Any) -> None:
    with replaced((module, "base", other)):
        assert in_thread(module.base) == "base"
    with replaced((module, "base", other), everywhere=True):
        assert in_thread(module.base) == module.base() == "other than base"
    assert in_thread(module.base) == module.base() == "base"


def test_what_is_kept_from_inside_does_no_harm(module: Any) -> None:
    with replaced((module, "base", other)):
        kept, context = module.base, contextvars.copy_context()
    assert kept() == "base"
    assert context.run(kept) == "base", "of a task that was begun inside"


def test_an_inner_handler_is_called_with_the_outer_one(module: Any) -> None:
    with (
        replaced((module, "base", lambda ordinary: f"everywhere {ordinary()}"), everywhere=True),
        replaced((module, "base", lambda ordinary: f"outer {ordinary()}")),
        replaced((module, "base", lambda ordinary: f"inner {ordinary()}")),
    ):
        assert module.base() == "inner outer everywhere base"


@pytest.mark.parametrize("everywhere", [False, True])
def test_blocks_end_in_any_order(module: Any, everywhere: bool) -> None:
    first, second = (
        replaced((module, "base", lambda ordinary, name=name: f"{name} {ordinary()}"), everywhere=everywhere)
        for name in ("first", "second")
    )
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert module.base() == "second base"
    second.__exit__(None, None, None)
    assert module.base() == "base"


def test_what_somebody_puts_around_a_replaced_function_is_replaced_too(module: Any) -> None:
    with replaced((module, "base", other)):
        pass
    before = module.base

    @functools.wraps(before)
    def theirs() -> str:
        return f"their {before()}"

    module.base = theirs
    with replaced((module, "base", other)):
        assert module.base() == "other than their base"
    assert module.base() == "their base"
    module.base = before
    with replaced((module, "base", other)):
        assert module.base() == "other than base"


def test_a_function_is_replaced_in_one_place_and_put_back(module: Any) -> None:
    with replaced((module, "base", other), (module, "base", other)):
        dispatcher = module.base
        with replaced((module, "base", other)):
            assert module.base is dispatcher
        assert module.base is dispatcher
    assert module.base is base


def test_what_was_kept_from_a_block_is_replaced_in_the_next_one(module: Any) -> None:
    with replaced((module, "base", other)):
        kept = module.base
    with replaced((module, "base", other)):
        assert kept() == "other than base"
    module.base = kept  # as `mock.patch` does that began inside
    for _ in range(3):
        with replaced((module, "base", other)):
            assert module.base() == "other than base"
        assert module.base is kept
    assert kept.__wrapped__ is base


def test_what_is_put_back_is_what_was_there() -> None:
    before = dict(vars(Base))
    with replaced((Heir, "method", other), (Base, "of_class", other), (Base, "static", other), everywhere=True):
        pass
    assert {name: vars(Base)[name] is value for name, value in before.items()} == dict.fromkeys(before, True)


def test_what_somebody_else_has_put_there_stays(module: Any) -> None:
    with replaced((module, "base", other)):
        module.base = in_thread
    assert module.base is in_thread


def test_nothing_stays_replaced_where_a_name_is_missing(module: Any) -> None:
    with pytest.raises(KeyError), replaced((module, "base", other), (module, "missing", other)):
        pass
    assert module.base is base


def test_what_calls_a_function_that_was_replaced_is_compiled_as_before(module: Any) -> None:
    module.base = lambda tensor: tensor + 1
    with replaced((module, "base", other)):
        pass
    compiled = torch.compile(lambda tensor: module.base(tensor) * 2, fullgraph=True, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [4.0, 4.0]
