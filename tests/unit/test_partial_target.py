"""The target of partial ZeRO-3 sends each parameter to one of two, whichever these are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import nn

from lowmem_load.errors import ConfigError
from lowmem_load.planning.load_plan import TargetPlan
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.targets.make_target import Partial
from lowmem_load.targets.target import Layout


class Noting:
    """A target that notes what it is asked."""

    def __init__(self, kind: str) -> None:
        self.kind, self.device, self.calls = kind, torch.device("cpu"), list[str]()

    def layout(self, _: str, parameter: torch.Tensor) -> Layout:
        numel = parameter.numel()
        return Layout(self.kind, parameter.dtype, (FlatRange(0, numel),), (numel,), on_host=True)

    def fp32_buffers(self, model: nn.Module, /) -> list[torch.Tensor]:
        return list(model.buffers())

    def prepare(self, _: nn.Module, /) -> None:
        self.calls.append("prepare")

    def files(self, plans: Sequence[TargetPlan], /) -> Mapping[str, int]:
        return {self.kind: len(plans)}

    def make(
        self, plan: TargetPlan, parameter: nn.Parameter, _: Callable[[], None]
    ) -> tuple[nn.Parameter, list[torch.Tensor]]:
        self.calls.append(f"make {plan.name}")
        return parameter, []

    def finish(self) -> None:
        self.calls.append("finish")


def model(*, tied: bool = False) -> nn.Module:
    made = nn.ModuleDict({"a": nn.Linear(2, 2), "ab": nn.Linear(2, 2), "norm": nn.BatchNorm1d(2)})
    if tied:
        made["ab"].weight = made["a"].weight
    return made


@pytest.mark.parametrize(
    ("chosen", "inside"),
    [
        (("a",), ["a.weight", "a.bias"]),
        (("a", "norm"), ["a.weight", "a.bias", "norm.weight", "norm.bias"]),
        ((), []),
        (("",), ["a.weight", "a.bias", "ab.weight", "ab.bias", "norm.weight", "norm.bias"]),
    ],
)
def test_a_parameter_goes_where_its_module_does(chosen: tuple[str, ...], inside: list[str]) -> None:
    whole = model()
    target = Partial(chosen, Noting("in"), Noting("out"))
    kinds = {name: target.layout(name, parameter).kind for name, parameter in whole.named_parameters()}
    assert [name for name, kind in kinds.items() if kind == "in"] == inside
    assert set(kinds.values()) <= {"in", "out"}


def test_both_are_prepared_and_finished_and_make_their_own() -> None:
    inside, outside, whole = Noting("in"), Noting("out"), model()
    target = Partial(("a",), inside, outside)
    target.prepare(whole)
    for name in ("a.weight", "ab.weight"):
        plan = TargetPlan((name,), (2, 2), torch.float32, "", (), False, False, (), "")
        made, _ = target.make(plan, whole.get_parameter(name), lambda: None)
        assert made is whole.get_parameter(name)
    target.finish()
    assert inside.calls == ["prepare", "make a.weight", "finish"]
    assert outside.calls == ["prepare", "make ab.weight", "finish"]


def test_buffers_are_the_engines() -> None:
    target, whole = Partial(("a",), Noting("in"), Noting("out")), model()
    assert len(target.fp32_buffers(whole)) == len(list(whole.buffers()))


def test_a_tie_across_the_border_is_refused_before_memory_is_made() -> None:
    inside, outside = Noting("in"), Noting("out")
    with pytest.raises(ConfigError, match=r"ab\.weight is tied to a parameter of a chosen module"):
        Partial(("a",), inside, outside).check(model(tied=True))
    assert inside.calls == outside.calls == []
    Partial(("a", "ab"), inside, outside).check(model(tied=True))
