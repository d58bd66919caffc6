"""Handlers that stand in for functions: where they are called, and what is left of them."""

import contextvars
import functools
import re
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from lowmem_load.errors import FallbackWarning, IncompatibleVersionError
from lowmem_load.foreign_names import ForeignName, Releases, require, require_attributes
from lowmem_load.replaced import replaced

TORCH = Releases("torch", oldest="2.0.0", newest="1000.1")


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

    @property
    def value(self) -> int:
        return 1


class Heir(Base):
    pass


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = ModuleType("theirs")
    made.base, made.Base, made.Heir = base, Base, Heir
    monkeypatch.setitem(sys.modules, "theirs", made)
    return made


def theirs(name: str, **limits: str) -> ForeignName:
    return ForeignName(TORCH, "theirs", name, **limits)


BASE = theirs("base")


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
        with replaced({BASE: other}):
            assert module.base() == "other than base"
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert module.base is base


@pytest.mark.parametrize("owner", [Base, Heir])
def test_methods_of_any_kind_are_replaced(owner: type[Base]) -> None:
    names = [theirs(f"{owner.__name__}.{name}") for name in ("method", "of_class", "static")]
    with replaced(dict.fromkeys(names, other)):
        assert [owner().method(), owner.static()] == ["other than base"] * 2
        assert owner.of_class() == owner().of_class() == f"other than base of {owner.__name__}"
    assert [owner().method(), owner.static()] == ["base"] * 2
    assert owner.of_class() == f"base of {owner.__name__}"
    assert not {"method", "of_class", "static"} & set(vars(Heir)), "they are inherited still"


def test_other_threads_call_the_function_itself(module: Any) -> None:
    with replaced({BASE: other}):
        assert in_thread(module.base) == "base"
    with replaced({BASE: other}, everywhere=True):
        assert in_thread(module.base) == module.base() == "other than base"
    assert in_thread(module.base) == module.base() == "base"


def test_an_inner_handler_is_called_with_the_outer_one(module: Any) -> None:
    with (
        replaced({BASE: lambda ordinary: f"everywhere {ordinary()}"}, everywhere=True),
        replaced({BASE: lambda ordinary: f"outer {ordinary()}"}),
        replaced({BASE: lambda ordinary: f"inner {ordinary()}"}),
    ):
        assert module.base() == "inner outer everywhere base"


def test_blocks_end_in_any_order(module: Any) -> None:
    first, second = (
        replaced({BASE: lambda ordinary, name=name: f"{name} {ordinary()}"}) for name in ("first", "second")
    )
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert module.base() == "second base"
    second.__exit__(None, None, None)
    assert module.base is base
    with replaced({BASE: other}):
        module.base = in_thread
    assert module.base is in_thread, "what somebody else has put there stays"


def test_what_somebody_puts_around_a_replaced_function_is_replaced_too(module: Any) -> None:
    with replaced({BASE: other}):
        pass
    before = module.base

    @functools.wraps(before)
    def theirs() -> str:
        return f"their {before()}"

    module.base = theirs
    with replaced({BASE: other}):
        assert module.base() == "other than their base"
    assert module.base() == "their base"
    module.base = before
    with replaced({BASE: other}):
        assert module.base() == "other than base"


def test_what_was_kept_from_a_block_is_replaced_in_the_next_one(module: Any) -> None:
    with replaced({BASE: other}):
        kept, context = module.base, contextvars.copy_context()
    assert context.run(kept) == kept() == "base", "also of a task that was begun inside"
    with replaced({BASE: other}):
        assert kept() == "other than base"
    module.base = kept  # as `mock.patch` does that began inside
    for _ in range(3):
        with replaced({BASE: other}):
            assert module.base() == "other than base"
        assert module.base is kept
    assert kept.__wrapped__ is base


def test_nothing_stays_replaced_where_a_name_is_missing(module: Any) -> None:
    expected = r"^torch \S+ lacks theirs.missing, theirs.gone; lowmem_load works"
    names = [BASE, theirs("missing"), theirs("gone")]
    with pytest.raises(IncompatibleVersionError, match=expected), replaced(dict.fromkeys(names, other)):
        pass
    assert module.base is base


