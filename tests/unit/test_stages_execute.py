"""A plan is executed: what is made, put in place and told to the target, and in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowmem_load.errors import CheckpointError
from lowmem_load.io.executor import Executor
from lowmem_load.pipeline.execute import execute
from lowmem_load.pipeline.make_plan import PlannedModel, make_plan
from lowmem_load.planning.load_plan import TargetPlan
from lowmem_load.planning.regions import FlatRange
from lowmem_load.symbolic.constructor import Context
from lowmem_load.symbolic.tensor import make_uninitialised
from lowmem_load.target import Layout, Replicated, Target
from tests.described import CPU, Build, X, described, module, write_file

META = torch.device("meta")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_file(tmp_path)


class Noting(Replicated):
    """Whole parameters; notes that it was finished."""

    is_finished = False

    def finish(self) -> None:
        self.is_finished = True


def prepared(file: Path, build: Build, target: Target) -> tuple[nn.Module, PlannedModel]:
    found = described(file, build, lambda *_: target)
    return found.model, make_plan(found, 0)


def run(file: Path, build: Build, target: Target | None = None) -> tuple[nn.Module, PlannedModel]:
    target = target or Replicated(CPU)
    model, planned = prepared(file, build, target)
    with Executor() as executor:
        execute(planned, target, executor)
    return model, planned


# -- the target ------------------------------------------------------------------------------------------------------


def test_the_target_is_not_finished_where_a_file_has_changed(file: Path) -> None:
    target = Noting(CPU)
    _, planned = prepared(file, lambda tensors, _: module(a=tensors["x"]), target)
    file.write_bytes(file.read_bytes() + b"x")
    with Executor() as executor, pytest.raises(CheckpointError, match=r"model\.safetensors"):
        execute(planned, target, executor)
    assert not target.is_finished


# -- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marked", [True, False])
def test_what_is_known_of_a_parameter_stays_known(marked: bool, file: Path) -> None:
    def build(tensors: dict[str, torch.Tensor], _: Context) -> nn.Module:
        made = module(weight=tensors["x"])
        made.weight.requires_grad_(marked)
        made.weight._is_hf_initialized = marked  # type: ignore[assignment]
        return made

    model, _ = run(file, build)
    weight = model.get_parameter("weight")
    assert (weight.requires_grad, getattr(weight, "_is_hf_initialized", False)) == (marked, marked)


# -- buffers ---------------------------------------------------------------------------------------------------------


def with_buffers(tensors: dict[str, torch.Tensor], _: Context) -> nn.Module:
    made = nn.Module()
    made.register_buffer("read", tensors["z"].to(torch.float64))
    made.register_buffer("also_read", made.read)
    made.register_buffer("held", torch.tensor([1.5, 2.5]))
    return made


def test_a_buffer_is_read_and_one_that_is_where_it_belongs_stays_the_same_object(file: Path) -> None:
    model, planned = prepared(file, with_buffers, Replicated(CPU))
    before = model.get_buffer("held")
    with Executor() as executor:
        execute(planned, Replicated(CPU), executor)
    assert torch.equal(model.get_buffer("read"), torch.arange(6.0, dtype=torch.float64))
    assert model.get_buffer("also_read") is model.get_buffer("read")
    assert model.get_buffer("held") is before


def test_a_buffer_is_cast_to_the_dtype_of_its_plan(file: Path) -> None:
    class KeepingFp32(Replicated):
        def fp32_buffers(self, model: nn.Module, /) -> list[torch.Tensor]:
            return [buffer for buffer in model.buffers() if buffer.is_floating_point()]

    def build(tensors: dict[str, torch.Tensor], _: Context) -> nn.Module:
        made = nn.Module()
        made.register_buffer("held", torch.tensor([1.5, 2.5], dtype=torch.bfloat16))
        made.register_buffer("count", torch.tensor(3))
        return made

    model, _ = run(file, build, KeepingFp32(CPU))
    assert model.get_buffer("held").dtype == torch.float32
    assert model.get_buffer("held").tolist() == [1.5, 2.5]
    assert model.get_buffer("count").dtype == torch.int64


def test_a_buffer_that_transformers_left_on_meta_stays_there(file: Path) -> None:
    def build(tensors: dict[str, torch.Tensor], _: Context) -> nn.Module:
        made = nn.Module()
        made.register_buffer("empty", torch.empty(2, device=META))
        return made

    model, _ = run(file, build)
    assert model.get_buffer("empty").is_meta


# -- values that several destinations, or other values, need -----------------------------------------------------------


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

    def build(_: dict[str, torch.Tensor], context: Context) -> nn.Module:
        made = make_uninitialised(torch.empty(10, device="meta"), context.read_now)
        made.initialise_in(context.initialiser, FlatRange(0, 10))
        made.fill_(3.0)
        context.initialiser.release()
        return module(weight=made)

    target = TwoPieces((FlatRange(0, 4), FlatRange(2, 10)), (4, 8))
    found = described(file, build, lambda *_: target)
    result = make_plan(found, 0)
    with Executor() as executor:
        execute(result, found.target, executor)
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
    result = make_plan(found, 0)
    assert result.plan.costs.read_bytes == result.plan.costs.needed_bytes == 4 * read_numel
    with Executor() as executor:
        execute(result, found.target, executor)
        assert executor.stats.read_bytes == 4 * read_numel
    for piece, region, numel in zip(target.pieces, regions, numels, strict=True):
        padding = [0.0] * (numel - region.numel)
        assert piece.tolist() == X.flatten()[region.start : region.end].tolist() + padding


def test_a_held_value_is_there_for_values_computed_from_it(file: Path) -> None:
    def build(tensors: dict[str, torch.Tensor], _: Context) -> nn.Module:
        held_back = tensors["x"][tensors["x"] > 3]  # read at once, held
        return module(a=held_back, b=held_back.flip(0))

    found = described(file, build)
    result = make_plan(found, 0)
    with Executor() as executor:
        execute(result, found.target, executor)
    expected = X[X > 3]
    assert torch.equal(found.model.get_parameter("a"), expected)
    assert torch.equal(found.model.get_parameter("b"), expected.flip(0))
