"""Building a model: values that a constructor computes are real, parameters are on meta, and the rest is named."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lowmem_load.errors import UnsupportedError
from lowmem_load.phases import host_memory
from lowmem_load.planning.expression import Expression
from lowmem_load.symbolic.attributes import hand_over_attributes
from lowmem_load.symbolic.constructor import Constructor
from lowmem_load.symbolic.initialise import Initialiser


def read_nothing(expression: Expression, reason: str) -> torch.Tensor:
    raise AssertionError(f"{reason} read {expression}")


def indexed() -> torch.Tensor:
    table = torch.empty(6, dtype=torch.long)
    table[torch.tensor([0, 2, 4])] = 7
    table[torch.tensor([1, 3, 5])] = 9
    return table


def written_in_parts(*writes: Callable[[torch.Tensor], object]) -> torch.Tensor:
    table = torch.empty(2, 3)
    for write in writes:
        write(table)
    return table


PARTS: dict[str, Callable[[torch.Tensor], object]] = {
    "second row by out=": lambda x: torch.add(torch.ones(3), 1, out=x[1]),
    "second row as bytes": lambda x: x[1].view(torch.uint8).fill_(0),
    "second row in a transposed view": lambda x: x.t()[:, 1].copy_(torch.arange(3.0)),
}


def spread() -> torch.Tensor:
    table = torch.empty(4)
    table[1:] = 1.0
    table.cumsum_(0)
    table[0] = 0.0
    return table


VALUES: dict[str, Callable[[], torch.Tensor]] = {
    "out=": lambda: torch.add(torch.ones(2), torch.ones(2), out=torch.empty(2)),
    "sparse": lambda: torch.eye(3).to_sparse().to_dense() + torch.eye(3).to_sparse_csr().to_dense(),
    "a known part": lambda: written_in_parts(lambda x: x[0].fill_(1.0))[0] * 2,
    "random once": lambda: torch.zeros(3).uniform_().fill_(3.0),
    **{name: lambda part=part: written_in_parts(lambda x: x[0].fill_(1.0), part) for name, part in PARTS.items()},
    "rotary": lambda: torch.outer(torch.arange(32).float(), 1.0 / 1e4 ** (torch.arange(8) / 8)).cos(),
    "tensor": lambda: torch.tensor(np.linspace(0, 1, 5)).bfloat16(),
    "items": lambda: torch.tensor([rate.item() for rate in torch.linspace(0, 0.1, 4)]),
    "numpy": lambda: torch.from_numpy(torch.arange(4).numpy() * 2),
    "data": lambda: torch.empty(3).data.fill_(2.0),
    "own generator": lambda: torch.randn(4, generator=torch.Generator().manual_seed(3)),
    "no elements": lambda: torch.empty(0, 3),
    "copied": lambda: copy.deepcopy(torch.arange(4)),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("name", VALUES)
def test_what_a_constructor_computes_is_real(name: str) -> None:
    constructor = Constructor()
    with constructor.building():
        made = VALUES[name]()
    assert constructor.is_known(made)
    expected = VALUES[name]()
    assert made.dtype == expected.dtype
    assert torch.equal(made, expected)


def overwritten_in_part() -> torch.Tensor:
    table = torch.zeros(3, 3).normal_()
    table[0] = 0.0
    return table


UNKNOWN: dict[str, Callable[[], torch.Tensor]] = {
    "one element written": lambda: written_in_parts(lambda x: x[0, :1].fill_(1.0)),
    "spread by a sum": spread,
    "written by indexes": indexed,
    "known, then random in part": lambda: written_in_parts(lambda x: x.zero_(), lambda x: x[1].uniform_()),
    "added to": lambda: written_in_parts(lambda x: x.index_put_((torch.tensor([0, 1]),), torch.ones(3), True)),
    "resized": lambda: torch.zeros(2).resize_(6),
    "sparse memory": lambda: torch.empty(3, 3).to_sparse().to_dense(),
    **{f"only the {name}": lambda part=part: written_in_parts(part) for name, part in PARTS.items()},
    "made of random numbers": lambda: torch.zeros(3) + torch.rand(3).exp(),
    "drawn in place": lambda: torch.zeros(3).uniform_(1, 16).log(),
    "overwritten in part": overwritten_in_part,
    "memory": lambda: torch.empty(3) * 2,
    "memory of old": lambda: torch.Tensor(3),
    "a copy of memory": lambda: copy.deepcopy(torch.empty(3)),
    "too large": lambda: torch.zeros(1 << 12, (1 << 12) + 1),
    "grown too large": lambda: torch.outer(torch.arange(5000.0), torch.arange(5000.0)).tril(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_has_no_value_is_known_to_have_none(name: str) -> None:
    constructor, state = Constructor(), torch.get_rng_state()
    with constructor.building():
        made = UNKNOWN[name]()
    assert not constructor.is_known(made)
    assert torch.equal(torch.get_rng_state(), state), "no numbers are drawn, as when transformers builds on meta"


class Parts(nn.Module):
    """Layers of torch, ties and parameters that are made of values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.linear.weight
        self.first = self.second = nn.Parameter(torch.zeros(4))
        self.logs = nn.Parameter(torch.arange(1, 5).float().log(), requires_grad=False)
        self.rows = nn.Parameter(torch.cat([self.linear.weight.data, torch.zeros(1, 4)]))
        self.norm, self.lstm = nn.BatchNorm1d(3), nn.LSTM(3, 4)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.attention = nn.MultiheadAttention(8, 2)
        self.convolution = nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 3, 2))
        nn.init.trunc_normal_(self.rows)


