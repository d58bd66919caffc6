"""Headers are untrusted: every malformed one is refused with a message that names the fault.

That all else is taken as by safetensors itself is shown for the corpus of tests/fuzz.
"""

import contextlib
import json
import re
import struct
import time
from typing import Any

import pytest
import safetensors
import torch

from lowmem_load.errors import CheckpointError, HeaderError, TruncatedFileError, UnsupportedError
from lowmem_load.files.format import CheckpointFile
from lowmem_load.files.safetensors import BITS, MAX_HEADER_NBYTES, PREFIX_NBYTES, Safetensors, parse_header
from lowmem_load.planning.expression import Source
from tests.memory_source import MemorySource
from tests.unit.conftest import memory_below

GOOD: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "F32", "shape": [], "data_offsets": [12, 16]},
}


def described(header: Any, data_nbytes: int = 16) -> CheckpointFile:
    """Describe a file with a header, given as JSON or as its bytes, and so many bytes of data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(data_nbytes)
    return Safetensors().describe(MemorySource("x.safetensors", data))


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
        ({"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 13]}}, "needs 12 bytes, but .* have 13"),
        ({"a": {"dtype": "F6_E3M2", "shape": [2, 3], "data_offsets": [0, 12]}}, "36 bits, which is not a whole number"),
        ({"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0]}}, r"expected \[start, end\)"),
        ({"a": {"dtype": "BF16", "shape": [2, 3]}}, "lacks dtype, shape or data_offsets"),
        ({"b": {"dtype": "F32", "shape": [], "data_offsets": [8, 12]}}, "neither holes nor overlaps"),
        ({"__metadata__": {"format": 1}}, "strings to strings"),
    ],
)
def test_a_lying_header_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(HeaderError, match=f"x.safetensors: .*{message}"):
        described({**GOOD, **change})


@pytest.mark.parametrize(
    "text", [b"", b"[]", b'"a"', b"{", b"\xff\xfe", b'{"a": 1, "a": 2}', b"[" * 100_000, b"9" * 5000]
)
def test_not_a_json_object(text: bytes) -> None:
    with pytest.raises(HeaderError):
        described(text, 0)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"abc", TruncatedFileError, "3 bytes are too few"),
        (struct.pack("<Q", 10) + bytes(9), TruncatedFileError, "needs 18 bytes, but the file has 17"),
        (struct.pack("<Q", MAX_HEADER_NBYTES + 1), HeaderError, "exceeds"),
        (b"<!DOCTYPE html><html></html>", HeaderError, "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", CheckpointError, ".* pointer .*; run `git lfs pull` in its"),
    ],
)
def test_files_of_other_formats_are_refused(data: bytes, error: type[CheckpointError], message: str) -> None:
    with pytest.raises(error, match=f"x.safetensors: .*{message}"):
        Safetensors().describe(MemorySource("x.safetensors", data))


def test_file_length_must_agree() -> None:
    with pytest.raises(TruncatedFileError, match=r"the header promises .* download it again"):
        described(GOOD, 15)
    with pytest.raises(HeaderError, match="1 bytes follow the last tensor"):
        described(GOOD, 17)


def test_all_dtypes_of_safetensors_are_known() -> None:
    header = {"a": {"dtype": "F128", "shape": [], "data_offsets": [0, 16]}}
    encoded = json.dumps(header).encode()
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(struct.pack("<Q", len(encoded)) + encoded + bytes(16))
    known = re.search(r"expected one of (.*?) at line", str(caught.value))
    assert known is not None
    assert set(re.findall(r"`(\w+)`", known[1])) == set(BITS)


def test_what_torch_lacks_is_an_error_only_where_it_is_used() -> None:
    header = {
        "large": {"dtype": "U8", "shape": [1 << 61, 0], "data_offsets": [0, 0]},
        "larger": {"dtype": "U8", "shape": [0, 1 << 61, 1 << 61], "data_offsets": [0, 0]},
        "many": {"dtype": "U8", "shape": [1] * 70 + [16], "data_offsets": [0, 16]},
        "six": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [16, 19]},  # 4 * 6 bits
        "odd": {"dtype": "F4", "shape": [2, 3], "data_offsets": [19, 22]},
        "four": {"dtype": "F4", "shape": [1, 4], "data_offsets": [22, 24]},
        "plain": {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]},
    }
    file = described(header, 32)
    found = {name: file.expression(name) for name in ("large", "many", "four", "plain")}
    assert [node.shape for node in found.values()] == [(1 << 61, 0), (1,) * 70 + (16,), (1, 2), (2,)]
    assert found["plain"].dtype == torch.float32 and file.expression("plain") is found["plain"]
    for node in found.values():
        torch.empty(node.shape, dtype=node.dtype, device="meta")
    for name, said in {
        "six": r"torch .* has no dtype for its F6_E2M3",
        "odd": r"its shape \(2, 3\) is odd",
        "larger": r"its shape \(0, 2305.* is too large for torch",
    }.items():
        with pytest.raises(UnsupportedError, match=f"x.safetensors: tensor '{name}': {said}"):
            file.expression(name)


def test_the_smallest_tensors_are_all_read() -> None:
    entries = {chr(0x4E00 + i): {"dtype": "U8", "shape": [], "data_offsets": [i, i + 1]} for i in range(9000)}
    for separators in ((",", ":"), (", ", ": ")):
        text = json.dumps(entries, ensure_ascii=False, separators=separators).encode()
        file = described(text, 9000)
        assert file.names == tuple(entries)
        found = file.expression("\u4e05")
        assert isinstance(found, Source) and found.start == PREFIX_NBYTES + len(text) + 5


def test_what_is_taken_is_what_the_header_says() -> None:
    file = described(
        b'{"z":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"__metadata__":{"format":"pt"},'
        b'"a" : {"shape": [], "x": {"y": [1]}, "data_offsets": [8, 9], "dtype": "U8"}}',
        9,
    )
    assert file.metadata == {"format": "pt"}
    found = [(name, file.expression(name)) for name in file.names]
    assert [(name, node.dtype, node.shape) for name, node in found] == [
        ("z", torch.float32, (2, 1)),
        ("a", torch.uint8, ()),
    ]


U8 = b'"a":{"dtype":"U8","shape":[16],"data_offsets":[0,16]}'
NONE_OF = b'"n":{"dtype":"U8","shape":[%s],"data_offsets":[0,0]},'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (U8 + b"," + U8, "'a' comes twice"),
        (b'"__metadata__":{"k":"v","k":"w"},' + U8, "'k' comes twice"),
        (b'"a":["U8",[16],[0,16]]', "lacks dtype, shape or data_offsets"),
        (U8.replace(b'"U8"', b'{"U8":null}'), "unknown dtype"),
    ],
)
def test_odd_headers_that_safetensors_accepts_are_refused(text: bytes, message: str) -> None:
    """Names that come twice, of which safetensors takes the last; arrays for objects."""
    header = b"{" + text + b"}"
    safetensors.deserialize(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(HeaderError, match=re.escape(message)):
        described(header)


def filled(unit: bytes, text: bytes = b"%s") -> bytes:
    """Return a header of 1 MB that has as much of `unit` as fits."""
    return b"{" + text % (unit * (1_000_000 // len(unit))) + b"}"


def empty_tensors(between: bytes, last: bytes = b'"last":') -> bytes:
    """Return a header of 1 MB that describes as many tensors as it can."""
    tensor = (NONE_OF % b"0")[4:-1]
    return b"{" + between.join([*(b'"%x":%s' % (n, tensor) for n in range(18_000)), last + tensor]) + b"}"


HOSTILE = {
    "plain tensors": empty_tensors(b","),
    "spaced tensors": empty_tensors(b" , "),
    "one character of four bytes": empty_tensors(b",", '"\U0001f600":'.encode()),
    "short strings of metadata": b'{"__metadata__":{' + b",".join(b'"%x":"ab"' % n for n in range(80_000)) + b"}}",
    "one string of metadata": filled(b'[{\\"', b'"__metadata__":{"k":"%s"}'),
    "sizes": filled(b"1000,", b'"a":{"dtype":"U8","shape":[%s0],"data_offsets":[0,0]}'),
    "ignored strings": filled(b'"ab",', b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":[%s0]}'),
    "ignored lists": filled(b'"a":{"x":[' + b"[]," * 3000 + b"0]},"),
    "a list": filled(b"[],"),
    "a string without end": filled(b"\\n", b'"%s'),
    "a description of quotes": filled(b'\\"', b'"a":{"%s'),
    "digits": filled(b"9", b'"a":{"x":%s}'),
    "spaces": filled(b" "),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_header_takes_at_most_64_times_its_size(what: str) -> None:
    header = HOSTILE[what]
    assert 900_000 < len(header) < 1_200_000
    start = time.process_time()
    with memory_below(64 * len(header)), contextlib.suppress(CheckpointError):
        parse_header(header, "x.safetensors", PREFIX_NBYTES + len(header))
    assert time.process_time() - start < 20, (
        "traced, which takes several times as long; one that is quadratic takes minutes"
    )
