"""The floor of the benchmark reads what partitions hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.floors import Piece, partition_range, read_pieces, read_plain
from lowmem_load.errors import TruncatedFileError

TENSORS = {"a": torch.arange(1001, dtype=torch.int16), "b": torch.arange(3, dtype=torch.int32).reshape(3, 1)}


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_floor_reads_partitions(rank: int, world_size: int, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    plain, num_plain = read_plain(tmp_path, rank, world_size)
    assert num_plain == sum(bool(part.numel()) for part in plain.values())
    for name, values in TENSORS.items():
        start, end = partition_range(values.numel(), rank, world_size)
        expected = values.flatten()[start:end].view(torch.uint8)
        assert torch.equal(plain[name], expected)


def test_a_file_that_ends_too_early_is_named(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"1234")
    pieces = [Piece(str(tmp_path / "short"), 2, 4)]
    with pytest.raises(TruncatedFileError, match=r"short: ends 2 bytes too early"):
        read_pieces(pieces)
