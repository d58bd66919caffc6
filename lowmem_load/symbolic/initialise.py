"""Where parameters that are not in the checkpoint get their values: in the order of an ordinary load, one at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from lowmem_load.files.memory import map_memory
from lowmem_load.planning.expression import Computed, Expression, Held, numel
from lowmem_load.planning.regions import NOTHING, FlatRange

PAGES_NBYTES = 128 << 10  # smallest block that gets pages of its own: the default threshold of glibc

UNINITIALISED = "torch.empty"
"""Operation of the `Computed` that stands for a parameter before it is initialized."""

WRITTEN = "initialized"
"""Operation of the `Computed` that stands for a parameter after it was initialized."""

INITIALISED = "initialized on this rank"
"""Origin of the values of a parameter that is not in the checkpoint."""

CPU = torch.device("cpu")

T = TypeVar("T")
ReadNow = Callable[[Expression, str], torch.Tensor]
"""Reads an expression in full. The text is the operation that needs it, for the report."""

_Write = tuple[torch.Tensor | None, Callable[[torch.Tensor], object]]


@dataclass(slots=True, eq=False)
class SharedValue:
    """The value of a tensor and of all views of it, so that a write through one is seen by all.

    Attributes:
        expression: the value, row-major, in the shape of the tensor that the views were taken from.
        initialiser: does the writes into a parameter; None for a value that is not a parameter.
        keep: of a parameter: the elements that this rank will be asked for; `initialised` has them after writes.
        log: the writes, each with the random state before it if it draws; `before` is the value before the first.
        device: where code that looks at the tensor sees it. strides: of the tensor that the views were taken from.
        memory: of a lazy tensor whose value stays in memory: that memory, in the shape of the tensor. It is the value.
    """

    expression: Expression
    initialiser: Initialiser | None = None
    keep: FlatRange = NOTHING
    initialised: Held | None = None
    log: list[_Write] = field(default_factory=list)
    before: Expression | None = None
    device: torch.device = CPU
    strides: tuple[int, ...] = ()
    memory: torch.Tensor | None = None

    def replace(self, expression: Expression) -> None:
        """Drop all writes and become `expression`."""
        if self.initialiser is not None:
            self.initialiser.release()
        self.expression = expression
        self.forget()

    def forget(self) -> None:
        """Free what is in memory. The log refers to this value, so without this only the garbage collector frees it."""
        self.initialised, self.log, self.before = None, [], None


class Initialiser:
    """Writes into parameters that are not read from files, in order. One parameter at a time is in memory in full.

    For a plan, `note` takes the place of `read_now` and returns meta tensors. Then writes are only recorded.
    """

    def __init__(self, read_now: ReadNow, note: ReadNow | None = None) -> None:
        self._holds_values = note is None
        self._read_now, self._read = read_now, note or read_now
        self._current: SharedValue | None = None
        self._full = torch.empty(0, device=CPU)

    def write(
        self,
        value: SharedValue,
        operation: str,
        change: Callable[[torch.Tensor, Sequence[torch.Tensor]], object],
        others: Sequence[Expression],
        draws: bool,
    ) -> None:
        """Apply `change` to the full tensor and the values of `others`. `draws`: it draws random numbers."""
        if self._current is not value:
            self.release()
            self._full, self._current = self._fetch(value), value
        if value.before is None:
            value.before = value.expression

        def write_again(full: torch.Tensor) -> None:
            change(full, [self._read_now(other, operation) for other in others])

        value.log.append((torch.get_rng_state() if draws else None, write_again))
        if self._holds_values:
            write_again(self._full)
        else:
            for other in others:
                self._read(other, operation)
        value.expression = _replay(value.before, value.log, len(value.log))

    def _fetch(self, value: SharedValue) -> torch.Tensor:
        expression = value.expression
        if value.log or not (isinstance(expression, Computed) and expression.operation == UNINITIALISED):
            return self._read(expression, INITIALISED)
        if not self._holds_values:
            return torch.empty(expression.shape, dtype=expression.dtype, device="meta")
        return _pages(numel(expression), expression.dtype).view(expression.shape)

    def release(self) -> None:
        """Keep what this rank needs of the parameter in memory, and free the rest."""
        if self._current is not None:
            flat, keep = self._full.reshape(-1), self._current.keep
            part = flat[keep.start : keep.end]
            if self._holds_values:
                part = _pages(keep.numel, flat.dtype).copy_(part)
            self._current.initialised = Held(part, keep.start, tuple(self._full.shape), self._full.dtype, INITIALISED)
        self._current, self._full = None, torch.empty(0, device=CPU)


def _pages(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in memory that goes back to the system when freed: holes in the heap doubled a model's memory."""
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < PAGES_NBYTES:
        return torch.zeros(num_elements, dtype=dtype, device=CPU)
    return map_memory(num_bytes).view(dtype)


def with_random_state(state: torch.Tensor | None, call: Callable[[], T]) -> T:
    """Return `call()`. With a state, it draws from there, and the random state afterwards is as it was before."""
    if state is None:
        return call()
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        return call()


def _replay(before: Expression, log: Sequence[_Write], num_writes: int) -> Expression:
    """Return the value of `before` after the first writes of `log`."""

    def compute(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        full = inputs[0].clone()
        for state, change in log[:num_writes]:
            with_random_state(state, functools.partial(change, full))
        return full

    return Computed(WRITTEN, compute, (before,), before.shape, before.dtype)
