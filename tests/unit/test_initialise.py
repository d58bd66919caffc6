"""Writes into parameters: in order, with the random numbers that torch would draw, and one whole at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from lowmem_load.planning import expression as ex
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.symbolic.initialise import (
    INITIALISED,
    PAGES_NBYTES,
    UNINITIALISED,
    Initialiser,
    SharedValue,
    with_random_state,
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


# -- random numbers --------------------------------------------------------------------------------------------------


def test_numbers_are_drawn_in_the_order_of_the_writes() -> None:
    torch.manual_seed(3)
    expected = [torch.empty(SHAPE).normal_() for _ in range(2)]
    expected.append(torch.rand(1))

    torch.manual_seed(3)
    initialiser = Initialiser(refused)
    values = [parameter(initialiser) for _ in range(2)]
    for value in values:
        initialiser.write(value, "normal_", normal, (), draws=True)
    initialiser.release()
    found = [kept(value).view(SHAPE) for value in values]
    found.append(torch.rand(1))
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_a_value_is_made_again_from_its_writes_and_draws_nothing() -> None:
    torch.manual_seed(3)
    reader = Reader()
    initialiser = Initialiser(reader.read)
    value = parameter(initialiser)
    initialiser.write(value, "normal_", normal, (), draws=True)
    once = value.expression
    initialiser.write(value, "mul_", doubled, (), draws=False)
    initialiser.release()
    state = torch.get_rng_state()
    assert torch.equal(reader.read(value.expression, "again"), kept(value).view(SHAPE))
    assert torch.equal(reader.read(once, "again") * 2, kept(value).view(SHAPE))  # as it was before the second
    assert torch.equal(torch.get_rng_state(), state)


def test_a_skipped_draw_keeps_its_place_in_the_order() -> None:
    torch.manual_seed(5)
    torch.rand(7)
    state = torch.get_rng_state()
    expected = torch.empty(SHAPE).normal_()

    torch.manual_seed(5)
    initialiser = Initialiser(refused)
    value = parameter(initialiser)
    initialiser.skip(lambda: torch.rand(7))
    assert torch.equal(torch.get_rng_state(), state)  # also where nothing is drawn after it, as by `from_pretrained`
    initialiser.write(value, "normal_", normal, (), draws=True)
    initialiser.release()
    assert torch.equal(kept(value).view(SHAPE), expected)


def test_with_random_state_restores_it() -> None:
    torch.manual_seed(1)
    first_of_one = torch.rand(3)
    torch.manual_seed(1)
    one = torch.get_rng_state()
    torch.manual_seed(2)
    two = torch.get_rng_state()
    assert torch.equal(with_random_state(one, lambda: torch.rand(3)), first_of_one)
    assert torch.equal(torch.get_rng_state(), two)

    def fails() -> None:
        torch.rand(3)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        with_random_state(one, fails)
    assert torch.equal(torch.get_rng_state(), two)


def test_without_a_random_state_numbers_are_drawn_as_ever() -> None:
    torch.manual_seed(1)
    expected = torch.rand(6)
    torch.manual_seed(1)
    assert torch.equal(torch.cat([with_random_state(None, lambda: torch.rand(3)), torch.rand(3)]), expected)


# -- what is held ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [FlatRange(0, 20), FlatRange(7, 12), FlatRange(20, 20)])
def test_what_this_rank_needs_is_kept(keep: FlatRange) -> None:
    initialiser = Initialiser(refused)
    value = parameter(initialiser, keep)
    initialiser.write(value, "copy_", lambda whole, _: whole.view(-1).copy_(torch.arange(20)), (), draws=False)
    assert value.initialised is None  # still whole
    initialiser.release()
    assert value.initialised is not None
    assert value.initialised.flat.tolist() == list(range(keep.start, keep.end))
    assert (value.initialised.first, value.initialised.shape) == (keep.start, SHAPE)
    assert (value.initialised.dtype, value.initialised.origin) == (torch.float32, INITIALISED)


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


def test_memory_that_was_not_written_is_zero() -> None:
    initialiser = Initialiser(refused)
    value = parameter(initialiser)
    initialiser.write(value, "fill_", lambda whole, _: whole[1].fill_(3), (), draws=False)
    initialiser.release()
    assert kept(value).view(SHAPE).sum(dim=1).tolist() == [0, 15, 0, 0]


def test_releasing_twice_changes_nothing() -> None:
    initialiser = Initialiser(refused)
    initialiser.release()
    value = parameter(initialiser)
    initialiser.write(value, "fill_", lambda whole, _: whole.fill_(1), (), draws=False)
    initialiser.release()
    held = value.initialised
    initialiser.release()
    assert value.initialised is held is not None


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


def test_a_loaded_value_is_read_and_so_is_what_is_written() -> None:
    reader = Reader()
    initialiser = Initialiser(reader.read)
    value = SharedValue(ex.hold(torch.ones(SHAPE)), initialiser, keep=ALL)
    added = ex.hold(torch.full(SHAPE, 4.0))
    initialiser.write(value, "add_", lambda whole, others: whole.add_(others[0]), [added], draws=False)
    initialiser.release()
    assert kept(value).unique().tolist() == [5]
    assert reader.reasons == [INITIALISED, "add_"]


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


# -- where values are not wanted -------------------------------------------------------------------------------------


def test_noting_reads_draws_and_runs_nothing() -> None:
    reader = Reader()
    initialiser = Initialiser(refused, reader.note)
    value, loaded = parameter(initialiser, FlatRange(7, 12)), SharedValue(ex.hold(torch.ones(SHAPE)), initialiser)

    def run(whole: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
        raise AssertionError("a write is done")

    def draw() -> None:
        raise AssertionError("a skipped draw is done")

    state = torch.get_rng_state()
    initialiser.skip(draw)
    initialiser.write(value, "normal_", run, (), draws=True)
    initialiser.write(loaded, "add_", run, [ex.hold(torch.ones(SHAPE))], draws=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert reader.reasons == [INITIALISED, "add_"]  # of the loaded one, and what is added
    assert value.initialised is not None
    assert (value.initialised.flat.device.type, value.initialised.flat.numel()) == ("meta", 5)
    assert (value.initialised.first, value.initialised.shape) == (7, SHAPE)
    assert (value.expression.shape, value.expression.dtype) == (SHAPE, torch.float32)
