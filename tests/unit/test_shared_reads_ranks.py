"""Which ranks of a node read together, and the reason where none do. The other ranks are simulated."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Sequence

import pytest

from lowmem_load.distributed.nodes import SharedMemory, map_memory_of
from lowmem_load.io.executor import Executor
from lowmem_load.pipeline.make_plan import Planned
from lowmem_load.pipeline.shared_reads import (
    ALONE,
    ReadSharing,
    SharedBuffer,
    SharedReads,
)
from lowmem_load.planning import expression as ex
from lowmem_load.planning.planner import Constants
from lowmem_load.planning.reads import ReadCost
from tests.together import leaf, plan_of

NEIGHBOURS = ((0, 2, 4), (1, 3), (0, 2, 4), (1, 3), (0, 2, 4))
"""Of each rank: there are two nodes."""

ELSEWHERE = SharedMemory(1 << 30, 5, "name")
"""Memory of a process that is not there."""

PLANNED = Planned(plan_of(ex.permute(leaf(), (2, 0, 1)), 5, ReadCost()), Constants(), {}, {}, {})


def ended() -> None:
    raise InterruptedError


def meet(rank: int, sharing: ReadSharing, others: Sequence[SharedMemory | None]) -> SharedReads | None:
    offers = [sharing.offer if each == rank else place for each, place in enumerate(others)]
    return sharing.meet(rank, NEIGHBOURS[rank], offers, PLANNED, ended)


def test_a_rank_meets_those_of_its_node_that_have_reads_to_share() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with contextlib.closing(ReadSharing()) as first, contextlib.closing(ReadSharing()) as second:
        first.make(ReadCost())
        second.make(ReadCost())
        for rank, mine, other in ((0, first, second), (4, second, first)):
            found = meet(
                rank,
                mine,
                [other.offer, ELSEWHERE, None, ELSEWHERE, other.offer],
            )
            assert found is not None and mine.why_alone == ""
    del found
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_rank_without_reads_to_share_meets_nobody() -> None:
    sharing = ReadSharing()
    assert meet(0, sharing, [None, None, ELSEWHERE, None, None]) is None
    assert sharing.why_alone == ""


def test_a_rank_whose_node_has_no_other_with_reads_to_share_reads_alone() -> None:
    with contextlib.closing(ReadSharing()) as sharing:
        sharing.make(ReadCost())
        assert meet(1, sharing, [ELSEWHERE, None, ELSEWHERE, None, None]) is None
        assert sharing.why_alone == ALONE


def test_a_rank_that_cannot_open_the_memory_of_another_tells_the_others_so() -> None:
    with contextlib.closing(ReadSharing()) as sharing, contextlib.closing(ReadSharing()) as other:
        sharing.make(ReadCost())
        other.make(ReadCost())
        places = [None, None, ELSEWHERE, None, other.offer]
        assert meet(0, sharing, places) is None
        assert sharing.why_alone.startswith(
            f"rank 0 cannot open the shared memory of rank 2, process {1 << 30}: [Errno 2] No such file"
        )
        assert sharing.offer is not None and other.offer is not None
        memories = [map_memory_of(offer, SharedBuffer.nbytes_for(ReadCost())) for offer in (sharing.offer, other.offer)]
        third = SharedReads((), SharedBuffer(memories, 1), ReadCost(), check=ended)
        with Executor() as executor:
            assert third.run(executor) is None, "it does not wait"
        assert third.why_alone == sharing.why_alone


def test_memory_that_cannot_be_made_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    sharing = ReadSharing()
    sharing.make(ReadCost())
    assert sharing.offer is None
    assert (
        sharing.why_alone
        == f"{SharedBuffer.nbytes_for(ReadCost())} bytes of shared memory cannot be made: not on this system"
    )
