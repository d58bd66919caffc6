"""Buckets and messages: what all ranks send is put together to what a whole model holds. No ranks are started."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from lowmem_load.errors import PlanError
from lowmem_load.files.memory import scatter_elements, source_elements
from lowmem_load.planning.expression import Expression, Source, cast, concat, numel, permute, slice_dim
from lowmem_load.planning.nest import Nest, plan_copies
from lowmem_load.planning.regions import (
    Distribution,
    FlatRange,
    Grid,
    Region,
    Split,
    flat_ranges,
    grid_of,
    partition_range,
)
from lowmem_load.weights_out.buckets import (
    Messages,
    PlannedTensor,
    Unit,
    message_lengths,
    plan_buckets,
    plan_messages,
    sent_in,
)

NOTHING = FlatRange(0, 0)


def source(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Source:
    return Source("", name, 0, shape, dtype)


def planned(name: str, expression: Expression) -> PlannedTensor:
    copies = tuple(plan_copies(expression, FlatRange(0, numel(expression))))
    return PlannedTensor(name, expression.shape, expression.dtype, copies)


def unit(name: str, nbytes: int) -> Unit:
    return Unit((planned(name, source(name, nbytes, dtype=torch.uint8)),))


def names(buckets: list[list[Unit]]) -> list[str]:
    return ["".join(one.name for one in sent_in(bucket)) for bucket in buckets]


def test_a_bucket_ends_before_the_tensor_that_would_exceed_it() -> None:
    units = [unit(name, nbytes) for name, nbytes in zip("abcdefg", (6, 3, 10, 4, 4, 12, 1), strict=True)]
    # c and f have 10 bytes or more. a + b = 9, + c = 19; d + e = 8, + f = 20.
    assert names(plan_buckets(units, 10)) == ["ab", "c", "de", "f", "g"]
    assert names(plan_buckets(units, 1)) == list("abcdefg")
    assert names(plan_buckets(units, 1000)) == ["abcdefg"]
    assert plan_buckets([], 10) == []


def flat_regions(shape: tuple[int, ...], world_size: int) -> list[Region]:
    return [partition_range(math.prod(shape), rank, world_size) for rank in range(world_size)]


def grids(shape: tuple[int, ...], world_size: int, dim: int, split_factor: int = 1) -> list[Region]:
    return [grid_of(shape, [Split(dim, world_size, rank, split_factor)]) for rank in range(world_size)]


def messages_of(
    bucket: list[Unit], regions: list[dict[str, Region]], shapes: Mapping[str, tuple[int, ...]]
) -> Messages:
    layouts = {name: Distribution([held[name] for held in regions], tuple(shapes[name])) for name in shapes}
    return plan_messages(bucket, layouts, len(regions), {})


def put_together(one: PlannedTensor, values: dict[str, torch.Tensor], regions: list[dict[str, Region]]) -> torch.Tensor:
    """Fills and reads the messages of all ranks."""
    result = torch.full((math.prod(one.shape),), -1, dtype=one.dtype)
    messages = messages_of([Unit((one,))], regions, {name: value.shape for name, value in values.items()})
    for rank, held in enumerate(regions):
        data = torch.empty(messages.nbytes[rank], dtype=torch.uint8)
        for part in messages.parts(rank):
            region, flat = held[part.parameter], values[part.parameter].reshape(-1)
            spans = flat_ranges(region, values[part.parameter].shape) if isinstance(region, Grid) else [region]
            memory = torch.cat([flat[span.start : span.end] for span in spans])
            piece = data[part.start :][: part.nest.numel * one.dtype.itemsize].view(one.dtype)
            piece.view([axis.size for axis in part.nest.axes]).copy_(source_elements(part.nest, memory))
            scatter_elements(Nest(0, part.nest.destination, part.nest.axes).gathered(), piece, result)
    return result.view(one.shape)


SHAPES = [(7, 5), (4, 6, 3), (11,), (1, 1), (2, 3)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_messages_are_put_together(shape: tuple[int, ...], world_size: int) -> None:
    values = {"p": torch.arange(math.prod(shape), dtype=torch.float32).view(shape), "q": torch.rand(shape)}
    p, q = source("p", *shape), source("q", *shape)
    last = len(shape) - 1
    cases: list[tuple[Expression, torch.Tensor]] = [
        (p, values["p"]),
        (concat([p, q], last), torch.cat([values["p"], values["q"]], last)),
        (slice_dim(p, 0, 0, 1, 1), values["p"][:1]),
        (permute(p, tuple(range(last, -1, -1))), values["p"].permute(*range(last, -1, -1))),
        (cast(q, torch.float16), values["q"].half()),
    ]
    layouts = [flat_regions(shape, world_size), *(grids(shape, world_size, dim) for dim in range(len(shape)))]
    layouts.append(grids(shape, world_size, 0, split_factor=2))
    layouts += [[*layout, *layout, *layout] for layout in layouts]  # three replicas
    for (expression, expected), layout in itertools.product(cases, layouts):
        regions = [{"p": region, "q": region} for region in layout]
        assert torch.equal(put_together(planned("x", expression), values, regions), expected)


def test_wide_elements_come_first_and_are_aligned() -> None:
    sizes: list[tuple[str, torch.dtype]] = [("a", torch.uint8), ("b", torch.int64), ("c", torch.bfloat16)]
    units = [Unit((planned(name, source(name, 3, dtype=dtype)),)) for name, dtype in sizes]
    messages = messages_of(units, [dict.fromkeys("abc", FlatRange(0, 3))], dict.fromkeys("abc", (3,)))
    assert [(part.parameter, part.start) for part in messages.parts(0)] == [("b", 0), ("c", 24), ("a", 30)]
    assert messages.nbytes == [33]


def test_elements_that_no_rank_holds_are_an_error() -> None:
    regions: Any = [{"a": FlatRange(0, 5)}, {"a": NOTHING}]
    with pytest.raises(PlanError, match=r"a: the ranks own 5 elements of 10; were all ranks of the model called\?"):
        messages_of([unit("a", 10)], regions, {"a": (10,)})


def test_replicas_send_a_share_each() -> None:
    regions: Any = [{"a": FlatRange(0, 5)}, {"a": FlatRange(5, 10)}] * 2
    assert messages_of([unit("a", 10)], regions, {"a": (10,)}).nbytes == [2, 2, 3, 3]


def test_messages_are_equal_unless_that_takes_too_much() -> None:
    def of(*nbytes: int, are_equal: bool = True) -> list[int]:
        return message_lengths(nbytes, 100, are_equal=are_equal)

    assert of(30, 32, 0) == [32, 32, 32]
    assert of(0, 90, 0) == [0, 96, 0], "one sender"
    assert of(0, 0, 300, 300) == [304] * 4
    assert of(0, 0, 0, 0, 300, 300) == [0, 0, 0, 0, 304, 304]
    assert of(60, 60, 0, 0) == [64] * 4
    assert of(0, 0) == [0, 0]
    assert of(7) == [16]
    assert of(30, 32, 0, are_equal=False) == [32, 32, 0]
