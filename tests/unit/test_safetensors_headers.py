"""The JSON of headers: names that come twice are refused, and memory is bounded by the header.

That all else is taken as by safetensors itself is shown for the corpus of tests/fuzz.
"""

import contextlib
import re
import struct
import time
import tracemalloc

import pytest
import safetensors

from lowmem_load.errors import CheckpointError, HeaderError
from lowmem_load.files.safetensors import PREFIX_NBYTES, parse_header


@pytest.mark.parametrize(
    "text", [b"", b"[]", b'"a"', b"{", b"\xff\xfe", b'{"a": 1, "a": 2}', b"[" * 100_000, b"9" * 5000]
)
def test_not_a_json_object(text: bytes) -> None:
    with pytest.raises(HeaderError):
        parse_header(text, "x.safetensors", PREFIX_NBYTES + len(text))


U8 = b'"a":{"dtype":"U8","shape":[16],"data_offsets":[0,16]}'
NONE_OF = b'"n":{"dtype":"U8","shape":[%s],"data_offsets":[0,0]},'


def test_what_is_taken_is_what_the_header_says() -> None:
    header = (
        b'{"z":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"__metadata__":{"format":"pt"},'
        b'"a" : {"shape": [], "x": {"y": [1]}, "data_offsets": [8, 9], "dtype": "U8"}}'
    )
    found = parse_header(header, "x.safetensors", PREFIX_NBYTES + len(header) + 9)
    assert found.metadata == {"format": "pt"}
    assert [(entry.name, entry.dtype_code, entry.shape) for entry in found.tensors.values()] == [
        ("z", "F32", (2, 1)),
        ("a", "U8", ()),
    ]


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
        parse_header(header, "x.safetensors", PREFIX_NBYTES + len(header) + 16)


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
    tracemalloc.start()
    try:
        start = time.process_time()
        with contextlib.suppress(CheckpointError):
            parse_header(header, "x.safetensors", PREFIX_NBYTES + len(header))
        seconds, peak = time.process_time() - start, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * len(header)
    assert seconds < 20, "traced, which takes several times as long; one that is quadratic takes minutes"
