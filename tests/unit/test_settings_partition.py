"""Choosing the modules that ZeRO-3 partitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowmem_load.ds.engine import entry_modules
from lowmem_load.ds.zero3_target import (
    MARK,
    check_ties,
    choose,
    chosen_parameters,
    mark,
    partitioned_modules,
)
from lowmem_load.errors import ConfigError


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.act = nn.GELU()


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.vision, self.language = Tower(), Tower()
        self.head = nn.Linear(2, 2, bias=False)
        if tied:
            self.head.weight = self.language.layers[0].weight


@pytest.mark.parametrize(
    ("partition", "names"),
    [
        ("language", ["language"]),
        (["head", "language"], ["language", "head"]),  # in the order of the model
        ("lang*", ["language"]),
        ("*.layers.1", ["vision.layers.1", "language.layers.1"]),
        (["language", "language.layers.0"], ["language"]),  # topmost only
        (Tower, ["vision", "language"]),
        (lambda name, module: isinstance(module, nn.Linear) and name.startswith("h"), ["head"]),
        (lambda name, module: "layers.0" not in name, ["vision", "language", "head"]),
        ([Tower, "head"], ["vision", "language", "head"]),
        ([], []),
        (Model, [""]),
    ],
)
def test_choose(partition: Any, names: list[str]) -> None:
    model = Model()
    chosen = choose(model, partition)
    assert list(chosen) == names
    assert all(chosen[name] is model.get_submodule(name) for name in names)


@pytest.mark.parametrize(
    ("partition", "text"),
    [
        ("langauge", "'langauge' choose(s) no module of Model; its modules are vision, "),
        (["language", nn.Conv2d], "Conv2d choose(s) no module"),
        ("*.act", "vision.act, language.act hold(s) no parameter"),
        (7, "cannot use 7"),
        ([int], "cannot use <class 'int'>"),
    ],
)
def test_choices_that_mean_nothing_are_refused(partition: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(Model(), partition)
    assert text in str(caught.value)


def test_where_nothing_need_match_the_rest_is_left_out() -> None:
    assert choose(Model(), [nn.Conv2d, "*.act", "head"], must_match=False).keys() == {"head"}


def test_a_tie_between_the_parts_is_refused_with_what_to_add() -> None:
    model = Model(tied=True)
    with pytest.raises(ConfigError, match=r"head\.weight is tied .* choose 'head' too"):
        check_ties(model, choose(model, "language"))
    check_ties(model, choose(model, ["language", "head"]))
    check_ties(model, choose(model, "vision"))


def test_marks_survive_what_is_put_below_and_around() -> None:
    model = Model()
    mark(choose(model, ["language", "head"]).values())
    model.language.layers[0].adapter = nn.Linear(2, 1)  # as PEFT does
    outer = nn.ModuleDict({"inner": model})
    found = partitioned_modules(outer, lambda _: False)
    assert list(found) == ["inner.language", "inner.head"]
    assert id(model.language.layers[0].adapter.weight) in chosen_parameters(found)
    assert not getattr(model.vision, MARK, False)


def test_parameters_partitioned_by_other_means_are_found() -> None:
    model = Model()
    partitioned = {id(model.head.weight), id(model.vision.layers[1].weight)}

    def is_partitioned(parameter: torch.Tensor) -> bool:
        return id(parameter) in partitioned

    assert list(partitioned_modules(model, is_partitioned)) == ["vision.layers.1", "head"]
    partitioned |= {id(parameter) for parameter in model.language.parameters()}
    assert list(partitioned_modules(model, is_partitioned)) == ["vision.layers.1", "language", "head"]  # topmost
    assert list(partitioned_modules(model, lambda _: True)) == [""]
    mark([model.language.layers])  # may be called on its own
    assert list(partitioned_modules(model, is_partitioned)) == ["vision.layers.1", "language.layers", "head"]


def test_a_wrapper_that_answers_for_a_marked_module_is_not_marked() -> None:
    class Wrapper(nn.Module):  # as PeftModel
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.prompt, self.base = nn.Embedding(2, 2), model

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("base"), name)

    model = Model()
    mark([model])
    wrapper = Wrapper(model)
    assert getattr(wrapper, MARK)
    assert list(partitioned_modules(wrapper, lambda _: False)) == ["base"]


def test_lists_are_entered_through_their_items() -> None:
    model = Model()
    chosen = choose(model, ["language.layers", "head"])
    assert list(entry_modules(chosen)) == [*model.language.layers, model.head]
