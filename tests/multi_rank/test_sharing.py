"""What one rank of a node finds out for all of it: files of the Hub, the index, headers. Pairs of ranks are nodes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lowmem_load import RankError
from tests import builders
from tests.parity import FP32, differences
from tests.ranks import run_ranks

RANKS_PER_NODE = 2


class Counted:
    """Counts what is opened and read of the files of a load."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.header_bytes = 0

    def replace(self) -> None:
        """Count all opens from now on, and what is read before the first byte of a tensor."""
        from lowmem_load.io.source import LocalFile

        ordinary_open, ordinary_read = os.open, LocalFile.read_into

        def counted_open(path: Any, *arguments: Any, **keywords: Any) -> int:
            self.opened.append(os.path.basename(path))
            return ordinary_open(path, *arguments, **keywords)

        def read_into(file: Any, offset: int, memory: memoryview) -> None:
            ordinary_read(file, offset, memory)
            if file.path.endswith(".safetensors"):
                prefix = memoryview(bytearray(8))
                ordinary_read(file, 0, prefix)
                if offset < 8 + int.from_bytes(prefix, "little"):
                    self.header_bytes += memory.nbytes

        os.open = counted_open
        LocalFile.read_into = read_into  # type: ignore[method-assign]


def load_from_hub(path: str, cache: str) -> list[list[str]]:
    """Loads what the cache lacks, then what it has; returns what this rank has asked the Hub for each time."""
    from lowmem_load import load_model
    from tests.hub import hub

    asked_by_load: list[list[str]] = []
    for auto_class in (None, "AutoModelForCausalLM"):
        with hub(Path(path), "org/model") as asked:
            load_model("org/model", FP32, cache_dir=cache, auto_class=auto_class)
            asked_by_load.append([what for what in asked if what != "GET agent-harnesses"])
    node = int(os.environ["RANK"]) // RANKS_PER_NODE
    with (
        hub(Path(path), "org/model", commit=str(node) * 40),
        pytest.raises(RankError, match=r"rank 2: holds commit 1{40}, where rank.s. 0-1 hold 0{40}"),
    ):
        load_model("org/model", FP32, cache_dir=f"{cache}-{node}")
    with hub(Path(path), "org/model"), pytest.raises(ValueError, match=r"org/other") as caught:
        load_model("org/other", FP32, cache_dir=cache)
    assert type(caught.value).__name__ == "CheckpointError", "it failed alike on all ranks"
    return asked_by_load


def load_on_nodes(path: str, broken: str, cache: str) -> dict[str, Any]:
    """Rank function: loads on simulated nodes; returns what this rank has opened, read and asked for."""
    import transformers

    from lowmem_load import load_model
    from lowmem_load.distributed import node_cache

    ordinary = node_cache.node_name
    node_cache.node_name = lambda rank: f"{ordinary(rank)} {rank // RANKS_PER_NODE}"
    counted = Counted()
    counted.replace()
    model = load_model(path, FP32)
    opened, header_bytes = list(counted.opened), counted.header_bytes
    assert differences(model, transformers.AutoModelForCausalLM.from_pretrained(path)) == []
    with pytest.raises(ValueError, match=r"model-00002-of-.*: header is not valid JSON") as caught:
        load_model(broken, FP32)
    assert type(caught.value).__name__ == "HeaderError", "it failed alike on all ranks"
    asked = load_from_hub(path, cache)
    load_model(path, FP32)  # the next load is not affected
    return {"opened": opened, "header_bytes": header_bytes, "asked": asked}


def test_what_all_need_is_found_out_once_per_node(checkpoints: Path, tmp_path: Path) -> None:
    path = builders.tiny_llama(checkpoints, builders.torch.float32, "20KB", **builders.ODD_SIZES)
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    assert len(shards) > 1
    broken = shutil.copytree(path, tmp_path / "broken")
    content = (path / shards[1]).read_bytes()
    (broken / shards[1]).write_bytes(content[:8] + b"[" + content[9:])
    ranks = run_ranks(load_on_nodes, str(path), str(broken), str(tmp_path / "hub"), world_size=2 * RANKS_PER_NODE)
    for rank, found in enumerate(ranks):
        is_first = rank % RANKS_PER_NODE == 0
        assert sorted(name for name in found["opened"] if name in shards) == shards, "each shard is opened once"
        assert ("model.safetensors.index.json" in found["opened"]) is is_first
        assert (found["header_bytes"] > 0) is is_first
        cold, warm = found["asked"]
        assert warm == ["HEAD config.json"] * is_first, (rank, cold, warm)
        assert is_first or not cold
    downloads = sorted(what for found in ranks for what in found["asked"][0] if what.startswith("GET model-"))
    assert downloads == [f"GET {shard}" for shard in shards], "from one cache each node takes what the other has"
