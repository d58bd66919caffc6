"""What ranks read together over a network is read once, and every rank gets its elements; in threads, over sockets."""

from __future__ import annotations

import functools
import itertools
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_load.errors import TruncatedFileError
from lowmem_load.planning import cooperative, exchange
from lowmem_load.planning import expression as ex
from lowmem_load.planning.cooperative import Shared, Wanted, reads_of, wanted
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.ranges import partition_range
from lowmem_load.planning.reads import Apply, Fill, Loop, Read, ReadCost, ReadLimits, Scatter
from lowmem_load.ranks.connections import Connections
from lowmem_load.ranks.group import StoppedError
from lowmem_load.read.exchange import ExchangedReads
from lowmem_load.read.executor import Executor
from tests.together import CONTENT, NUMEL, VALUES, fills, in_threads, leaf, move


def cut_bands(patch: pytest.MonkeyPatch, band_bytes: int) -> None:
    patch.setattr(exchange, "schedule_of", functools.partial(cooperative.schedule_of, band_bytes=band_bytes))


@pytest.mark.parametrize("world_size", [1, 2, 63, 64, 65, 100, 1000, 1024, 1025])
def test_groups_are_runs_of_ranks_and_nearly_of_one_size(world_size: int) -> None:
    groups = [exchange.group_of(rank, world_size) for rank in range(world_size)]
    assert all(rank in group for rank, group in enumerate(groups))
    distinct = list(dict.fromkeys(groups))
    assert list(itertools.chain.from_iterable(distinct)) == list(range(world_size))
    sizes = {len(group) for group in distinct}
    assert max(sizes) <= exchange.MAX_RANKS and max(sizes) - min(sizes) <= 1


@settings(max_examples=60, deadline=None)
@given(
    dims=st.permutations([0, 1, 2]),
    num_ranks=st.integers(2, 9),
    staging=st.sampled_from([64, 700, 1 << 20]),
    gap=st.sampled_from([0, 40, 1 << 20]),
    block=st.sampled_from([1, 512]),
    message=st.sampled_from([129, 1 << 14]),
)
def test_messages_bring_each_element_once_and_nothing_else(
    dims: list[int], num_ranks: int, staging: int, gap: int, block: int, message: int
) -> None:
    """Both sides, each from what it has heard, without files and streams."""
    node = ex.permute(leaf(), dims)
    _, plans = fills(node, num_ranks, ReadLimits(staging, staging, gap))
    reads = [[read for step in fill.steps for read in reads_of(step)] for fill in plans]
    letters = [exchange.encoded_ranges(wanted(mine), block) for mine in reads]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "MESSAGE_BYTES", message)
        cut_bands(patch, message)
        found = exchange.agreed_schedule(letters, num_ranks)
        assert found is not None
        index, content = exchange.BandIndex(found), torch.frombuffer(bytearray(CONTENT), dtype=torch.uint8)
        covered = torch.zeros(len(CONTENT), dtype=torch.int32)
        for part in (part.wanted for band in found.bands for part in band):
            covered[part.start : part.end] += 1
        assert (covered <= 1).all(), "a byte is read twice"
        for rank, mine in enumerate(reads):
            asked = exchange.decoded_reads(exchange.encoded_reads(mine))
            got = torch.full((plans[rank].numel,), -1, dtype=torch.int32)
            for number, band in enumerate(found.bands):
                on_both_sides = [
                    list(
                        exchange.messages(
                            each, [n for n, read in enumerate(each) if number in index.bands_of(read)], band
                        )
                    )
                    for each in (asked, mine)
                ]
                for parts, same in zip(*on_both_sides, strict=True):
                    assert parts[-1].place + parts[-1].nbytes <= message
                    sent = torch.full((message,), 255, dtype=torch.uint8)
                    for part in parts:
                        whole = content[part.segment.wanted.start : part.segment.wanted.end].clone().view(torch.int32)
                        values = sent[part.place : part.place + part.nbytes].view(torch.int32)
                        move(exchange.sent(part.scatter), whole, values)
                    for part in same:
                        values = sent[part.place : part.place + part.nbytes].view(torch.int32)
                        before = move(exchange.received(part.scatter), values, got)
                        assert (before == -1).all(), "an element came twice"
            own = partition_range(NUMEL, rank, num_ranks)
            assert torch.equal(got, VALUES.permute(dims).reshape(-1)[own.start : own.end])


def test_an_element_that_goes_to_many_places_is_sent_once() -> None:
    read = Read(leaf(), 10, 4, (), Scatter(0, 0, (Loop(3, 0, 1), Loop(4, 1, 3)), ()), is_direct=False)
    found = exchange.agreed_schedule([exchange.encoded_ranges(wanted([read]), 1)], 1)
    assert found is not None
    ((part,),) = exchange.messages([read], [0], found.bands[0])
    assert part.nbytes == 16
    assert exchange.received(part.scatter) == Scatter(0, 0, (Loop(4, 1, 3), Loop(3, 0, 1)), ())


