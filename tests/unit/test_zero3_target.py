"""Targets: what ranks hold, element by element, which target a model gets, and which modules are partitioned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lowmem_load.config.settings import Partition, Settings, read_settings
from lowmem_load.engines.engine import entry_modules
from lowmem_load.engines.target import HostBytes, Target
from lowmem_load.engines.zero3_target import (
    KIND,
    MARK,
    Zero3,
    check_ties,
    choose,
    chosen_parameters,
    mark,
    partitioned_modules,
    target_maker,
)
from lowmem_load.errors import ConfigError, IncompatibleVersionError, UnsupportedError
from lowmem_load.planning.expression import hold
from lowmem_load.planning.load_plan import REPLICATED, Destination, TargetPlan
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.regions import FlatRange

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def settings(
    world_size: int,
    *,
    config: dict[str, Any] | None = None,
    partition: Partition | None = None,
    must_match: bool = False,
    **zero: Any,
) -> Settings:
    sections = {"zero_optimization": {"stage": 3, **zero}, **(config or {})}
    return read_settings(sections, world_size=world_size, partition=partition, must_match=must_match).for_model(None)


@pytest.mark.parametrize(
    ("config", "zero", "group", "message"),
    [
        ({"weight_quantization": {"quantized_initialization": {"num_bits": 8}}}, {}, None, "quantized_initialization"),
        ({}, {"offload_param": {"device": "nvme"}}, None, "offload_param.nvme_path is missing"),
        (
            {},
            {"zero_hpz_partition_size": 2, "offload_param": {"device": "nvme", "nvme_path": "/x"}},
            None,
            "no swapper for secondary",
        ),
        ({}, {"zero_hpz_partition_size": 2}, object(), "cuts secondary groups out of all ranks"),
        ({}, {"zero_hpz_partition_size": 2}, None, "zero_hpz_partition_size 2 does not divide the 3 ranks"),
        ({}, {"mics_shard_size": 2}, None, "models are not loaded under MiCS"),
    ],
)
def test_what_cannot_be_followed_is_refused(config: Any, zero: Any, group: Any, message: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        Zero3(settings(3, config=config, **zero), 0, CPU, group)


@pytest.mark.parametrize(
    ("device", "offload", "on_host"),
    [
        ("cpu", None, True),
        ("cuda", None, False),
        ("cuda", "cpu", True),
        ("cuda", "nvme", True),
        ("cuda", "none", False),
    ],
)
def test_where_memory_will_be_is_known_without_the_device(device: str, offload: str | None, on_host: bool) -> None:
    zero = {} if offload is None else {"offload_param": {"device": offload, "nvme_path": "/x"}}
    target = Zero3(settings(2, **zero), 0, torch.device(device))
    assert target.layout("w", torch.empty(4, device="meta")).on_host is on_host
    assert target.device.type == device


@pytest.mark.parametrize(
    ("device", "offload", "inside", "outside"),
    [
        ("cpu", {}, 24, 24),
        ("cuda", {}, 0, 0),
        ("cuda", {"device": "cpu"}, 24, 0),
        ("cuda", {"device": "nvme", "nvme_path": "/x", "buffer_count": 3, "buffer_size": 100}, 3 * 100 * 4, 0),
        ("cuda", {"device": "nvme", "nvme_path": "/x"}, 5 * 100_000_000 * 4, 0),
    ],
)
def test_host_memory_is_that_of_what_lies_there(device: str, offload: Any, inside: int, outside: int) -> None:
    """Under nvme the buffers of the swapper, whatever the model's size is."""
    plan = plan_of(nn.Linear(3, 2, bias=False).weight, FlatRange(0, 6))
    with_settings = settings(2, **({"offload_param": offload} if offload else {}))
    target = Zero3(with_settings, 0, torch.device(device))
    assert target.host_bytes([plan]) == HostBytes(inside)
    buffers = inside if offload.get("device") == "nvme" else 0
    assert target.host_bytes([replace(plan, kind=REPLICATED)]) == HostBytes(outside + buffers)


def plan_of(parameter: nn.Parameter, region: FlatRange) -> TargetPlan:
    fill = Planner().plan_fill("w", hold(torch.zeros(parameter.shape)), region)
    made = (Destination(region, region.numel, fill),)
    return TargetPlan(("w",), tuple(parameter.shape), torch.float32, KIND, made, False, False, (), "")