def test_parameters_have_no_memory_and_stay_tied() -> None:
    state = torch.get_rng_state()
    with Constructor().building():
        parts = Parts()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.is_meta for parameter in parts.parameters())
    assert parts.tied.weight is parts.linear.weight
    assert parts.first is parts.second
    assert not parts.logs.requires_grad
    assert [name for name, _ in parts.named_parameters()] == [name for name, _ in Parts().named_parameters()]
    assert parts.norm.running_var is not None and torch.equal(parts.norm.running_var, torch.ones(3))


def test_a_parameter_that_only_a_list_of_the_constructor_has_is_named() -> None:
    constructor = Constructor()
    with constructor.building():
        module, weight = nn.Module(), nn.Parameter(torch.empty(3))
        module.weight, module.kept = weight, {"old": weight}
        del module.weight
    constructor.note(module)
    with pytest.raises(UnsupportedError, match="kept"):
        constructor.check("tiny", module)


def random_program(seed: int) -> Callable[[], torch.Tensor]:
    """Return what writes into memory here and there, as the constructors of position tables and masks do."""

    def part(x: torch.Tensor, draw: random.Random) -> torch.Tensor:
        rows, columns = sorted(draw.sample(range(5), 2)), sorted(draw.sample(range(5), 2))
        seen = draw.choice([x, x[slice(*rows)], x[:, slice(*columns)], x[slice(*rows), slice(*columns)]])
        return draw.choice([seen, seen.t(), seen[::2]])

    def run() -> torch.Tensor:
        draw, x, y = random.Random(seed), torch.empty(4, 4), torch.zeros(4, 4)
        for _ in range(draw.randrange(1, 9)):
            seen, other = part(x, draw), part(y, draw)
            step = draw.randrange(9)
            if step == 0:
                seen.fill_(draw.random())
            elif step == 1 and seen.shape == other.shape:
                seen.copy_(other)
            elif step == 2:
                seen.masked_fill_(torch.rand(seen.shape, generator=torch.Generator().manual_seed(seed)) > 0.4, 3.0)
            elif step == 3:
                seen.add_(1.0)
            elif step == 4:
                seen.cumsum_(0)
            elif step == 5:
                seen.index_fill_(0, torch.tensor([0]), 5.0)
            elif step == 6:
                seen[:1] = y.sum()
            elif step == 7:
                x, y = y, x
            elif step == 8:
                y = x * 2 if draw.random() < 0.5 else x.clone()
        return part(x, draw)

    return run


def test_what_is_known_does_not_depend_on_what_was_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    num_known = 0
    for program in map(random_program, range(600)):
        constructor, results, empty = Constructor(), [], torch.empty
        with constructor.building():
            is_known = constructor.is_known(program())
        for content in (0.0, 100.0):
            monkeypatch.setattr(torch, "empty", lambda *sizes, content=content: torch.full(sizes, content))
            results.append(program())
        monkeypatch.setattr(torch, "empty", empty)
        assert not is_known or torch.equal(*results)
        num_known += is_known
    assert num_known > 100  # of 600


