"""What a `from_pretrained` would load, handed to something that makes no model of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from lowmem_load.errors import UnsupportedError
from lowmem_load.hf import intercept, loader
from lowmem_load.load.request import Checked

T = TypeVar("T")


def instead_of_loading(checked: Checked, act: Callable[[loader.Call], T]) -> T:
    """Return what `act` makes of the call of `from_pretrained` that would load.

    Raises:
        UnsupportedError: the class does not load by transformers' own `from_pretrained`.
    """

    def handler(call: loader.Call) -> tuple[nn.Module, dict[str, Any]]:
        raise _Done(act(call))

    with intercept.in_turn(open_ended=False), intercept.intercepted(handler, any_thread=False):
        try:
            checked.from_pretrained()
        except _Done as done:
            result: T = done.result
            return result
    raise UnsupportedError(f"{checked.cls.__name__} does not load through transformers' from_pretrained")


class _Done(BaseException):
    """Carries a result out of a `from_pretrained`, past overrides that would go on to use the model."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result