def test_what_an_optional_name_is_missing_for_is_said(module: Any) -> None:
    names = [theirs("base", loss="all is slow"), theirs("missing", loss="all is slow"), theirs("Base.method", loss="b")]
    expected = r"^torch \S+ lacks theirs.missing, so all is slow. lowmem_load was tested with torch 2.0.0 to 1000.1"
    block = replaced(dict.fromkeys(names, other))
    with pytest.warns(FallbackWarning, match=expected) as seen:
        block.__enter__()
    assert module.base() == "base", "it is of no use alone"
    assert Base().method() == "other than base"
    block.__exit__(None, None, None)
    assert len(seen) == 1


def test_a_call_that_does_not_fit_a_handler_is_left_to_the_function(module: Any) -> None:
    module.base = lambda first, step=0: f"base {first} {step}"
    with replaced({theirs("base", loss="all is slow"): lambda ordinary, first: f"other than {ordinary(first)}"}):
        assert module.base("a") == module.base(first="a") == "other than base a 0"
        with pytest.warns(FallbackWarning, match=r"^theirs.base of torch \S+ is called .*step.*, so all is slow"):
            assert module.base("a", step=3) == "base a 3"
    with replaced({theirs("base", loss="all is slow"): lambda ordinary, begin, *_, **__: f"other than {begin}"}):
        assert module.base("a") == module.base("a", step=3) == "other than a"
        with pytest.warns(FallbackWarning, match=r"called with other arguments .*begin.*, so all is slow"):
            assert module.base(first="a") == "base a 0"
    with replaced({BASE: lambda ordinary, first: f"other than {first}"}):
        assert module.base("a") == "other than a"
        with pytest.raises(
            IncompatibleVersionError, match=r"called with other arguments than in 1000\.1 .*step.*install"
        ):
            module.base("a", step=3)


@pytest.mark.parametrize("loss", ["", "all is slow"])
def test_a_wrong_call_is_an_error_of_the_function(loss: str, module: Any, recwarn: pytest.WarningsRecorder) -> None:
    calls: list[str] = []

    def base(first: str) -> str:
        calls.append(first)
        return first + 1  # type: ignore[operator]

    module.base = base
    with replaced(
        {theirs("base", loss=loss): lambda ordinary, first, *args, **kwargs: ordinary(first, *args, **kwargs)}
    ):
        for arguments in ({}, {"frist": "a"}, {"first": "a", "step": 1}):
            with pytest.raises(TypeError, match=r"base\(\) (missing|got an unexpected)"):
                module.base(**arguments)
        with pytest.raises(TypeError, match="can only concatenate"):
            module.base("a")
    assert calls == ["a"], "an error from inside is not one of the call"
    assert not recwarn.list


OTHER_PARAMETERS: list[Callable[..., str]] = [
    lambda model, config, *, new=0: "base",
    lambda new, model, config, step=0: "base",
    lambda config, model, step=0: "base",
    lambda model, cfg, step=0: "base",
    lambda model, config, stride=0: "base",
    lambda model, *, config, step=0: "base",
    lambda *args, **kwargs: "base",
]


@pytest.mark.parametrize("function", OTHER_PARAMETERS)
def test_a_function_of_the_package_with_other_parameters_is_missing(function: Callable[..., str], module: Any) -> None:
    module.base, function.__module__ = function, "theirs.inner"
    takes = "model config * step"
    message = r"^torch \S+ lacks theirs.base\(model, config, \*, step\)"
    with pytest.raises(IncompatibleVersionError, match=f"{message};"), replaced({theirs("base", takes=takes): other}):
        pass
    block = replaced({theirs("base", takes=takes, loss="all is slow"): other})
    with pytest.warns(FallbackWarning, match=f"{message}, so all is slow"), block:
        assert module.base is function


TAKEN: list[Callable[..., str]] = [
    lambda model, config, step=0: "base",
    lambda self, model, config, new=0, *, step: "base",
    lambda model, config, /, *args, step=0, new=0, **kwargs: "base",
]


