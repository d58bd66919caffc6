"""Who reads what of the memory that several ranks fill alike: each piece once, near-equal shares, equal on all."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from lowmem_load.planning import expression as ex
from lowmem_load.planning import replicas as module
from lowmem_load.planning.load_plan import Costs, Destination, LoadPlan, TargetPlan
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.reads import Read, ReadCost, ReadLimits
from lowmem_load.planning.regions import FlatRange
from lowmem_load.planning.replicas import ShareReads, chooser, plan_replicas

NETWORK, STORE = ReadCost(1e-3, 5e8, block_bytes=1 << 20), ReadCost(0.03, 9e7, request_bytes=16 << 20)


SMALL = ReadLimits(staging_bytes=4096, max_gap_bytes=0)


def plan_of(nodes: Mapping[str, ex.Expression], holders: range, limits: ReadLimits = SMALL) -> LoadPlan:
    """Returns the plan of rank 0, whose parameters some ranks have in full."""
    planner, targets = Planner(limits), list[TargetPlan]()
    for name, node in nodes.items():
        whole = FlatRange(0, ex.numel(node))
        fill = planner.plan_fill(name, node, whole)
        destinations = (Destination(whole, fill.numel, fill, holders=holders),)
        targets.append(TargetPlan((name,), node.shape, node.dtype, "replicated", destinations, False, False, (), ""))
    return LoadPlan("model", 0, 4, tuple(targets), (), (), (), (), (), (), (), Costs())


def source(name: str, shape: tuple[int, ...], start: int = 0) -> ex.Source:
    return ex.Source("data", name, start, shape, torch.bfloat16)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_pieces_tile_each_memory_once_and_shares_are_near_equal(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(module, "BATCH_BYTES", 30_000)
    nodes: dict[str, ex.Expression] = {
        "run": source("a", (300, 400)),
        "cast": ex.cast(source("b", (70, 900)), torch.float32),
        "turned": ex.permute(source("c", (64, 90)), (1, 0)),
        "joined": ex.concat([source(f"d{number}", (10, 400), number * 8000) for number in range(9)], 0),
        "columns": ex.slice_dim(source("e", (500, 64)), 1, 8, 1, 16),
        "norm": source("f", (40,)),
    }
    (found,) = plan_replicas(plan_of(nodes, range(num_ranks)), lambda ranks: len(ranks) > 1)
    filled = {name: torch.zeros(ex.numel(node), dtype=torch.int32) for name, node in nodes.items()}
    for piece in found.pieces:
        filled[list(nodes)[piece.target]][piece.first : piece.first + piece.numel] += 1
        assert all(isinstance(step, Read) for step in piece.fill.steps)
    assert all((memory == 1).all() for memory in filled.values())
    shares = [sum(piece.read_bytes for batch in of_rank for piece in batch) for of_rank in found.batches]
    assert max(shares) - min(shares) <= 2 * max(piece.read_bytes for piece in found.pieces)
    assert sum(shares) == sum(step.read_bytes for piece in found.pieces for step in piece.fill.steps)
    assert found.num_batches > 1
    sizes = [sum(piece.nbytes for piece in batch) for of_rank in found.batches for batch in of_rank]
    assert max(sizes) < 30_000 + max(piece.nbytes for piece in found.pieces)


def test_ranks_have_one_digest_for_what_they_share() -> None:
    nodes = {"run": source("a", (300, 400))}

    def digest(plan: LoadPlan) -> str:
        (found,) = plan_replicas(plan, lambda _: True)
        return found.digest

    first = plan_of(nodes, range(2))
    assert digest(first) == digest(replace(first, rank=1))
    assert digest(first) != digest(plan_of(nodes, range(3)))
    assert digest(first) != digest(plan_of({"run": source("a", (300, 401))}, range(2)))


@pytest.mark.parametrize(
    ("share", "cost", "nodes", "expected"),
    [
        ("auto", ReadCost(), "ab", False),
        ("auto", NETWORK, "ab", True),
        ("auto", NETWORK, "aa", False),
        ("auto", STORE, "aa", True),
        ("job", ReadCost(), "aa", True),
        ("off", STORE, "ab", False),
    ],
)
def test_replicas_share_where_storage_is_slower_than_the_network(
    share: ShareReads, cost: ReadCost, nodes: str, expected: bool
) -> None:
    chosen = chooser(share, cost, nodes, on_host=True)
    assert chosen((0, 1)) is expected
    assert not chosen((0,))
    on_device = chooser(share, cost, nodes, on_host=False)
    assert on_device((0, 1)) is (share == "job")


def test_many_replicas_read_once_in_sets_that_all_of_them_know() -> None:
    """A rank connects to all of its set: 511 connections each were too many."""
    holders = range(3, 3 + 2 * 130, 2)
    sets = {tuple(module._readers(rank, holders)) for rank in holders}
    assert sorted(rank for readers in sets for rank in readers) == list(holders)
    assert {len(readers) for readers in sets} == {43, 44}
    assert all(rank in module._readers(rank, holders) for rank in holders)
    assert module._readers(0, ()) == ()
    plans = [replace(plan_of({"run": source("a", (300, 400))}, range(130)), rank=rank) for rank in (0, 42, 43)]
    digests = [plan_replicas(plan, lambda ranks: len(ranks) > 1)[0].digest for plan in plans]
    assert digests[0] == digests[1] != digests[2]


def test_many_batches_are_joined() -> None:
    nodes = {"w": source("a", (4 * module.MAX_BATCHES * module.BATCH_BYTES,))}
    (found,) = plan_replicas(plan_of(nodes, range(2), ReadLimits()), lambda _: True)
    assert found.num_batches <= module.MAX_BATCHES + 1
