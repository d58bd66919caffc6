"""From a `from_pretrained` to a described model, its plan and what is made of it: values, and what they cost."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lowmem_load.config.settings import Settings, read_settings
from lowmem_load.engines.target import Layout, Replicated, Target
from lowmem_load.engines.zero3_target import Zero3
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.files.executor import Executor
from lowmem_load.files.source import LocalFile
from lowmem_load.load.describe import Described
from lowmem_load.load.execute import execute
from lowmem_load.load.make_plan import PlannedModel, make_plan
from lowmem_load.planning.load_plan import PlannedFile, SlowPath, TargetPlan
from lowmem_load.planning.regions import FlatRange
from lowmem_load.symbolic.constructor import Context
from lowmem_load.symbolic.tensor import SymbolicTensor, make_uninitialised
from tests.described import CPU, Build, X, Y, described, module, planned, write_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_file(tmp_path)


def executed(found: Described) -> PlannedModel:
    """Execute the plan, which says what that reads."""
    result = make_plan(found, 0)
    with Executor() as executor:
        execute(result, found.target, executor)
        assert executor.stats.read_bytes == result.plan.costs.read_bytes
    return result


def missing(context: Context, *shape: int) -> SymbolicTensor:
    """A parameter that no file has."""
    made = make_uninitialised(torch.empty(shape, device="meta"), context.read_now)
    made.initialise_in(context.initialiser, FlatRange(0, made.numel()))
    return made


def constant(context: Context, numel: int, value: float) -> nn.Module:
    """A model with one parameter that no file has, and that is initialized."""
    made = missing(context, numel)
    made.fill_(value)
    context.initialiser.release()
    return module(weight=made)


# -- what is read while describing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "name", "nbytes"),
    [
        (lambda x: x[x > 1], "aten.index.Tensor", 2 * X.nbytes),  # for the mask, too
        (lambda x: torch.bernoulli(x / 10), "aten.bernoulli.default", X.nbytes),
        (lambda x: x[x > 1].flip(0), "aten.index.Tensor", 2 * X.nbytes),  # computed from a value that is held
        (lambda x: x * x[0, 1].item(), "aten._local_scalar_dense.default", 4),
    ],
)
def test_what_is_read_while_describing_is_named_and_the_values_are_those_of_torch(
    operation: Callable[[torch.Tensor], torch.Tensor], name: str, nbytes: int, file: Path
) -> None:
    torch.manual_seed(0)
    found = described(file, lambda tensors, _: module(weight=operation(tensors["x"]).detach()))
    assert executed(found).plan.read_to_describe == ((name, nbytes),)
    torch.manual_seed(0)
    assert torch.equal(found.model.get_parameter("weight"), operation(X))


def written_into(tensors: dict[str, torch.Tensor], context: Context) -> nn.Module:
    """As PEFT's OLoRA changes the weights that it adapts."""
    tensors["x"].initialise_in(context.initialiser, FlatRange(0, 24))
    tensors["x"].sub_(1.0)
    context.initialiser.release()
    return module(weight=tensors["x"])


def written_from_another(tensors: dict[str, torch.Tensor], context: Context) -> nn.Module:
    """As a missing parameter that is initialised from one that is there."""
    made = missing(context, 4, 6)
    made.copy_(tensors["y"])
    context.initialiser.release()
    return module(weight=made)


@pytest.mark.parametrize("build", [written_into, written_from_another])
def test_a_plan_without_values_is_that_of_the_load(build: Build, file: Path) -> None:
    """What is read for a parameter that is written into while the model is described is named in both."""
    plans = [make_plan(described(file, build, holds_values=holds_values), 0).plan for holds_values in (True, False)]
    assert plans[0].read_to_describe == plans[1].read_to_describe
    assert plans[0] == plans[1]


def test_without_values_a_missing_parameter_is_noted_and_not_allocated(file: Path) -> None:
    found = described(file, lambda _, context: constant(context, 1 << 40, 1.0), holds_values=False)  # 4 TiB
    assert found.read_to_describe == ()
    assert found.model.get_parameter("weight").shape == (1 << 40,)


# -- what is described -----------------------------------------------------------------------------------------------


def test_the_description_names_its_files_and_keeps_transformers_info(file: Path) -> None:
    found = described(file, lambda tensors, _: module(weight=tensors["x"]))
    (opened,) = found.files
    source = LocalFile(str(file))
    assert opened == PlannedFile(str(file), file.stat().st_size, opened.digest, "")
    assert opened.version == source.version
    source.close()
    assert (found.name, found.info["missing_keys"]) == ("model", {"m"})
    assert isinstance(found.model.get_parameter("weight"), SymbolicTensor)


# -- settings and targets --------------------------------------------------------------------------------------------


AUTO = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}


def with_config(model: nn.Module, hidden_size: int) -> nn.Module:
    made: Any = model
    made.config = SimpleNamespace(hidden_size=hidden_size)
    return model