@pytest.mark.parametrize("function", TAKEN)
def test_new_parameters_do_not_matter(function: Callable[..., str], module: Any) -> None:
    function.__module__ = "theirs"
    module.base = functools.wraps(function)(lambda *args, **kwargs: "base")  # as many decorators do
    with replaced({theirs("base", takes="model config * step"): lambda *_, **__: "other"}):
        assert module.base() == "other"


@pytest.mark.parametrize("function", OTHER_PARAMETERS)
def test_what_another_package_has_put_there_is_replaced(function: Callable[..., str], module: Any) -> None:
    module.base, function.__module__ = function, "others"
    with replaced({theirs("base", takes="model config * step"): lambda *_, **__: "other"}):
        assert module.base() == "other"


@pytest.mark.parametrize("limits", [{"since": "1000"}, {"until": "2.0.1"}])
def test_other_releases_need_not_have_a_name(
    limits: dict[str, str], module: Any, recwarn: pytest.WarningsRecorder
) -> None:
    with replaced({theirs("missing", **limits): other, theirs("gone", loss="b", **limits): other}):
        pass
    with replaced({theirs("base", until="2.0.1"): other}):
        assert module.base() == "base", "it may have another meaning since"
    assert not recwarn.list


def test_a_method_of_a_subclass_is_its_own() -> None:
    class Inner(Base):
        def method(self) -> str:
            return "inner"

    with replaced({theirs("Base.method").of(Inner): other}):
        assert Inner().method() == "other than inner"
        assert Base().method() == "base"


@pytest.mark.parametrize("name", ["value", "Base.value", "other", "Nobody.method", "made_up"])
def test_what_is_no_function_is_missing(name: str, module: Any) -> None:
    module.value = 1
    module.__getattr__ = lambda name: base
    with pytest.raises(IncompatibleVersionError, match=f"lacks theirs.{name};"), replaced({theirs(name): other}):
        pass


def test_what_calls_a_function_that_was_replaced_is_compiled_as_before(module: Any) -> None:
    module.base = lambda tensor: tensor + 1
    with replaced({BASE: other}):
        pass
    compiled = torch.compile(lambda tensor: module.base(tensor) * 2, fullgraph=True, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [4.0, 4.0]


# -- what a package lacks is told in one error -------------------------------------------------------------------------


SUPPORTED = Releases("torch", oldest="2.0.0", newest="1000.1")


def test_all_that_is_missing_is_in_one_error() -> None:
    with pytest.raises(IncompatibleVersionError) as caught:
        require(
            SUPPORTED, {"torch": ("nothing", "nn.nothing", "nn"), "torch.nowhere": ("a", "b"), "torch:Nobody": ("c",)}
        )
    assert str(caught.value) == (
        f"torch {torch.__version__} lacks torch.nothing, torch.nn.nothing, "
        "torch.nowhere (module 'torch' has no attribute 'nowhere'), "
        "torch.Nobody (module 'torch' has no attribute 'Nobody'); "
        "lowmem_load works with torch 2.0.0 to 1000.1: install torch==1000.1"
    )


def test_an_object_is_asked_for_what_only_it_has() -> None:
    module = torch.nn.Linear(1, 1)
    with pytest.raises(
        IncompatibleVersionError, match=rf"^torch {re.escape(torch.__version__)} lacks Linear\.a, Linear\.bias\.b; "
    ):
        require_attributes(SUPPORTED, module, ("weight", "a", "bias.b"))


def test_an_older_release_is_refused_and_the_one_to_install_is_named() -> None:
    with pytest.raises(IncompatibleVersionError) as caught:
        require(Releases("torch", oldest="1000.1", newest="1000.2"), {})
    assert str(caught.value) == (
        f"torch {torch.__version__} is too old: lowmem_load works with torch 1000.1 to 1000.2; "
        "install torch==1000.1 or newer"
    )


def test_a_newer_release_is_warned_of_once_and_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    supported = Releases("torch", oldest="1.0", newest="2.0.1")
    for _ in range(2):
        require(supported, {"torch": ("nn",)})
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"torch {torch.__version__} is newer than what lowmem_load was tested with (torch 1.0 to 2.0.1)"
    )
    caplog.clear()
    monkeypatch.setattr(torch, "__version__", "1000.1+cpu")
    require(SUPPORTED, {})
    assert not caplog.records, "a build of a tested release"