class Drawing(nn.Module):
    """Draws random numbers, some of them into memory that it has also where the default device is meta."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.Tensor(4).uniform_())
        self.own = nn.Parameter(torch.FloatTensor(3))
        nn.init.normal_(self.own)
        self.register_buffer("noise", torch.randn(2, device="cpu"))
        self.register_buffer("signs", torch.Tensor(2).bernoulli_())
        self.other = nn.Parameter(torch.zeros(2).normal_() + torch.rand(2))
        nn.init.normal_(self.other)


def test_random_numbers_are_those_of_an_ordinary_load() -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        ordinary = Drawing()
    state = torch.get_rng_state()
    torch.manual_seed(0)
    constructor = Constructor()
    with constructor.building():
        drawing = Drawing()
    assert torch.equal(torch.get_rng_state(), state)
    for (name, tensor), (_, right) in zip(drawing.state_dict().items(), ordinary.state_dict().items(), strict=True):
        assert tensor.device == right.device, name
        assert tensor.is_meta or (torch.equal(tensor, right) and constructor.is_known(tensor)), name


class Holder(nn.Module):
    """Buffers and attributes of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("empty", torch.empty(2))
        self.register_buffer("drawn", torch.randn(2), persistent=False)
        self.register_buffer("large", torch.zeros(1 << 25), persistent=False)
        self.inner = nn.Module()
        self.inner.tables = [torch.arange(3), {"angles": (torch.randn(2), "rope")}]
        self.inner.good = (torch.arange(2), [torch.ones(1)])
        self.linear = nn.Linear(2, 2)
        self.kept = [self.linear.weight]


def test_one_error_names_all_that_has_no_value() -> None:
    constructor = Constructor()
    with constructor.building():
        holder = Holder()
    constructor.note(holder)
    with pytest.raises(UnsupportedError) as raised:
        constructor.check("tiny", holder)
    text = str(raised.value)
    assert "the constructor of Holder" in text
    for name in ("empty (made of", "drawn (made of", "large (33554432 elements", "inner.tables (made of"):
        assert name in text
    assert "good" not in text and "kept" not in text


def test_buffers_that_were_emptied_get_their_values_again_and_writes_into_others_show() -> None:
    constructor = Constructor()
    with constructor.building():
        holder = Holder()
        holder.register_buffer("steps", torch.arange(3.0), persistent=False)
        del holder.large, holder.drawn, holder.inner
    constructor.note(holder)
    holder.steps, holder.empty = torch.full((3,), 7.0), torch.full((2,), 7.0)  # as transformers does
    constructor.restore(read_nothing, initialiser := Initialiser(read_nothing))
    assert torch.equal(holder.steps, torch.arange(3.0))
    with pytest.raises(UnsupportedError, match="empty"):
        constructor.check("tiny", holder)
    holder.empty.fill_(3.0)
    initialiser.release()
    constructor.check("tiny", holder)


def test_large_zeros_and_memory_without_values_have_no_pages_before_they_are_written() -> None:
    """Otherwise small objects settle in what parameters leave behind, and the heap grows by all of them."""
    with Constructor().building():
        torch.zeros(1 << 20)  # torch imports what its modes need
        before = host_memory().anonymous_bytes
        made = [make() for _ in range(32) for make in (lambda: torch.zeros(1 << 20), lambda: torch.empty(1 << 20))]
        assert host_memory().anonymous_bytes - before < 32 << 20  # of 256 MiB
        made[0][5], made[1][:] = 1.0, 2.0
        assert made[0].sum() == 1.0
        assert made[1].stride() == (1,)
        assert made[1].eq(2.0).all()


def test_attributes_on_meta_are_handed_over_or_named() -> None:
    def build(table: torch.Tensor) -> Any:
        made = nn.Module()
        made.inner = nn.Module()
        made.inner.table, made.inner.own = {"a": table}, torch.zeros(1)
        return made

    loaded, model = build(torch.arange(3)), build(torch.empty(3, device="meta"))
    model.inner.own = torch.ones(1)
    hand_over_attributes(dict(loaded.named_modules()), dict(model.named_modules()), torch.device("cpu"))
    assert torch.equal(model.inner.table["a"], torch.arange(3))
    assert torch.equal(model.inner.own, torch.ones(1)), "what the owner has set stays"
    model.inner.added = torch.empty(3, device="meta")
    with pytest.raises(UnsupportedError, match=r"inner\.added"):
        hand_over_attributes(dict(loaded.named_modules()), dict(model.named_modules()), torch.device("cpu"))