def test_each_model_gets_its_own_settings_and_target_once(file: Path) -> None:
    asked: list[tuple[nn.Module, Settings]] = []

    def build(tensors: dict[str, torch.Tensor], context: Context) -> nn.Module:
        inner = with_config(module(weight=tensors["y"]), 4)
        for _ in range(3):
            context.keeps_of(inner)
        return with_config(nn.ModuleDict({"inner": inner}), 8)

    def make_target(settings: Settings, model: nn.Module) -> Target:
        asked.append((model, settings))
        return Replicated(CPU)

    found = described(file, build, make_target, read_settings(AUTO, world_size=1))
    sizes = [settings.ds_config["zero_optimization"]["reduce_bucket_size"] for _, settings in asked]
    assert sizes == [4 * 4, 8 * 8]
    assert asked[0][0] is found.model["inner"] and asked[1][0] is found.model
    assert found.settings is asked[1][1]


def test_a_model_within_that_the_settings_do_not_fit_is_kept_whole(file: Path) -> None:
    """The outer one has a hidden size, which "auto" needs; the inner one has none."""
    kept: list[FlatRange] = []

    def build(tensors: dict[str, torch.Tensor], context: Context) -> nn.Module:
        inner = module(weight=tensors["x"])
        kept.append(context.keeps_of(inner)(inner.get_parameter("weight")))
        return with_config(nn.ModuleDict({"inner": inner}), 8)

    def run(build: Build) -> None:
        described(file, build, lambda settings, _: Zero3(settings, 0, CPU), read_settings(AUTO, world_size=3))

    run(build)
    assert kept == [FlatRange(0, 24)]
    with pytest.raises(ConfigError, match="no hidden_size"):
        run(lambda tensors, _: module(weight=tensors["x"]))


# -- what costs more than its bytes ----------------------------------------------------------------------------------


NOW = "made of the result of aten.{}, which ran while the model was described"


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda x: x, []),
        (lambda x: x.reshape(3, 8)[1:].half(), []),
        (lambda x: x.exp(), []),
        (lambda x: x.flip(0), ["aten.flip.default ran on full tensors"]),
        (lambda x: x[::2, ::3], ["gathered from scattered bytes"]),  # elements 0, 3, 12, 15 in one read
        (lambda x: x[x > 1], [NOW.format("index.Tensor")]),
        (lambda x: torch.bernoulli(x / 10), [NOW.format("bernoulli.default")]),
        (lambda x: torch.bernoulli(x / 10).t() + 1, [NOW.format("bernoulli.default")]),
        (
            lambda x: x[torch.nonzero(x[:, 0] > 1)[:, 0]],  # rows 2 and 3
            ["aten.index.Tensor ran on full tensors", NOW.format("nonzero.default")],
        ),
    ],
)
def test_a_slow_path_names_the_operation(
    operation: Callable[[torch.Tensor], torch.Tensor], expected: list[str], file: Path
) -> None:
    plan = planned(file, lambda tensors, _: module(weight=operation(tensors["x"]).detach()))
    assert plan.slow_paths == [SlowPath("weight", reason) for reason in expected]


def test_a_missing_parameter_is_a_slow_path_and_one_without_a_value_is_zero(file: Path) -> None:
    def build(tensors: dict[str, torch.Tensor], context: Context) -> nn.Module:
        made = missing(context, 3, 5)
        with torch.no_grad():
            made.normal_()
        context.initialiser.release()
        return module(initialised=made, forgotten=missing(context, 3, 5), read=tensors["x"])

    found = described(file, build)
    result = executed(found)
    assert result.plan.slow_paths == [SlowPath("initialised", "initialized on this rank: not in the checkpoint")]
    assert [target.name for target in result.plan.targets if target.is_uninitialised] == ["forgotten"]
    assert not found.model.get_parameter("forgotten").any()
    assert found.model.get_parameter("initialised").all()


def test_a_parameter_that_has_no_value_at_all_is_refused(file: Path) -> None:
    with pytest.raises(UnsupportedError, match="weight: transformers gave it no value"):
        planned(file, lambda *_: module(weight=torch.empty(3, device="meta")))


# -- parameters ------------------------------------------------------------------------------------------------------


def test_a_tied_parameter_is_planned_once_under_all_its_names(file: Path) -> None:
    def build(tensors: dict[str, torch.Tensor], _: Context) -> nn.Module:
        made = nn.ModuleDict({"head": module(weight=tensors["x"]), "body": module(weight=tensors["y"])})
        made["body"].tied = made["head"].weight
        return made

    found = described(file, build)
    result = executed(found)
    assert [target.names for target in result.plan.targets] == [("head.weight", "body.tied"), ("body.weight",)]
    assert result.plan.costs.read_bytes == X.nbytes + Y.nbytes
    assert found.model["body"].tied is found.model["head"].weight
    assert torch.equal(found.model["body"].tied, X)


