"""What one rank of a node finds out for all of it: headers and the index. Pairs of ranks stand for nodes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

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
        from lowmem_load.read import source

        ordinary_open, ordinary_read = source._open_regular, source.LocalFile.read_into

        def open_regular(path: str) -> Any:
            self.opened.append(os.path.basename(path))
            return ordinary_open(path)

        def read_into(file: Any, offset: int, buffers: Sequence[memoryview]) -> None:
            ordinary_read(file, offset, buffers)
            if file.path.endswith(".safetensors"):
                prefix = memoryview(bytearray(8))
                ordinary_read(file, 0, [prefix])
                if offset < 8 + int.from_bytes(prefix, "little"):
                    self.header_bytes += sum(buffer.nbytes for buffer in buffers)

        source._open_regular, source.LocalFile.read_into = open_regular, read_into  # type: ignore[method-assign]


def load_on_nodes(path: str, broken: str) -> dict[str, Any]:
    """Rank function: loads on simulated nodes; returns what this rank has opened and read for it."""
    import transformers

    from lowmem_load import load_model, load_report
    from lowmem_load.ranks import nodes

    ordinary = nodes.node_name
    nodes.node_name = lambda rank: f"{ordinary(rank)} {rank // RANKS_PER_NODE}"
    counted = Counted()
    counted.replace()
    model = load_model(path, FP32)
    opened, header_bytes, report = list(counted.opened), counted.header_bytes, load_report(model)
    assert differences(model, transformers.AutoModelForCausalLM.from_pretrained(path)) == []
    assert report.num_nodes == int(os.environ["WORLD_SIZE"]) // RANKS_PER_NODE
    assert report.num_opens == sum(name.endswith(".safetensors") for name in opened)
    with pytest.raises(ValueError, match=r"model-00002-of-.*: header is not valid JSON") as caught:
        load_model(broken, FP32)
    assert type(caught.value).__name__ == "HeaderError", "it failed alike on all ranks"
    load_model(path, FP32)  # the next load is not affected
    return {"opened": opened, "header_bytes": header_bytes, "from": report.headers_from}


def test_headers_and_index_are_read_once_per_node(checkpoints: Path, tmp_path: Path) -> None:
    path = builders.tiny_llama(checkpoints, builders.torch.float32, "20KB", **builders.ODD_SIZES)
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    assert len(shards) > 1
    broken = shutil.copytree(path, tmp_path / "broken")
    content = (path / shards[1]).read_bytes()
    (broken / shards[1]).write_bytes(content[:8] + b"[" + content[9:])
    ranks = run_ranks(load_on_nodes, str(path), str(broken), world_size=2 * RANKS_PER_NODE)
    for rank, found in enumerate(ranks):
        is_first = rank % RANKS_PER_NODE == 0
        assert found["from"] == rank // RANKS_PER_NODE * RANKS_PER_NODE
        assert sorted(name for name in found["opened"] if name in shards) == shards, "each shard is opened once"
        assert ("model.safetensors.index.json" in found["opened"]) is is_first
        assert (found["header_bytes"] > 0) is is_first
