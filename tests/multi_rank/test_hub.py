"""Loads from the Hub: ranks that share a cache download once, and ranks that are told other commits raise."""

import os
from pathlib import Path

import pytest
import transformers

from lowmem_load import RankError, load_model
from tests import builders
from tests.hub import hub
from tests.parity import FP32, differences
from tests.ranks import run_ranks


def load_from_hub(path: str, cache: str) -> list[list[str]]:
    """Rank function: loads what the cache lacks, then what it has; returns what it has asked the Hub for each time."""
    asked_by_load: list[list[str]] = []
    for auto_class in (None, "AutoModelForCausalLM"):
        with hub(Path(path), "org/model") as asked:
            model = load_model("org/model", FP32, cache_dir=cache, auto_class=auto_class)
            asked_by_load.append([what for what in asked if what != "GET agent-harnesses"])
    assert differences(model, transformers.AutoModelForCausalLM.from_pretrained(path)) == []
    rank = os.environ["RANK"]
    with (
        hub(Path(path), "org/model", commit=rank * 40),
        pytest.raises(RankError, match=r"rank 1: has commit 1{40}, where rank.s. 0 have 0{40}"),
    ):
        load_model("org/model", FP32, cache_dir=f"{cache}-{rank}")
    with hub(Path(path), "org/model"), pytest.raises(ValueError, match=r"org/other") as caught:
        load_model("org/other", FP32, cache_dir=cache)
    assert type(caught.value).__name__ == "CheckpointError", "it failed alike on all ranks"
    return asked_by_load


def test_ranks_download_once_and_load_one_commit(checkpoints: Path, tmp_path: Path) -> None:
    path = builders.tiny_llama(checkpoints, builders.torch.float32, "20KB", **builders.ODD_SIZES)
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    assert len(shards) > 1
    ranks = run_ranks(load_from_hub, str(path), str(tmp_path / "hub"))
    downloads = sorted(what for cold, _ in ranks for what in cold if what.startswith("GET model-"))
    assert downloads == [f"GET {shard}" for shard in shards]
    # The search of an auto class for an adapter does not know cache_dir, as without lowmem_load.
    assert [warm for _, warm in ranks] == [["HEAD config.json", "HEAD adapter_config.json"]] * 2
