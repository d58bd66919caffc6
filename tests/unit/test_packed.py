"""Descriptions of files as bytes: what comes back is equal, and what is malformed is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lowmem_load.errors import CheckpointError
from lowmem_load.formats.format import CheckpointFile
from lowmem_load.formats.packed import pack, unpack
from lowmem_load.formats.safetensors import Safetensors
from lowmem_load.formats.torch_zip import TorchZip
from lowmem_load.read.source import LocalFile


def described(path: Path, checkpoint_format: Any) -> CheckpointFile:
    source = LocalFile(str(path))
    try:
        return checkpoint_format.describe(source)
    finally:
        source.close()


@pytest.fixture
def file(tmp_path: Path) -> CheckpointFile:
    tensors = {
        "zero": torch.zeros(0, 3),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "a\nb \ud7ff": torch.zeros(4, 5, dtype=torch.bfloat16),
        "same": torch.ones(4, 5, dtype=torch.bfloat16),
        "fp8": torch.zeros(7).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    return described(tmp_path / "a.safetensors", Safetensors())


def facts(file: CheckpointFile) -> Any:
    expressions = [file.expression(name) for name in file.names]
    return file.path, file.nbytes, file.digest, file.version, file.names, file.metadata, expressions


def test_what_was_packed_comes_back_equal(file: CheckpointFile) -> None:
    assert facts(unpack(file.path, pack(file))) == facts(file)


def test_a_torch_file_comes_back_equal_unless_names_share_a_tensor(tmp_path: Path) -> None:
    value = torch.arange(6.0)
    torch.save({"a": value, "b": torch.zeros(2, 2)}, tmp_path / "plain.bin")
    torch.save({"a": value, "b": value}, tmp_path / "tied.bin")
    torch.save({"a": value.reshape(2, 3).T}, tmp_path / "view.bin")
    plain = described(tmp_path / "plain.bin", TorchZip())
    assert facts(unpack(plain.path, pack(plain))) == facts(plain)
    assert pack(described(tmp_path / "tied.bin", TorchZip())) == b""
    assert pack(described(tmp_path / "view.bin", TorchZip())) == b""


def test_a_file_with_a_dtype_that_torch_lacks_is_not_packed(file: CheckpointFile, tmp_path: Path) -> None:
    header = {"odd": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
    text = json.dumps(header).encode()
    (tmp_path / "odd.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\0\0\0")
    assert pack(described(tmp_path / "odd.safetensors", Safetensors())) == b""


def put(*where: Any) -> Callable[[dict[str, Any]], None]:
    *path, last, value = where

    def change(fields: dict[str, Any]) -> None:
        inner: Any = fields
        for key in path:
            inner = inner[key]
        inner[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(put("nbytes", True), put("nbytes", "9"), put("digest", 1), put("version", None), put("metadata", [])),
        *(put("metadata", {"a": 1}), put("names", 0, "same"), put("names", 0, 3), put("names", {}), put("extra", 1)),
        *(put("starts", 0, -1), put("starts", 0, True), put("starts", 0, 0.5), put("starts", []), put("kinds", 0, 99)),
        *(put("kinds", 0, -1), put("of_kinds", 0, 0, "nn"), put("of_kinds", 0, 0, 1), put("of_kinds", 0, 1, [-1])),
        *(put("of_kinds", 0, 1, "ab"), put("of_kinds", 0, ["float32"]), put("starts", 0, 1 << 70)),
        *(put("of_kinds", 0, 1, [1 << 60]), put("nbytes", 8), lambda fields: fields.pop("kinds")),
    ],
)
def test_malformed_descriptions_are_refused(file: CheckpointFile, change: Callable[[dict[str, Any]], None]) -> None:
    fields = json.loads(pack(file))
    change(fields)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: its packed description"):
        unpack(file.path, json.dumps(fields).encode())


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"null"])
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="packed description"):
        unpack("a.safetensors", content)
