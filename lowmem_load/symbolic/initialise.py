"""Where parameters that are not in the checkpoint get their values: whole, one at a time, in order.

Initialisation draws random numbers, so it must run as an ordinary load runs it; what must not happen is that all
parameters that it writes are whole at once.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from lowmem_load.planning.expression import Computed, Expression, Held, numel
from lowmem_load.planning.ranges import FlatRange

PAGES_NBYTES = 128 << 10
"""Smallest block that gets pages of its own, as in glibc before it adapts to what a process frees."""

UNINITIALISED = "torch.empty"
"""Operation of the `Computed` that stands for a parameter before it is initialised."""

INITIALISED = "initialised on this rank"
"""Origin of the values of a parameter that is not in the checkpoint."""

CPU = torch.device("cpu")
NOTHING = FlatRange(0, 0)

T = TypeVar("T")
ReadNow = Callable[[Expression, str], torch.Tensor]
"""Reads an expression whole, for a reason that is reported: the operation that needs it."""

_Write = tuple[torch.Tensor | None, Callable[[torch.Tensor], object]]


@dataclass(slots=True, eq=False)
class SharedValue:
    """What a tensor and all views of it share. See [Note: writes] in `symbolic/tensor.py`.

    Attributes:
        expression: the value, row-major under the shape of the tensor that the views were taken from.
        initialiser: where writes are done; None for a value that is no parameter.
        computed_from: the initialiser of the parameter that such a value was computed from.
        keep: elements that this rank will be asked for, of a parameter.
        initialised: after writes, these elements.
        log: the writes, each with the random state before it if it draws random numbers.
        before: the value before the first write.
    """

    expression: Expression
    initialiser: Initialiser | None = None
    computed_from: Initialiser | None = None
    keep: FlatRange = NOTHING
    initialised: Held | None = None
    log: list[_Write] = field(default_factory=list)
    before: Expression | None = None

    def replace(self, expression: Expression) -> None:
        """Forget what was written and be `expression`."""
        if self.initialiser is not None:
            self.initialiser.release()
        self.expression, self.initialised, self.log, self.before = expression, None, [], None


class Initialiser:
    """Does the writes into parameters that are not read from files, in order, holding one whole at a time.

    Memory: the largest parameter that is written into, plus what is kept of each.

    Args:
        read_now: reads what parameters hold before they are written into, and what is written into them.
        note: takes its place where values are not wanted, and returns meta tensors. Then writes are noted and nothing
            is read, computed or allocated: enough for a plan, in which such a value is a number of elements.
    """

    def __init__(self, read_now: ReadNow, note: ReadNow | None = None) -> None:
        self._holds_values = note is None
        self._read_now, self._read = read_now, note or read_now
        self._current: SharedValue | None = None
        self._idle_draws: list[Callable[[], object]] = []
        self._whole = torch.empty(0, device=CPU)

    def write(
        self,
        value: SharedValue,
        operation: str,
        change: Callable[[torch.Tensor, Sequence[torch.Tensor]], object],
        others: Sequence[Expression],
        draws: bool,
    ) -> None:
        """Apply an operation to the whole of a value.

        `change` takes the whole, which it changes, and the values of `others`; `draws` says whether it draws random
        numbers.
        """
        if self._current is not value:
            self.release()
            self._whole, self._current = self._fetch(value), value
        if value.before is None:
            value.before = value.expression
        if draws and self._holds_values:
            for draw in self._idle_draws:
                draw()
            self._idle_draws.clear()

        def write_again(whole: torch.Tensor) -> None:
            change(whole, [self._read_now(other, operation) for other in others])

        value.log.append((torch.get_rng_state() if draws else None, write_again))
        if self._holds_values:
            write_again(self._whole)
        else:
            for other in others:
                self._read(other, operation)
        value.expression = _replayed(value.before, value.log, len(value.log))

    def _fetch(self, value: SharedValue) -> torch.Tensor:
        """Return the whole of `value`; one that has none yet gets memory of its own."""
        expression = value.expression
        if value.log or not self._is_uninitialised(value):
            return self._read(expression, INITIALISED)
        if not self._holds_values:
            return torch.empty(expression.shape, dtype=expression.dtype, device="meta")
        return _pages(numel(expression), expression.dtype).view(expression.shape)

    @staticmethod
    def _is_uninitialised(value: SharedValue) -> bool:
        return isinstance(value.expression, Computed) and value.expression.operation == UNINITIALISED

    def skip(self, draw: Callable[[], object]) -> None:
        """Put off a draw of random numbers whose result nobody has read, until numbers are drawn that somebody will.

        Initialising a loaded weight through a copy (weight norm, `weight.float()`) changes nothing but the order.
        """
        self._idle_draws.append(draw)

    def release(self) -> None:
        """Keep of the parameter in hand what this rank needs, and free it."""
        if self._current is not None:
            flat, keep = self._whole.reshape(-1), self._current.keep
            if self._holds_values:
                part = _pages(keep.numel, flat.dtype).copy_(flat[keep.start : keep.end])
            else:
                part = flat[keep.start : keep.end]
            held = Held(part, keep.start, tuple(self._whole.shape), self._whole.dtype, INITIALISED)
            self._current.initialised = held
        self._current, self._whole = None, torch.empty(0, device=CPU)


def _pages(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in memory that goes back to the system when it is freed.

    Blocks of many sizes that come from the heap and are freed in another order leave holes in it: a random model of
    112 MiB per rank took 200. Small ones do not matter, and mappings are limited in number.
    """
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < PAGES_NBYTES:
        return torch.zeros(num_elements, dtype=dtype, device=CPU)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype)


def with_random_state(state: torch.Tensor | None, call: Callable[[], T]) -> T:
    """Return call(), run with random numbers from `state` on if there is one; restores the random state then."""
    if state is None:
        return call()
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        return call()
    finally:
        torch.set_rng_state(before)


def _replayed(before: Expression, log: Sequence[_Write], num_writes: int) -> Expression:
    """Return the value that `before` has after the first writes of `log`: whole, made again from the log."""

    def compute(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = inputs[0].clone()
        for state, change in log[:num_writes]:
            with_random_state(state, functools.partial(change, whole))
        return whole

    return Computed("initialised", compute, (before,), before.shape, before.dtype)
