"""Changes: random sets of changed elements, sent by ranks that own random parts, make new tensors of the old ones."""

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowmem_load import Change, apply_changes
from lowmem_load.errors import ConfigError
from lowmem_load.files.memory import scatter_elements, source_elements
from lowmem_load.planning.expression import Expression, cast, concat, permute, slice_dim
from lowmem_load.planning.nest import Nest
from lowmem_load.planning.regions import Grid, Region, flat_ranges
from lowmem_load.weights_out import changes
from lowmem_load.weights_out.buckets import PlannedTensor, Unit
from lowmem_load.weights_out.changes import (
    change_of,
    changed_elements,
    flat_indices,
    pack,
    packed_bytes,
    read_message,
    write_message,
)
from tests.unit.test_buckets import flat_regions, grids, messages_of, planned, source

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64, torch.uint16]
HOST = torch.device("cpu")


def values_of(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bytes: also NaNs and negative zeros."""
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 2 if dtype == torch.bool else 256, (numel * dtype.itemsize,), generator=draw)
        .byte()
        .view(dtype)
    )


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def expressions(shape: tuple[int, ...], dtype: torch.dtype) -> list[Expression]:
    """What a checkpoint may have of two parameters: as they are, fused, transposed, apart, cast."""
    p, q = source("p", *shape, dtype=dtype), source("q", *shape, dtype=dtype)
    backward, last = tuple(range(len(shape)))[::-1], len(shape) - 1
    made = [p, concat([p, q], 0), permute(concat([p, q], last), backward), slice_dim(p, 0, shape[0] // 2, shape[0], 1)]
    return made if dtype.is_complex else [*made, cast(p, torch.float16)]


def full(tensor: PlannedTensor, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tensor, by the copies of its plan."""
    result = torch.zeros(math.prod(tensor.shape), dtype=tensor.dtype)
    for copy in tensor.copies:
        scatter_elements(copy.nest, values[copy.leaf.name], result)  # type: ignore[union-attr]
    return result.view(tensor.shape)


def memory_of(values: torch.Tensor, region: Region, shape: tuple[int, ...]) -> torch.Tensor:
    spans = flat_ranges(region, shape) if isinstance(region, Grid) else [region]
    return torch.cat([values[span.start : span.end] for span in spans] or [values[:0]])


@given(st.data())
def test_changes_make_the_new_tensor(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dtype, seed = data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(0, 1000))
    tensor = planned("x", data.draw(st.sampled_from(expressions(shape, dtype))))
    world_size, numel = data.draw(st.integers(1, 4)), math.prod(shape)
    layouts = [flat_regions(shape, world_size), *(grids(shape, world_size, dim) for dim in range(len(shape)))]
    held: Any = [{"p": region, "q": region} for region in data.draw(st.sampled_from(layouts))]
    old = {name: values_of(numel, dtype, seed + place) for place, name in enumerate("pq")}
    new = {name: value.clone() for name, value in old.items()}
    for name in "pq":
        for place in data.draw(st.sets(st.integers(0, numel - 1))):
            new[name][place : place + 1] = values_of(1, dtype, seed + place + 7)
    messages, parts = messages_of([Unit((tensor,))], held, dict.fromkeys("pq", shape)), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "CHUNK_NUMEL", data.draw(st.sampled_from([1, 5, 1 << 20])))
        for rank, of_rank in enumerate(held):
            pieces = []
            for part in messages.parts(rank):
                before, present = (
                    memory_of(values[part.parameter], of_rank[part.parameter], shape) for values in (old, new)
                )
                snapshot, wanted = (torch.empty(part.nest.numel, dtype=tensor.dtype) for _ in range(2))
                for memory, result in ((before, snapshot), (present, wanted)):
                    elements = source_elements(part.nest, memory)
                    result.view(elements.shape).copy_(elements)
                pieces.append(changed_elements(part.nest, present, snapshot, HOST))
                assert equal_bits(snapshot, wanted), "the snapshot has what was sent"
            packed = pack(pieces)
            message = torch.zeros(packed_bytes(packed), dtype=torch.uint8)
            write_message(packed, message)
            parts += [
                (part.nest, positions, values)
                for part, positions, values in read_message(message, messages.parts(rank), [tensor])
            ]
    state = {"x": full(tensor, old)}
    change = change_of(tensor.shape, parts)
    assert change.indices.dtype == torch.int32 and len(change.indices.unique()) == len(change.indices)
    apply_changes(state, [("x", change)])
    assert equal_bits(state["x"], full(tensor, new))
    if all(positions is not None for _, positions, _ in parts):
        differs = full(tensor, old).view(-1, 1).view(torch.uint8) != full(tensor, new).view(-1, 1).view(torch.uint8)
        assert len(change.values) == int(differs.any(1).sum()), "what is equal is not sent"


