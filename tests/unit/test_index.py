"""Headers of real files, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lowmem_load.errors import CheckpointError, TruncatedFileError
from lowmem_load.formats.format import CheckpointFile
from lowmem_load.formats.index import check_indexes
from lowmem_load.formats.safetensors import DTYPES, Safetensors
from lowmem_load.read.executor import Executor
from lowmem_load.read.source import LocalFile
from lowmem_load.read.whole import read_whole


def described(path: str) -> CheckpointFile:
    return Safetensors().describe(LocalFile(path))


def test_every_dtype_that_safetensors_writes(tmp_path: Path) -> None:
    ones_and_zeros = torch.arange(48, dtype=torch.uint8) % 2  # bytes that are bools, too
    tensors = {
        code: ones_and_zeros[: 6 * dtype.itemsize].clone().view(dtype).reshape(2, 3) for code, dtype in DTYPES.items()
    }
    path = str(tmp_path / "model.safetensors")
    save_file(tensors, path, metadata={"format": "pt"})
    file = described(path)
    assert file.metadata == {"format": "pt"}
    with Executor() as executor, safe_open(path, "pt") as opened:
        for code, tensor in tensors.items():
            whole, theirs = read_whole(executor, file.expression(code)), opened.get_tensor(code)
            assert (whole.dtype, whole.shape) == (tensor.dtype, tensor.shape) == (theirs.dtype, theirs.shape)
            assert torch.equal(whole.view(torch.uint8), tensor.view(torch.uint8))


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read: No such file"):
        described(str(path))
    save_file({"a": torch.ones(10)}, str(path))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TruncatedFileError, match="the header promises"):
        described(str(path))
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\n")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        described(str(path))


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/secret", "a/../../secret", 7, None])
def test_an_index_may_not_point_outside(tmp_path: Path, file: object) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": "model-1.safetensors", "b.weight": file}}))
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json: tensor 'b.weight' is said to be in"):
        check_indexes(str(tmp_path))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', "{"])
def test_a_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        check_indexes(str(tmp_path))