def test_memory_that_deepspeed_would_make_otherwise_is_an_error(lone_process: None) -> None:
    """And not a partition with the wrong elements."""
    target, model = Zero3(settings(1), 0, CPU), nn.Linear(3, 2, bias=False, device="meta")
    target.prepare(model)
    with pytest.raises(IncompatibleVersionError, match=r"w: DeepSpeed's partitions have \[6\] elements, those of"):
        target.make(plan_of(model.weight, FlatRange(0, 3)), model.weight, lambda: None)


def test_settings_that_deepspeed_reads_otherwise_are_an_error(lone_process: None) -> None:
    of_two = replace(settings(1), world_size=2)
    with pytest.raises(
        IncompatibleVersionError, match=r"hpZ's group \(.*, 0, 1, \(0, 0\)\) from this ds_config, the plan"
    ):
        Zero3(of_two, 0, CPU).prepare(nn.Linear(1, 1, device="meta"))


# -- which target a model gets, and the targets that consist of little else --------------------------------------------


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.ModuleDict({"body": nn.Linear(3, 4, bias=False), "head": nn.Linear(3, 5, bias=False)})


def layouts(target: Target) -> dict[str, tuple[str, tuple[Any, ...], bool]]:
    found = {name: target.layout(name, parameter) for name, parameter in model().named_parameters()}
    return {name: (layout.kind, layout.regions, layout.on_host) for name, layout in found.items()}


@pytest.mark.parametrize("partition", ["body", ["bo*"], ["tail", "body"], lambda name, _: name == "body", []])
def test_a_partition_cuts_up_what_it_chooses_and_leaves_the_rest_on_the_accelerator(partition: Partition) -> None:
    """An empty one is not the whole model."""
    target = target_maker(0, GPU)(settings(2, partition=partition), model())
    assert type(target) is Zero3
    assert target.device == GPU
    assert layouts(target) == {
        "body.weight": (KIND, (FlatRange(0, 6),), False) if partition else (REPLICATED, (FlatRange(0, 12),), False),
        "head.weight": (REPLICATED, (FlatRange(0, 15),), False),
    }


def test_an_entry_that_chooses_nothing_is_refused_where_it_must_match() -> None:
    with pytest.raises(ConfigError, match="'tail' choose"):
        target_maker(0, GPU)(settings(2, partition=["tail"], must_match=True), model())


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
    whole = nn.ModuleDict({"a": nn.Linear(2, 2), "ab": nn.Linear(2, 2), "norm": nn.BatchNorm1d(2)})
    target = Zero3(settings(2), 0, CPU, None, chosen)
    kinds = {name: target.layout(name, parameter).kind for name, parameter in whole.named_parameters()}
    assert [name for name, kind in kinds.items() if kind == KIND] == inside
    assert set(kinds.values()) <= {KIND, REPLICATED}


# -- choosing the modules that ZeRO-3 partitions -----------------------------------------------------------------------


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
    ("partition", "names"),
    [
        ("language.head", ["head"]),
        (["language.tower", nn.Linear], ["head", "language.vision"]),  # its layers are below
        ("language.tower.layers", ["language.vision.layers"]),
    ],
)
def test_a_shared_module_is_chosen_by_any_of_its_names(partition: Any, names: list[str]) -> None:
    model = nn.ModuleDict({"head": nn.Linear(2, 2), "language": nn.ModuleDict({"vision": Tower()})})
    model["language"]["head"], model["language"]["tower"] = model["head"], model["language"]["vision"]
    chosen = choose(model, partition)
    assert list(chosen) == names
    assert all(chosen[name] is model.get_submodule(name) for name in names)


@pytest.mark.parametrize(
    ("partition", "text"),
    [
        ("langauge", "'langauge' choose(s) no module of Model; its modules are vision, "),
        (["language", nn.Conv2d], "Conv2d choose(s) no module"),
        ("*.act", "vision.act, language.act has no parameters"),
        (7, "cannot use 7"),
        ([int], "cannot use <class 'int'>"),
    ],
)
def test_choices_that_mean_nothing_are_refused(partition: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(Model(), partition)
    assert text in str(caught.value)


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