def test_a_part_is_sent_in_full_if_that_is_fewer_bytes() -> None:
    nest = Nest(0, 0, planned("x", source("p", 300)).copies[0].nest.axes)
    for dtype, most in ((torch.bfloat16, 99), (torch.float32, 149)):  # 6 bytes instead of 2, and 8 instead of 4
        for num_changed in (0, 1, most, most + 1):
            before, present = torch.zeros(300, dtype=dtype), torch.zeros(300, dtype=dtype)
            present[:num_changed] = 1
            found = changed_elements(nest, present, before, HOST)
            assert [len(piece) for piece in found] == ([num_changed] * 2 if num_changed <= most else [300])
            assert torch.equal(found[-1], present[: len(found[-1])])


def test_indices_of_many_elements() -> None:
    """A tensor has more elements than int32 counts, and its part too."""
    rows, columns = 1 << 17, 1 << 17
    nest = planned("x", permute(source("p", rows, columns), (1, 0))).copies[0].nest
    places = torch.tensor([0, 1, columns, rows * columns - 1])
    found = change_of((columns, rows), [(nest, places, torch.zeros(4))])
    assert found.indices.dtype == torch.int64
    assert sorted(found.indices.tolist()) == sorted([0, 1, rows, rows * columns - 1])
    assert flat_indices(Nest(3, 5, ()), torch.tensor([0])).tolist() == [5]


def change(indices: list[int], values: list[float], shape: tuple[int, ...] = (2, 3)) -> Change:
    return Change(torch.tensor(indices, dtype=torch.int32), torch.tensor(values), shape)


def test_apply_changes() -> None:
    transposed = torch.zeros(3, 2).t()
    state = {"a": torch.nn.Parameter(torch.zeros(2, 3)), "b": torch.zeros(()), "c": transposed, "d": torch.zeros(2)}
    pairs = [("a", change([4, 1], [4.0, 1.0])), ("b", change([0], [2.0], ())), ("d", torch.ones(2))]
    apply_changes(state, iter([*pairs, ("c", change([5, 0], [5.0, 1.0]))]))
    assert state["a"].tolist() == [[0, 1, 0], [0, 4, 0]] and state["b"].item() == 2 and state["d"].tolist() == [1, 1]
    assert transposed.tolist() == [[1, 0, 0], [0, 0, 5]] and state["c"] is transposed


@pytest.mark.parametrize(
    ("name", "new", "match"),
    [
        ("z", torch.zeros(1), "z: is not in the state"),
        (
            "b",
            torch.zeros(3),
            r"b: is torch.float32 of shape \(2, 3\), but the change is torch.float32 of shape \(3,\)",
        ),
        ("b", torch.zeros(2, 3, dtype=torch.float16), "but the change is torch.float16"),
        ("b", change([0], [1.0], (3, 2)), r"of shape \(3, 2\)"),
        ("b", change([0, 6], [1.0, 1.0]), "indices reach from 0 to 6"),
        ("b", change([-1], [1.0]), "indices reach from -1 to -1"),
        ("b", change([0, 1], [1.0]), r"has \(2,\) indices for \(1,\) values"),
    ],
)
def test_nothing_is_written_if_a_change_does_not_fit(name: str, new: Any, match: str) -> None:
    state = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}
    with pytest.raises(ConfigError, match=f"apply_changes: .*{match}"):
        apply_changes(state, [("a", torch.ones(2, 3)), (name, new)])
    assert not any(tensor.any() for tensor in state.values()), re.escape(match)
