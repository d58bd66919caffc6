"""How often a rank waits for the store of the process group in a load of each kind."""

from __future__ import annotations

import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from lowmem_load import DistributedInterface, load_model
from tests import builders
from tests.parity import BF16
from tests.ranks import run_ranks
from tests.steps import CountingClient


def count_round_trips(path: str, cache: str) -> dict[str, int]:
    """Rank function: returns the round trips of each kind of load. No heartbeat comes meanwhile, but at the start."""
    from lowmem_load.distributed import steps
    from tests.hub import hub

    counts, found, ordinary = Counter[str](), dict[str, int](), steps.new_client
    steps.new_client = lambda store: CountingClient(ordinary(store), counts)
    steps.StoreChannel = partial(steps.StoreChannel, beat_s=60.0)  # type: ignore[misc,assignment]
    DistributedInterface()

    def take(kind: str) -> None:
        found[kind] = counts.total()
        counts.clear()

    load_model(path, BF16)
    take("the first one")
    load_model(path, BF16)
    take("local")
    with hub(Path(path), "org/model"):
        load_model("org/model", BF16, cache_dir=cache)
        take("from the Hub")
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.release)])
def test_a_load_of_any_kind_waits_for_at_most_25_round_trips(
    checkpoints: Path, tmp_path: Path, world_size: int
) -> None:
    path = Path(shutil.copytree(builders.tiny_llama(checkpoints), tmp_path / "model"))
    counts = run_ranks(count_round_trips, str(path), str(tmp_path / "hub"), world_size=world_size)
    print(counts)
    for rank, found in enumerate(counts):
        assert {kind: count for kind, count in found.items() if not 0 < count <= 25} == {}, (rank, found)