def test_files_are_read_front_to_back(file: Path) -> None:
    def build(tensors: dict[str, torch.Tensor], _: Context) -> nn.Module:
        return module(c=tensors["z"], held=torch.ones(2), b=tensors["x"], a=tensors["y"], cut=tensors["x"][2:])

    assert [target.name for target in planned(file, build).targets] == ["held", "b", "cut", "a", "c"]


# -- buffers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("names", "dtype"), [([], torch.bfloat16), (["norm"], torch.float32)])
def test_a_buffer_is_whole_and_as_exact_as_the_engine_keeps_it(
    names: list[str], dtype: torch.dtype, file: Path
) -> None:
    def build(tensors: dict[str, torch.Tensor], _: Context) -> nn.Module:
        made = nn.ModuleDict({"norm": nn.Module()})
        made["norm"].register_buffer("mean", tensors["z"].to(torch.bfloat16))
        made["norm"].register_buffer("count", torch.tensor(3))
        made["norm"].register_buffer("also_mean", made["norm"].mean)
        made["norm"].register_buffer("held", torch.tensor([1.5, 2.5], dtype=torch.bfloat16))
        made["norm"].register_buffer("empty", torch.empty(0, device="meta"))
        return made

    found = described(file, build, lambda *_: KeepingFp32(names))
    norm = found.model["norm"]
    before = norm.count
    result = executed(found)
    mean, count, held, _ = result.plan.buffers
    assert (mean.names, mean.dtype, mean.shape) == (("norm.mean", "norm.also_mean"), dtype, (6,))
    assert (count.names, count.dtype, count.fill) == (("norm.count",), torch.int64, None)
    assert (held.names, held.dtype) == (("norm.held",), dtype)
    assert result.plan.costs.needed_bytes == 6 * 4
    assert torch.equal(norm.mean, torch.arange(6.0).to(dtype))
    assert norm.also_mean is norm.mean
    assert norm.count is before
    assert torch.equal(norm.held, torch.tensor([1.5, 2.5], dtype=dtype))
    assert norm.empty.is_meta


class KeepingFp32(Replicated):
    def __init__(self, names: list[str]) -> None:
        super().__init__(CPU)
        self.names = names

    def fp32_buffers(self, model: nn.Module, /) -> list[torch.Tensor]:
        buffers = [buffer for name in self.names for buffer in model.get_submodule(name).buffers()]
        return [buffer for buffer in buffers if buffer.is_floating_point()]


# -- execution -------------------------------------------------------------------------------------------------------


class TwoPieces(Replicated):
    """As hpZ: two regions of each parameter, the elements of which are zero at first."""

    def __init__(self, regions: tuple[FlatRange, FlatRange], numels: tuple[int, int]) -> None:
        super().__init__(CPU)
        self.regions, self.numels = regions, numels

    def layout(self, name: str, parameter: torch.Tensor) -> Layout:
        return Layout("two", parameter.dtype, self.regions, self.numels, on_host=True)

    def make(self, plan: TargetPlan, parameter: nn.Parameter, wait: Any) -> tuple[nn.Parameter, list[torch.Tensor]]:
        self.pieces = [torch.zeros(numel) for numel in self.numels]
        return nn.Parameter(torch.empty(0)), self.pieces


def test_a_held_value_is_there_for_every_destination(file: Path) -> None:
    """hpZ's secondary partition needs a missing parameter's value after the partition was filled."""
    target = TwoPieces((FlatRange(0, 4), FlatRange(2, 10)), (4, 8))
    found = described(file, lambda _, context: constant(context, 10, 3.0), lambda *_: target)
    result = executed(found)
    assert [piece.tolist() for piece in target.pieces] == [[3.0] * 4, [3.0] * 8]
    assert not result.constants.tensors, "it is freed after its last use"


@pytest.mark.parametrize(
    ("regions", "numels", "read_numel"),
    [
        ((FlatRange(4, 8), FlatRange(2, 10)), (5, 8), 8),  # hpZ: the partition lies in the secondary one
        ((FlatRange(2, 7), FlatRange(2, 7)), (5, 6), 5),  # of one node
        ((FlatRange(0, 4), FlatRange(2, 10)), (4, 8), 12),  # of another node's rank
        ((FlatRange(20, 20), FlatRange(16, 20)), (2, 4), 4),  # padding alone
    ],
)
def test_what_two_pieces_hold_is_read_once(
    file: Path, regions: tuple[FlatRange, FlatRange], numels: tuple[int, int], read_numel: int
) -> None:
    target = TwoPieces(regions, numels)
    found = described(file, lambda tensors, _: module(weight=tensors["x"]), lambda *_: target)
    costs = executed(found).plan.costs
    assert costs.read_bytes == costs.needed_bytes == 4 * read_numel
    for piece, region, numel in zip(target.pieces, regions, numels, strict=True):
        padding = [0.0] * (numel - region.numel)
        assert piece.tolist() == X.flatten()[region.start : region.end].tolist() + padding
