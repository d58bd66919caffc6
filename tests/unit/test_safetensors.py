"""Headers are untrusted: every malformed one is refused with a message that names the fault."""

import json
import re
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from lowmem_load.errors import CheckpointError, HeaderError, TruncatedFileError, UnsupportedError
from lowmem_load.files.format import CheckpointFile
from lowmem_load.files.safetensors import (
    BITS,
    MAX_HEADER_NBYTES,
    PREFIX_NBYTES,
    Safetensors,
    header_nbytes,
    parse_header,
)
from lowmem_load.files.source import LocalFile
from tests.pickles import colliding

GOOD: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "F32", "shape": [], "data_offsets": [12, 16]},
}


def parse(header: Any, data_nbytes: int = 16) -> Any:
    encoded = json.dumps(header).encode()
    return parse_header(encoded, "x.safetensors", PREFIX_NBYTES + len(encoded) + data_nbytes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": {"dtype": "BF17", "shape": [2, 3], "data_offsets": [0, 12]}}, "unknown dtype 'BF17'"),
        ({"a": {"dtype": ["F32"], "shape": [2, 3], "data_offsets": [0, 12]}}, "unknown dtype"),
        ({"a": {"dtype": "BF16", "shape": [1 << 70, 0], "data_offsets": [0, 0]}}, "list of sizes"),
        ({"a": {"dtype": "BF16", "shape": [1 << 40, 1 << 40, 0], "data_offsets": [0, 0]}}, "too large to be counted"),
        ({"a": {"dtype": "BF16", "shape": [1 << 61], "data_offsets": [0, 12]}}, "too large to be counted"),
        ({"a": {"dtype": "BF16", "shape": [2, -3], "data_offsets": [0, 12]}}, "list of sizes"),
        ({"a": {"dtype": "BF16", "shape": "23", "data_offsets": [0, 12]}}, "list of sizes"),
        ({"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 13]}}, "needs 12 bytes"),
        ({"a": {"dtype": "F6_E3M2", "shape": [2, 3], "data_offsets": [0, 12]}}, "36 bits, no whole number of bytes"),
        ({"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0]}}, r"expected \[start, end\)"),
        ({"a": {"dtype": "BF16", "shape": [2, 3]}}, "lacks dtype, shape or data_offsets"),
        ({"b": {"dtype": "F32", "shape": [], "data_offsets": [8, 12]}}, "neither holes nor overlaps"),
        ({"__metadata__": {"format": 1}}, "strings to strings"),
    ],
)
def test_a_lying_header_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(HeaderError, match=message):
        parse({**GOOD, **change})


def test_all_dtypes_of_safetensors_are_known() -> None:
    header = {"a": {"dtype": "F128", "shape": [], "data_offsets": [0, 16]}}
    encoded = json.dumps(header).encode()
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(struct.pack("<Q", len(encoded)) + encoded + bytes(16))
    known = re.search(r"expected one of (.*?) at line", str(caught.value))
    assert known is not None
    assert set(re.findall(r"`(\w+)`", known[1])) == set(BITS)


def test_a_tensor_that_torch_lacks_is_an_error_only_where_it_is_used() -> None:
    header = parse(
        {
            "six": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},  # 4 * 6 bits
            "odd": {"dtype": "F4", "shape": [2, 3], "data_offsets": [3, 6]},
            "four": {"dtype": "F4", "shape": [1, 4], "data_offsets": [6, 8]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        }
    )
    assert (header.tensors["b"].dtype, header.tensors["b"].shape) == (torch.float32, (2,))
    assert header.tensors["four"].shape == (1, 2)
    with pytest.raises(UnsupportedError, match=r"x.safetensors: tensor 'six': torch .* has no dtype for its F6_E2M3"):
        _ = header.tensors["six"].dtype
    with pytest.raises(UnsupportedError, match=r"x.safetensors: tensor 'odd': its shape \(2, 3\) is odd"):
        _ = header.tensors["odd"].shape


def test_file_length_must_agree() -> None:
    with pytest.raises(TruncatedFileError, match="download it again"):
        parse(GOOD, data_nbytes=15)
    with pytest.raises(HeaderError, match="1 bytes follow the last tensor"):
        parse(GOOD, data_nbytes=17)


def test_a_shape_that_torch_cannot_hold_is_an_error_only_where_it_is_used() -> None:
    header = parse(
        {
            "large": {"dtype": "U8", "shape": [1 << 61, 0], "data_offsets": [0, 0]},
            "larger": {"dtype": "U8", "shape": [0, 1 << 61, 1 << 61], "data_offsets": [0, 0]},
            "many": {"dtype": "U8", "shape": [1] * 70 + [16], "data_offsets": [0, 16]},
        }
    )
    for name in ("large", "many"):
        assert torch.empty(header.tensors[name].shape, device="meta").numel() == header.tensors[name].nbytes
    with pytest.raises(UnsupportedError, match=r"tensor 'larger': its shape \(0, 2305.* is beyond what torch can hold"):
        _ = header.tensors["larger"].shape


def test_the_smallest_tensors_are_all_read() -> None:
    entries = {chr(0x4E00 + i): {"dtype": "U8", "shape": [], "data_offsets": [i, i + 1]} for i in range(9000)}
    for separators in ((",", ":"), (", ", ": ")):
        text = json.dumps(entries, ensure_ascii=False, separators=separators).encode()
        header = parse_header(text, "x.safetensors", PREFIX_NBYTES + len(text) + 9000)
        assert list(header.tensors) == list(entries)
        assert header.tensors["\u4e05"].start == PREFIX_NBYTES + len(text) + 5


def test_length_prefix() -> None:
    assert header_nbytes(struct.pack("<Q", 10), "x", 18) == 10
    with pytest.raises(TruncatedFileError, match="needs 18 bytes, the file has 17"):
        header_nbytes(struct.pack("<Q", 10), "x", 17)
    with pytest.raises(HeaderError, match="exceeds"):
        header_nbytes(struct.pack("<Q", MAX_HEADER_NBYTES + 1), "x", 1 << 40)
    with pytest.raises(TruncatedFileError, match="too few"):
        header_nbytes(b"abc", "x", 3)


def described(path: str) -> CheckpointFile:
    return Safetensors().describe(LocalFile(path))


def test_files_of_other_formats_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read: No such file"):
        described(str(path))
    save_file({"a": torch.ones(10)}, str(path))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TruncatedFileError, match="the header promises"):
        described(str(path))
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\n")
    with pytest.raises(CheckpointError, match=r"model.safetensors: is a git-lfs pointer .*; run `git lfs pull` in its"):
        described(str(path))
    path.write_bytes(b"<!DOCTYPE html><html></html>")
    with pytest.raises(HeaderError, match="not a safetensors file"):
        described(str(path))


def test_shapes_with_equal_hashes_take_no_longer(tmp_path: Path) -> None:
    """A dict would compare each with all others: 72 million pairs."""
    entries = {
        str(number): {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}
        for number, shape in enumerate(colliding(12_000, 0))
    }
    raw = json.dumps(entries).encode()
    path = tmp_path / "forged.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    began_s = time.process_time()
    assert len(Safetensors().describe(LocalFile(str(path))).names) == 12_000
    assert time.process_time() - began_s < 1.0
