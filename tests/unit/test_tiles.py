"""saved_state.py: blocks make up the tensor that they were cut from, or it is said which part is missing."""

import random
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowmem_load.errors import CheckpointError
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import read_whole
from lowmem_load.planning.expression import expand, hold
from lowmem_load.planning.regions import FlatRange
from lowmem_load.training_checkpoints.saved_state import Tile, assemble
from tests.pickles import colliding


def cut(tensor: torch.Tensor, offsets: tuple[int, ...], rng: random.Random, depth: int) -> list[Tile]:
    """Cut a block along random dims, again and again."""
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    if not depth or not dims:
        return [Tile(offsets, hold(tensor))]
    dim = rng.choice(dims)
    first = rng.randint(1, tensor.shape[dim] - 1)
    parts = tensor.split([first, tensor.shape[dim] - first], dim)
    moved = tuple(start + first * (place == dim) for place, start in enumerate(offsets))
    return [*cut(parts[0], offsets, rng, depth - 1), *cut(parts[1], moved, rng, depth - 1)]


def values_of(expression: object) -> torch.Tensor:
    with Executor() as executor:
        return read_whole(executor, expression)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(0, 4), st.randoms(use_true_random=False))
def test_blocks_make_up_the_tensor(shape: list[int], depth: int, rng: random.Random) -> None:
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    tiles = cut(tensor, (0,) * len(shape), rng, depth)
    tiles += rng.choices(tiles, k=2)  # replicas
    rng.shuffle(tiles)
    made = assemble("x", tuple(shape), tiles)
    assert torch.equal(values_of(made.whole), tensor)
    start = rng.randint(0, tensor.numel() - 1)
    end = rng.randint(start + 1, tensor.numel())
    expression, span = made.part(FlatRange(start, end))
    assert torch.equal(values_of(expression).view(-1)[span.start : span.end], tensor.view(-1)[start:end])


def tile(offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tile:
    return Tile(offsets, hold(torch.zeros(shape)))


@pytest.mark.parametrize(
    ("tiles", "text"),
    [
        ([], "no chunk of it was saved"),
        ([tile((0, 0), (2, 3))], r"indices 2 to 4 of dim 0 are in no chunk"),
        ([tile((2, 0), (2, 3))], r"indices 0 to 2 of dim 0 are in no chunk"),
        ([tile((0, 0), (1, 3)), tile((2, 0), (2, 3))], r"indices 1 to 2 of dim 0 are in no chunk"),
        ([tile((0, 0), (4, 2))], r"indices 2 to 3 of dim 1 are in no chunk"),
        ([tile((0, 0), (3, 3)), tile((2, 0), (2, 3))], "overlap"),
        ([tile((0, 0), (2, 2)), tile((0, 2), (2, 1)), tile((2, 0), (2, 2))], "in no chunk"),
        ([tile((0, 0), (5, 3))], r"a chunk ends at \(5, 3\), the tensor at \(4, 3\)"),
    ],
)
def test_what_is_missing_is_named(tiles: list[Tile], text: str) -> None:
    with pytest.raises(CheckpointError, match=f"^folder: weight: .*{text}"):
        assemble("folder: weight", (4, 3), tiles)


def test_tensors_without_dims_and_without_elements() -> None:
    assert values_of(assemble("x", (), [tile((), ())]).whole).shape == ()
    assert values_of(assemble("x", (0, 3), [tile((0, 0), (0, 3))]).whole).shape == (0, 3)


def test_chunks_within_each_other_without_end_are_refused() -> None:
    """Rows and columns in turn, each as long as what is left: their expression would be as deep, and so recursion."""
    size, tiles = 2400, list[Tile]()
    values = hold(torch.zeros(1, 1))
    for first in range(size):
        tiles.append(Tile((first, first), expand(values, (1, size - first))))
        if first + 1 < size:
            tiles.append(Tile((first + 1, first), expand(values, (size - first - 1, 1))))
    with pytest.raises(CheckpointError, match="x: its chunks lie as no save places them"):
        assemble("x", (size, size), tiles)


def test_places_with_equal_hashes_take_no_longer() -> None:
    values = hold(torch.zeros(1, 1))
    tiles = [Tile(place, values) for place in colliding(12_000)]
    began_s = time.process_time()
    with pytest.raises(CheckpointError, match="are in no chunk"):
        assemble("x", (1 << 60, 1 << 60), tiles)
    assert time.process_time() - began_s < 1.0