def test_what_is_too_much_to_keep_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_RANGES", 3)
    few, others = ([Wanted("f", 0, 1, 10 * n, 10 * n + 5) for n in range(*span)] for span in ((0, 2), (2, 4)))
    letters = [exchange.encoded_ranges(each, 1) for each in (few, others, few + others)]
    assert exchange.agreed_schedule([letters[0]] * 2, 2) is not None
    assert exchange.agreed_schedule(letters[:2], 2) is None, "of all ranks"
    assert exchange.agreed_schedule([letters[2], letters[0]], 2) is None, "of one"


def test_over_a_network_reads_are_shared_of_which_the_storage_reads_more() -> None:
    def pays(numel: int, block_bytes: int) -> bool:
        read = Read(leaf(), 0, numel, (), Scatter(0, 0, (Loop(numel, 1, 1),), ()), is_direct=True)
        alone_s, shared_s = cooperative._seconds([read], ReadCost(block_bytes=block_bytes), times_moved=0)
        return alone_s > cooperative.MIN_ADVANTAGE_OVER_NETWORK * shared_s

    assert pays(1 << 18, 1 << 20) and pays(1 << 20, 1 << 20), "1 and 4 MiB"
    assert not pays(1 << 23, 1 << 20), "32 MiB, of which the ends do not count"
    assert not pays(1 << 18, 1), "a run, where blocks do not count"


# -- in threads --------------------------------------------------------------------------------------------------------


def together(num_ranks: int, act: Callable[[int, Connections], object]) -> list[Any]:
    """Returns what `act` returns or raises for each rank, each in a thread, connected with all others."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(num_ranks)]
    for one, other in itertools.combinations(range(num_ranks), 2):
        sockets[one][other], sockets[other][one] = socket.socketpair()
        for each in (sockets[one][other], sockets[other][one]):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the smallest there is: all messages wait
    streams = [Connections(place, range(num_ranks), sockets[place]) for place in range(num_ranks)]
    found = in_threads(num_ranks, lambda place: act(place, streams[place]))
    for each in streams:
        each.close()
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(CONTENT)
    return path


def load(
    plans: Sequence[Fill], planner: Planner, results: Sequence[torch.Tensor], **more: Any
) -> Callable[..., object]:
    def on_rank(place: int, streams: Connections) -> object:
        steps = plans[place].steps
        paths = [steps[0].tensor.path] if isinstance(steps[0], Read) else more["paths"]
        sharing = ExchangedReads(steps, paths, streams, 512, check=more.get("check", lambda: None))
        executor = more["executors"][place] if "executors" in more else Executor()
        with executor:
            assert sharing.take(plans[place], results[place], planner.material).steps == ()
            shared = sharing.run(executor, planner.values, planner.material)
            assert shared is None or executor.stats.read_bytes == shared.read_bytes
            return shared

    return on_rank


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_what_is_exchanged_equals_torch(file: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands so small that each rank reads many, a file that is read once, elements that are cast on their way."""
    cut_bands(monkeypatch, 300)
    node = ex.cast(ex.permute(leaf(file), (2, 0, 1)), torch.float64)
    planner, plans = fills(node, num_ranks, ReadLimits(1 << 20, 1 << 20, 1 << 20))
    results = [torch.full((fill.numel,), -1.0, dtype=torch.float64) for fill in plans]
    found = together(num_ranks, load(plans, planner, results))
    assert torch.equal(torch.cat(results), VALUES.permute(2, 0, 1).reshape(-1).double())
    assert all(isinstance(each, Shared) and each.over_network for each in found), found
    assert sum(each.read_bytes for each in found) == NUMEL * 4
    assert sum(each.sent_bytes for each in found) == sum(each.exchanged_bytes for each in found) > 0
    assert {each.num_rounds > 4 for each in found} == {True}
    own = sum(fill.numel * 4 for fill in plans) - sum(each.sent_bytes for each in found)
    assert 0 < own < NUMEL * 4, "a rank does not send to itself what it has read"


