"""The digest of models in a plain process, and its sums. Partitioned models: `tests/multi_rank/test_integrity.py`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowmem_load import UnsupportedError, model_digest
from lowmem_load.saving import model_digest as module
from lowmem_load.saving.model_digest import BLOCK_UNITS, LANES, PIECE_BLOCKS, Keys, add, sums_of

KEYS = Keys()
LONG = (PIECE_BLOCKS + 2) * BLOCK_UNITS + 77
"""Units of more than one piece, the last of which ends within a block."""


class Net(nn.Module):
    """Tied weights, a norm with buffers of several dtypes, one buffer that is not saved, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(7, 5)
            self.norm = nn.BatchNorm1d(5)
            self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("positions", torch.arange(4), persistent=False)


def bit(values: torch.Tensor) -> None:
    with torch.no_grad():
        values.view(torch.int32).view(-1)[-1] ^= 1


def test_equal_models_have_equal_digests() -> None:
    digest = model_digest(Net())
    assert digest == model_digest(Net()) and {len(each) for each in digest.values()} == {64}
    of_norm = {f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    assert set(digest) == {"embedding.weight", "scale", *of_norm}, "ties once, and no buffer that is not saved"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda net: bit(net.head.weight), "embedding.weight"),
        (lambda net: bit(net.scale), "scale"),
        (lambda net: bit(net.norm.running_var), "norm.running_var"),
        (lambda net: net.norm.num_batches_tracked.add_(1), "norm.num_batches_tracked"),
        (lambda net: setattr(net, "scale", nn.Parameter(net.scale.detach().view(1))), "scale"),
        (lambda net: setattr(net.norm, "bias", nn.Parameter(net.norm.bias.detach().half())), "norm.bias"),
        (lambda net: setattr(net.head, "weight", nn.Parameter(net.head.weight.detach().clone())), "head.weight"),
    ],
    ids=["a bit", "a bit of a scalar", "a buffer", "a count", "a shape", "a dtype of zeros", "a tie"],
)
def test_a_change_is_found_and_named(change: Callable[[Net], None], name: str) -> None:
    net, before = Net(), model_digest(Net())
    change(net)
    after = model_digest(net)
    differing = {each for each in {*before, *after} if before.get(each) != after.get(each)}
    assert name in differing
    assert len(differing) == (2 if name == "head.weight" else 1), "the tied one loses a name"


def test_what_does_not_count() -> None:
    net = Net()
    net.positions.add_(1)
    net.embedding.weight.requires_grad_(False)
    net.embedding.weight.data = net.embedding.weight.detach().t().contiguous().t()  # other strides, equal values
    assert model_digest(net) == model_digest(Net())


def test_wrappers_are_looked_into() -> None:
    assert model_digest(nn.DataParallel(Net())) == model_digest(Net())
    owner = nn.Module()
    owner.module = Net()
    assert set(model_digest(owner)) == {f"module.{name}" for name in model_digest(Net())}, "a model, not a wrapper"


def test_what_has_no_values_is_refused() -> None:
    net = Net()
    net.scale = nn.Parameter(torch.empty(1, device="meta"))
    with pytest.raises(UnsupportedError, match="scale: is on the meta device"):
        model_digest(net)


# -- sums ------------------------------------------------------------------------------------------------------------


def drawn(num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    data = bytearray(random.Random(3).randbytes(num_bytes))
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype)


def expected(values: torch.Tensor, start: int = 0) -> tuple[int, ...]:
    """The formula of [Note: sums of values], unit by unit."""
    units = values.view(torch.int8 if values.itemsize == 1 else torch.int16).tolist()
    first = start * max(1, values.itemsize // 2)
    inner = KEYS.inner.to(torch.int64).tolist()
    totals = [0] * LANES
    for position, unit in enumerate(units, first):
        block, place = divmod(position, BLOCK_UNITS)
        outer = KEYS.outer(block, 1)[0].tolist()
        for lane in range(LANES):
            totals[lane] += outer[lane] * inner[place][lane] * unit
    return tuple(total % 2**64 for total in totals)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.bool])
@pytest.mark.parametrize("start", [0, 1, 700])
def test_it_is_the_sum_of_the_note(dtype: torch.dtype, start: int) -> None:
    values = drawn(4800, torch.uint8).remainder(2).bool() if dtype == torch.bool else drawn(4800, dtype)
    assert sums_of(values, start, KEYS) == expected(values, start)


def test_the_largest_sums_are_exact() -> None:
    """A block of the most negative units: what float64 could round."""
    values = torch.full((BLOCK_UNITS,), -(2**15), dtype=torch.int16)
    assert sums_of(values, 0, KEYS) == expected(values)
    assert float((KEYS.inner.sum(0) * 2**15).max()) < 2**53


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_pieces_add_up_wherever_they_are_cut(dtype: torch.dtype) -> None:
    values = drawn(LONG * 4, dtype)
    whole = sums_of(values, 0, KEYS)
    draw = random.Random(4)
    for num_cuts in (1, 2, 7):
        cuts = [0, *sorted(draw.randrange(values.numel()) for _ in range(num_cuts)), values.numel()]
        parts = [sums_of(values[first:last], first, KEYS) for first, last in itertools.pairwise(cuts)]
        draw.shuffle(parts)
        assert add(parts) == whole, cuts


def test_work_done_at_a_time_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    values = drawn(20 * BLOCK_UNITS + 4, torch.bfloat16)
    whole = sums_of(values, 5, KEYS)
    monkeypatch.setattr(module, "PIECE_BLOCKS", 3)
    assert sums_of(values, 5, KEYS) == whole


def test_any_change_changes_all_lanes() -> None:
    values = drawn(8 * BLOCK_UNITS, torch.int16)
    whole = sums_of(values, 0, KEYS)
    changed: dict[str, torch.Tensor] = {name: values.clone() for name in ("bit", "swapped", "sign", "two")}
    changed["bit"][1500] ^= 1
    changed["swapped"][[10, 11]] = changed["swapped"][[11, 10]]
    changed["sign"][-1] ^= -(2**15)
    changed["two"][0] += 1  # and one less, a block further on
    changed["two"][BLOCK_UNITS] -= 1
    changed["shifted"] = values.roll(BLOCK_UNITS)
    changed["blocks swapped"] = torch.cat([values[BLOCK_UNITS : 2 * BLOCK_UNITS], values[:BLOCK_UNITS], values[2048:]])
    for name, other in changed.items():
        found = sums_of(other, 0, KEYS)
        assert all(ours != theirs for ours, theirs in zip(found, whole, strict=True)), name


def test_nothing_is_zero() -> None:
    assert sums_of(torch.empty(0), 3, KEYS) == (0,) * LANES


def test_what_was_once_computed_stays() -> None:
    """Digests are kept and compared by later releases, on other machines."""
    assert sums_of(torch.arange(3000, dtype=torch.int32), 9, KEYS)[:2] == (13628526809699411462, 6653677233172169804)
