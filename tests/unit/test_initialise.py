"""Writes into parameters: in order, with the random numbers that torch would draw, and one whole at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lowmem_load.planning import expression as ex
from lowmem_load.planning.regions import FlatRange
from lowmem_load.symbolic.initialise import (
    INITIALISED,
    PAGES_NBYTES,
    UNINITIALISED,
    Initialiser,
    SharedValue,
)

SHAPE = (4, 5)
ALL = FlatRange(0, 20)


@dataclass
class Reader:
    """Reads values that are held or computed, and notes for what."""

    reasons: list[str] = field(default_factory=list)

    def read(self, expression: ex.Expression, reason: str) -> torch.Tensor:
        self.reasons.append(reason)
        if isinstance(expression, ex.Held):
            return expression.flat.view(expression.shape).clone()
        assert isinstance(expression, ex.Computed)
        return expression.compute([self.read(part, reason) for part in expression.inputs])

    def note(self, expression: ex.Expression, reason: str) -> torch.Tensor:
        self.reasons.append(reason)
        return torch.empty(expression.shape, dtype=expression.dtype, device="meta")


def refused(expression: ex.Expression, reason: str) -> torch.Tensor:
    raise AssertionError(f"{reason}: {expression} is read")


def parameter(initialiser: Initialiser, keep: FlatRange = ALL, shape: ex.Shape = SHAPE) -> SharedValue:
    empty = ex.Computed(UNINITIALISED, lambda _: torch.zeros(shape), (), shape, torch.float32)
    return SharedValue(empty, initialiser, keep=keep)


def normal(whole: torch.Tensor, _: Sequence[torch.Tensor]) -> None:
    whole.normal_()


def doubled(whole: torch.Tensor, _: Sequence[torch.Tensor]) -> None:
    whole.mul_(2)


def kept(value: SharedValue) -> torch.Tensor:
    assert value.initialised is not None
    return value.initialised.flat


# -- what is held ----------------------------------------------------------------------------------------------------


def test_what_is_kept_does_not_keep_the_whole() -> None:
    numel = PAGES_NBYTES  # of four bytes each: a block with pages of its own
    initialiser = Initialiser(refused)
    value = parameter(initialiser, FlatRange(3, 5), (numel,))
    initialiser.write(value, "fill_", lambda whole, _: whole.fill_(7), (), draws=False)
    initialiser.release()
    assert kept(value).tolist() == [7, 7]
    assert kept(value).untyped_storage().nbytes() == 2 * 4


def test_the_next_parameter_releases_the_one_in_hand() -> None:
    initialiser = Initialiser(refused)
    first, second = parameter(initialiser), parameter(initialiser)
    initialiser.write(first, "fill_", lambda whole, _: whole.fill_(1), (), draws=False)
    initialiser.write(second, "fill_", lambda whole, _: whole.fill_(2), (), draws=False)
    assert kept(first).unique().tolist() == [1]
    assert second.initialised is None


def test_a_parameter_that_was_released_is_read_again_to_be_written() -> None:
    reader = Reader()
    initialiser = Initialiser(reader.read)
    value = parameter(initialiser, FlatRange(0, 2))
    initialiser.write(value, "fill_", lambda whole, _: whole.fill_(3), (), draws=False)
    initialiser.release()
    initialiser.write(value, "mul_", doubled, (), draws=False)
    initialiser.release()
    assert kept(value).tolist() == [6, 6]
    assert set(reader.reasons) == {INITIALISED}


def test_a_value_that_is_replaced_forgets_its_writes() -> None:
    initialiser = Initialiser(refused)
    value = parameter(initialiser)
    initialiser.write(value, "fill_", lambda whole, _: whole.fill_(1), (), draws=False)
    loaded = ex.hold(torch.ones(SHAPE))
    value.replace(loaded)
    assert value.expression is loaded
    assert (value.initialised, value.log, value.before) == (None, [], None)
    initialiser.release()
    assert value.initialised is None  # it was no longer in hand