def test_an_operation_is_computed_once_its_inputs_have_come(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_bands(monkeypatch, 600)
    turned = ex.permute(leaf(file), (2, 0, 1))
    parts = (turned, ex.expand(ex.reshape(ex.slice_dim(turned, 2, 3, 1, 1), (30, 5, 1)), (30, 5, 12)))
    node = ex.Elementwise("sum", lambda inputs: inputs[0] + inputs[1], parts, (30, 5, 12), torch.int32)
    planner, plans = fills(node, 2, ReadLimits(1 << 12, 1 << 12, 1 << 20))
    assert all(isinstance(step, Apply) for fill in plans for step in fill.steps)
    results = [torch.full((fill.numel,), -1, dtype=torch.int32) for fill in plans]
    assert all(isinstance(each, Shared) for each in together(2, load(plans, planner, results, paths=[str(file)])))
    expected = VALUES.permute(2, 0, 1)
    assert torch.equal(torch.cat(results), (expected + expected[:, :, 3:4]).reshape(-1))


def test_ranks_may_have_the_file_in_different_folders(tmp_path: Path) -> None:
    """Each reads its own: where another rank has it, this one's machine may have an older copy."""

    class Here(Executor):
        def __init__(self, path: Path) -> None:
            super().__init__()
            self.path = path

        def read_range(self, path: str, start: int, memory: torch.Tensor, what: str) -> None:
            assert path == str(self.path)
            super().read_range(path, start, memory, what)

    executors, plans = [], []
    for rank in range(2):
        path = tmp_path / str(rank)
        path.write_bytes(CONTENT)
        executors.append(Here(path))
        planner, of_ranks = fills(ex.permute(leaf(path), (2, 0, 1)), 2, ReadLimits(1 << 20, 1 << 20, 1 << 20))
        plans.append(of_ranks[rank])
    results = [torch.full((fill.numel,), -1, dtype=torch.int32) for fill in plans]
    found = together(2, load(plans, planner, results, executors=executors))
    assert all(isinstance(each, Shared) for each in found), found
    assert torch.equal(torch.cat(results), VALUES.permute(2, 0, 1).reshape(-1))
    assert sum(each.read_bytes for each in found) == NUMEL * 4


@pytest.mark.parametrize("limit", ["planning.exchange.MAX_RANGES", "read.exchange.MAX_ASKED"])
def test_where_there_is_too_much_all_read_alone(file: Path, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"lowmem_load.{limit}", 0)
    monkeypatch.setattr("lowmem_load.read.exchange.encoded_reads", None)  # what is too much is not even written out
    planner, plans = fills(ex.permute(leaf(file), (2, 0, 1)), 3, ReadLimits())
    results = [torch.full((fill.numel,), -1, dtype=torch.int32) for fill in plans]
    assert together(3, load(plans, planner, results)) == [None] * 3
    assert torch.equal(torch.cat(results), VALUES.permute(2, 0, 1).reshape(-1))


def test_nobody_waits_in_a_circle_however_little_a_connection_holds(tmp_path: Path) -> None:
    values = torch.arange(6 * 60 * 200, dtype=torch.int32).reshape(6, 60, 200)
    (tmp_path / "data").write_bytes(values.numpy().tobytes())
    node = ex.permute(ex.Source(str(tmp_path / "data"), "w", 0, values.shape, torch.int32), (2, 0, 1))
    planner, plans = fills(node, 7, ReadLimits(1 << 20, 1 << 20, 1 << 20))
    results = [torch.full((fill.numel,), -1, dtype=torch.int32) for fill in plans]
    found = together(7, load(plans, planner, results))
    assert torch.equal(torch.cat(results), values.permute(2, 0, 1).reshape(-1))
    assert {each.num_rounds for each in found} == {1}, "messages of whole bands, which no connection holds"


def test_a_rank_that_fails_is_not_waited_for(file: Path) -> None:
    """Its own error is raised there; the others stop as soon as their connections to it, or to one that stops, end."""

    class Failing(Executor):
        def read_range(self, *args: object) -> None:
            raise TruncatedFileError("ended early")

    planner, plans = fills(ex.permute(leaf(file), (2, 0, 1)), 3, ReadLimits(1 << 20, 1 << 20, 1 << 20))
    results = [torch.empty(fill.numel, dtype=torch.int32) for fill in plans]
    found = together(3, load(plans, planner, results, executors=[Executor(), Failing(), Executor()]))
    assert [type(each) for each in found] == [StoppedError, TruncatedFileError, StoppedError]
    assert "stopped because the connection to rank " in str(found[0])


def test_a_rank_that_waits_looks_around_and_gets_on_while_it_reads_nothing() -> None:
    """One that hangs while it reads is named by its life signs, those that wait for it are not."""
    asked = threading.Event()

    def check() -> None:
        asked.set()
        raise InterruptedError

    def wait(place: int, streams: Connections) -> object:
        if place == 1:
            return asked.wait(20)
        sharing = ExchangedReads((), [], streams, 512, check=check)
        with pytest.raises(InterruptedError):
            sharing.run(Executor(), (), Planner(ReadLimits()).material)
        before = sharing.waited
        sharing._check = lambda: None
        for sharing._num_reading in (0, 1):
            sharing._check_waiting(never)
        return sharing.waited - before

    never: Any = type("Never", (), {"done": lambda self: False})()
    assert together(2, wait) == [1, True]
