"""Writes into parameters: in order, with the random numbers that torch would draw, and one whole at a time."""

import torch

from lowmem_load.planning import expression as ex
from lowmem_load.planning.regions import FlatRange
from lowmem_load.symbolic.initialise import PAGES_NBYTES, UNINITIALISED, Initialiser, SharedValue


def refused(expression: ex.Expression, reason: str) -> torch.Tensor:
    raise AssertionError(f"{reason}: {expression} is read")


def parameter(initialiser: Initialiser, keep: FlatRange, numel: int) -> SharedValue:
    empty = ex.Computed(UNINITIALISED, lambda _: torch.zeros(numel), (), (numel,), torch.float32)
    return SharedValue(empty, initialiser, keep=keep)


def test_what_is_kept_does_not_keep_the_whole() -> None:
    numel = PAGES_NBYTES  # of four bytes each: a block with pages of its own
    initialiser = Initialiser(refused)
    value = parameter(initialiser, FlatRange(3, 5), numel)
    initialiser.write(value, "fill_", lambda whole, _: whole.fill_(7), (), draws=False)
    initialiser.release()
    assert value.initialised is not None
    assert value.initialised.flat.tolist() == [7, 7]
    assert value.initialised.flat.untyped_storage().nbytes() == 2 * 4


def test_a_value_that_is_replaced_forgets_its_writes() -> None:
    initialiser = Initialiser(refused)
    value = parameter(initialiser, FlatRange(0, 20), 20)
    initialiser.write(value, "fill_", lambda whole, _: whole.fill_(1), (), draws=False)
    loaded = ex.hold(torch.ones(20))
    value.replace(loaded)
    assert value.expression is loaded
    assert (value.initialised, value.log, value.before) == (None, [], None)
    initialiser.release()
    assert value.initialised is None  # it was no longer in hand
