"""The contracts of tests/kits/ notice implementations that are wrong in one way each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from lowmem_load.errors import CheckpointError, HeaderError, TruncatedFileError
from lowmem_load.formats.format import CheckpointFile, CheckpointFormat
from lowmem_load.formats.safetensors import Safetensors
from lowmem_load.io.source import ByteSource, read_bytes
from lowmem_load.planning.expression import Expression, permute
from lowmem_load.planning.load_plan import TargetPlan
from lowmem_load.planning.ranges import FlatRange, Grid
from lowmem_load.targets.make_target import Replicated
from lowmem_load.targets.target import Layout, Target
from tests.contracts.test_formats import TestSafetensors as SafetensorsTests
from tests.kits.format import FormatContract
from tests.kits.memory import MemorySource
from tests.kits.source import SourceContract
from tests.kits.target import TargetContract


def failing(contract: SourceContract | FormatContract | TargetContract) -> list[str]:
    """Returns the names of the tests that fail, without what all of them begin with."""
    found = []
    for name, test in inspect.getmembers(contract, inspect.ismethod):
        if name.startswith("test_"):
            try:
                test()
            except (Exception, pytest.fail.Exception):
                found.append(name.removeprefix("test_"))
    return found


# -- byte sources ----------------------------------------------------------------------------------------------------


class Sources(SourceContract):
    def __init__(self, kind: type[MemorySource]) -> None:
        self.kind, self.stored = kind, dict[str, bytes]()

    def put(self, name: str, data: bytes) -> str:
        self.stored[name] = data
        return name

    def open(self, path: str) -> ByteSource:
        if path not in self.stored:
            raise CheckpointError(f"{path}: is not there")
        return self.kind(path, self.stored[path])


class Padding(MemorySource):
    """Beyond the end there are zeros."""

    def read_into(self, offset: int, memory: memoryview) -> None:
        memory[:] = self._data[offset : offset + memory.nbytes].ljust(memory.nbytes, b"\0")


class AllButTheLast(MemorySource):
    def read_into(self, offset: int, memory: memoryview) -> None:
        super().read_into(offset, memory[:-1])


class SameVersion(MemorySource):
    def __init__(self, path: str, data: bytes) -> None:
        super().__init__(path, data)
        self.version = f"{path} {len(data)}"


class OneClose(MemorySource):
    is_open = True

    def close(self) -> None:
        if not self.is_open:
            raise ValueError("closed already")
        self.is_open = False


@pytest.mark.parametrize(
    ("kind", "tests"),
    [
        (MemorySource, []),
        (Padding, ["bytes_beyond_the_end_are_an_error"]),
        (SameVersion, ["the_version_tells_whether_the_bytes_changed"]),
        (OneClose, ["closing_again_does_nothing"]),
        (
            AllButTheLast,
            [
                "bytes_beyond_the_end_are_an_error",
                "closing_again_does_nothing",
                "memory_is_filled_from_any_byte_on",
                "nothing_else_is_written",
                "threads_may_read_at_the_same_time",
            ],
        ),
    ],
)
def test_a_wrong_source_is_noticed(kind: type[MemorySource], tests: list[str]) -> None:
    assert failing(Sources(kind)) == tests


# -- formats ---------------------------------------------------------------------------------------------------------


class Formats(SafetensorsTests):
    __test__ = False  # not by pytest itself

    def __init__(self, kind: type[CheckpointFormat]) -> None:
        self.kind = kind

    def format(self) -> CheckpointFormat:
        return self.kind()


class Eager(Safetensors):
    """Reads all of a file."""

    def describe(self, source: ByteSource) -> CheckpointFile:
        read_bytes(source, 0, source.nbytes)
        return super().describe(source)


class DigestOfNames(Safetensors):
    def describe(self, source: ByteSource) -> CheckpointFile:
        file = super().describe(source)
        return replace(file, digest=" ".join(sorted(file.names)))


class Transposing(Safetensors):
    """Takes files for column-major."""

    def describe(self, source: ByteSource) -> CheckpointFile:
        file = super().describe(source)

        def expression(name: str) -> Expression:
            found = file.expression(name)
            return permute(found, range(len(found.shape))[::-1])

        return replace(file, expression=expression)


class Trusting(Safetensors):
    """Takes a file that is cut off for an empty one."""

    def describe(self, source: ByteSource) -> CheckpointFile:
        try:
            return super().describe(source)
        except (TruncatedFileError, HeaderError):
            return CheckpointFile(source.path, source.nbytes, "", (), None, {}.__getitem__)


@pytest.mark.parametrize(
    ("kind", "tests"),
    [
        (Safetensors, []),
        (Eager, ["nothing_but_headers_is_read"]),
        (DigestOfNames, ["the_digest_is_that_of_what_lies_where"]),
        (Transposing, ["a_rank_reads_its_part_of_a_tensor_and_no_more", "every_tensor_comes_back_bit_by_bit"]),
        (Trusting, ["a_file_that_is_cut_off_is_refused", "another_kind_of_file_is_refused"]),
    ],
)
def test_a_wrong_format_is_noticed(kind: type[CheckpointFormat], tests: list[str]) -> None:
    assert failing(Formats(kind)) == tests


# -- targets ---------------------------------------------------------------------------------------------------------


class Halves(Replicated):
    """Cuts every parameter in halves, one after the other, for as many ranks as there are."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(torch.device("cpu"))
        self.rank, self.world_size = rank, world_size

    def range_of(self, numel: int) -> FlatRange:
        return FlatRange(self.rank * numel // self.world_size, (self.rank + 1) * numel // self.world_size)

    def layout(self, _: str, parameter: torch.Tensor) -> Layout:
        region = self.range_of(parameter.numel())
        return Layout("cut", parameter.dtype, (region,), (region.numel,), on_host=True)

    def make(
        self, plan: TargetPlan, parameter: nn.Parameter, _: Callable[[], None]
    ) -> tuple[nn.Parameter, list[torch.Tensor]]:
        (destination,) = plan.destinations
        memory = torch.zeros(destination.numel, dtype=plan.dtype)
        return nn.Parameter(memory[: destination.region.numel], parameter.requires_grad), [memory]


class Overlapping(Halves):
    def range_of(self, numel: int) -> FlatRange:
        found = super().range_of(numel)
        return FlatRange(found.start, min(found.end + 1, numel))


class Gappy(Halves):
    def range_of(self, numel: int) -> FlatRange:
        size = numel // self.world_size
        return FlatRange(self.rank * size, (self.rank + 1) * size)


class Beyond(Halves):
    def layout(self, _: str, parameter: torch.Tensor) -> Layout:
        region = Grid(tuple(((0, size + 1),) for size in parameter.shape))
        return Layout("cut", parameter.dtype, (region,), (region.numel,), on_host=True)


class Cramped(Halves):
    def layout(self, name: str, parameter: torch.Tensor) -> Layout:
        found = super().layout(name, parameter)
        return replace(found, numels=(max(0, found.numels[0] - 1),))


class Allocating(Halves):
    def layout(self, name: str, parameter: torch.Tensor) -> Layout:
        torch.empty(parameter.shape)
        return super().layout(name, parameter)


class OfMyOwnDtype(Halves):
    def layout(self, name: str, parameter: torch.Tensor) -> Layout:
        found = super().layout(name, parameter)
        return found if self.rank else replace(found, dtype=torch.float64)


class Dirty(Halves):
    """Leaves padding as it comes."""

    def layout(self, name: str, parameter: torch.Tensor) -> Layout:
        found = super().layout(name, parameter)
        return replace(found, numels=(found.numels[0] + 1,))

    def make(
        self, plan: TargetPlan, parameter: nn.Parameter, wait: Callable[[], None]
    ) -> tuple[nn.Parameter, list[torch.Tensor]]:
        made, memory = super().make(plan, parameter, wait)
        return made, [tensor.fill_(1) for tensor in memory]


class Targets(TargetContract):
    def __init__(self, kind: type[Halves]) -> None:
        self.kind = kind

    def target(self, rank: int, world_size: int) -> Target:
        return self.kind(rank, world_size)


COVERAGE = "every_element_is_held_as_often_as_its_kind_says"


@pytest.mark.parametrize(
    ("kind", "tests"),
    [
        (Halves, []),
        (Overlapping, [COVERAGE]),
        (Gappy, [COVERAGE, "what_all_ranks_hold_is_the_parameter"]),
        (Allocating, ["a_layout_is_pure"]),
        (OfMyOwnDtype, ["ranks_agree_on_what_becomes_of_a_parameter"]),
        (Dirty, ["memory_is_made_as_planned"]),
    ],
)
def test_a_wrong_target_is_noticed(kind: type[Halves], tests: list[str]) -> None:
    assert failing(Targets(kind)) == tests


@pytest.mark.parametrize(("kind", "test"), [(Beyond, COVERAGE), (Cramped, "memory_is_large_enough_for_its_region")])
def test_regions_that_cannot_be_are_noticed(kind: type[Halves], test: str) -> None:
    """By more than one test."""
    assert test in failing(Targets(kind))
