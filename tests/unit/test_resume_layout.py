"""training_checkpoints/zero_checkpoint.py: any range of any parameter is found in the files of any number of ranks."""

import math

import pytest
import torch

from lowmem_load.planning.expression import Expression, Source
from lowmem_load.planning.nest import plan_copies
from lowmem_load.planning.proof import prove_coverage
from lowmem_load.planning.regions import FlatRange, partition_range
from lowmem_load.training_checkpoints.zero_checkpoint import FP32, SavedParameter, group_numel, partitioned, place_group
from tests.zero_checkpoint import partitions, sub_groups

SHAPES = {"a": (5, 7), "b": (1,), "scalar": (), "c": (13,), "d": (4, 3, 2), "e": (2,), "f": (64,)}
HEADER = 16
"""Bytes before the tensors in each file."""


def evaluated(expression: Expression, elements: FlatRange, files: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what the copies of some elements of an expression take of the files."""
    made = torch.full((elements.numel,), math.nan)
    copies = list(plan_copies(expression, elements))
    prove_coverage("a part", [copy.nest for copy in copies], elements.numel)
    for copy in copies:
        assert isinstance(copy.leaf, Source) and copy.nest.is_run
        first = (copy.leaf.start - HEADER) // 4 + copy.nest.source
        made[copy.nest.destination : copy.nest.destination + copy.nest.numel] = files[copy.leaf.path][
            first : first + copy.nest.numel
        ]
    return made


@pytest.mark.parametrize("sub_group_size", [1, 20, 1000])
@pytest.mark.parametrize("saved_by", range(1, 9))
def test_partitions_of_any_world_are_found(saved_by: int, sub_group_size: int) -> None:
    torch.manual_seed(saved_by)
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    shapes = {name: value.shape for name, value in values.items()}
    groups = sub_groups(shapes, saved_by, sub_group_size)
    files: dict[str, torch.Tensor] = {}
    flats: list[list[Source]] = []
    for rank in range(saved_by):
        pieces = [[partitions(values[name], saved_by)[rank] for name in group] for group in groups]
        files[f"r{rank}"] = torch.cat([piece for group in pieces for piece in group])
        start, mine = HEADER, []
        for group in pieces:
            mine.append(Source(f"r{rank}", "flat", start, (sum(map(len, group)),), torch.float32))
            start += 4 * mine[-1].shape[0]
        assert [source.shape[0] for source in mine] == [group_numel(group, saved_by) for group in groups]
        flats.append(mine)
    found: dict[str, SavedParameter] = {}
    for number, group in enumerate(groups):
        found |= place_group(number, group, {FP32: [mine[number] for mine in flats]}, {"step": number})
    assert list(found) == list(SHAPES)
    for name, value in values.items():
        saved = found[name]
        assert saved.values.shape == SHAPES[name] and name in groups[saved.scalars["step"]]
        for world_size in range(1, 10):
            for rank in range(world_size):
                wanted = partition_range(saved.values.numel, rank, world_size)
                part = evaluated(*saved.values.part(wanted), files)
                assert torch.equal(part, value.reshape(-1)[wanted.start : wanted.end])


def test_a_fragment_may_be_empty() -> None:
    source = Source("f", "empty", 0, (0,), torch.float32)
    saved = partitioned((0, 4), [source])
    assert saved.numel == 0
    assert evaluated(*saved.part(FlatRange(0, 0)), {}).numel() == 0
