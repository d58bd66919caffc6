"""Reads the JSON of a safetensors header: strictly as safetensors does (serde_json 1), and one tensor at a time.

Python's `json` takes what safetensors refuses: lone surrogates, NaN, numbers beyond all floats, -0 for a size. And of a
hostile header it makes objects of 26 times its size. So only the description of one tensor is ever given to it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

MAX_DESCRIPTION_NBYTES = 1 << 16
"""Bytes of one tensor's description, of which some 60 are needed: parsed, it may take thirty times that."""

_MAX_PLAIN_NBYTES = 4096
"""Bytes of what the one expression of a plain tensor matches: its loop over sizes keeps a hundred bytes for each."""

MIN_NBYTES_PER_BRACKET, FREE_BRACKETS = 12, 256
"""A tensor has an object and two lists in no less than 48 bytes. More objects and lists than that only cost time."""

MIN_NBYTES_PER_STRING, FREE_STRINGS = 32, 1024
"""An entry of the metadata takes some 220 bytes of memory; many of a few bytes each are no metadata."""

MAX_DEPTH = 126
"""Objects and lists within each other in a description: serde_json stops at 128 in all."""

METADATA = "__metadata__"

FIELDS = ("dtype", "shape", "data_offsets")

_SIZE = "(?:0|[1-9][0-9]{0,18})"
_PLAIN = re.compile(
    rf'"(?!{METADATA}")([^"\\\x00-\x1f]*)":\{{"dtype":"([A-Z0-9_]+)","shape":\[((?:{_SIZE}(?:,{_SIZE})*)?)\],'
    rf'"data_offsets":\[({_SIZE}),({_SIZE})\]\}}([,}}])'
)
"""A tensor as safetensors itself writes it, and what follows it: most are so, and to read them so is twice as fast."""

_SPACE = re.compile(r"[ \t\n\r]*")
_BRACKET_OR_STRING = re.compile(r'[{}\[\]]|"[^"\\]*(?:\\.[^"\\]*)*"|"', re.DOTALL)


class HeaderReader:
    """Reads one header.

    Args:
        header: its bytes.

    Attributes:
        metadata: the free-form strings, once all tensors were read; None if there are none.
    """

    def __init__(self, header: bytes) -> None:
        self.metadata: dict[str, str] | None = None
        self._has_metadata = False
        self._text = header.decode("latin-1")  # one byte per character, whatever is in it; see `_utf8`
        self._at = 0
        self._num_brackets = 0

    def tensors(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and fields of each tensor, in the order of the header.

        Fields are what JSON has: strings, numbers, lists; but objects are tuples of pairs. What is no object has no
        fields. A name may come twice.

        Raises:
            ValueError: safetensors would not take this for JSON, or it is without measure.
        """
        self._take("{")
        more = self._take('"}') == '"'
        while more:
            plain = _PLAIN.match(self._text, self._at - 1, self._at + _MAX_PLAIN_NBYTES)
            if plain is not None:
                name, code, sizes, start, end, after = plain.groups()
                self._at = plain.end()
                shape = [int(size) for size in sizes.split(",")] if sizes else []
                yield _utf8(name), {"dtype": code, "shape": shape, "data_offsets": [int(start), int(end)]}
            else:
                name = self._string()
                self._take(":")
                if name == METADATA:
                    self._read_metadata()
                else:
                    yield name, self._description()
                after = self._take(",}")
            more = after == ","
            if more:
                self._take('"')
        self._skip_space()
        if self._at != len(self._text):
            raise ValueError(f"something follows its end, byte {self._at}")

    def _read_metadata(self) -> None:
        if self._has_metadata:
            raise ValueError(f"{METADATA} comes twice")
        self._has_metadata = True
        self._skip_space()
        if self._text.startswith("null", self._at):
            self._at += len("null")
            return
        self.metadata = {}
        try:
            self._take("{")
            more = self._take('"}') == '"'
            while more:
                name = self._string()
                self._take(":")
                self._take('"')
                if name in self.metadata:
                    raise ValueError(f"{name!r} comes twice")
                if len(self.metadata) > FREE_STRINGS + self._at // MIN_NBYTES_PER_STRING:
                    raise ValueError(f"too many strings up to byte {self._at}")
                self.metadata[name] = self._string()
                more = self._take(",}") == ","
                if more:
                    self._take('"')
        except ValueError as error:
            raise ValueError(f"{METADATA} must map strings to strings: {error}") from error

    def _description(self) -> dict[str, Any]:
        """Return the fields of the tensor whose description is next; none where there is another thing."""
        self._skip_space()
        start = self._at
        if self._text[start : start + 1] != "{":
            return {}
        self._at = self._end_of_brackets()
        piece = _utf8(self._text[start : self._at])
        pairs = _DECODER.decode(piece)
        if "\\u" in piece:
            json.dumps(pairs, ensure_ascii=False).encode()  # UnicodeEncodeError where a surrogate is alone
        fields = [pair for pair in pairs if pair[0] in FIELDS]
        if len(fields) != len(dict(fields)):
            raise ValueError(f"a field comes twice at byte {start}")
        return dict(fields)

    def _end_of_brackets(self) -> int:
        start, depth = self._at, 0
        for found in _BRACKET_OR_STRING.finditer(self._text, start, start + MAX_DESCRIPTION_NBYTES):
            token = found[0]
            if token in "{[":
                depth += 1
                self._num_brackets += 1
            elif token in "}]":
                depth -= 1
            elif token == '"':  # one without end
                break
            if depth == 0:
                return found.end()
            if self._num_brackets > FREE_BRACKETS + found.start() // MIN_NBYTES_PER_BRACKET:
                raise ValueError(f"too many brackets for tensors up to byte {found.start()}")
            if depth > MAX_DEPTH:
                raise ValueError(f"more than {MAX_DEPTH} brackets within each other at byte {found.start()}")
        raise ValueError(f"no end within {MAX_DESCRIPTION_NBYTES} bytes of what begins at byte {start}")

    def _string(self) -> str:
        """Return the string whose opening quote was taken."""
        start = self._at - 1
        _, self._at = _DECODER.raw_decode(self._text, start)
        text = _utf8(self._text[start : self._at])
        if "\\" not in text:
            return text[1:-1]
        string: str = _DECODER.decode(text)
        string.encode()  # UnicodeEncodeError where a surrogate is alone
        return string

    def _take(self, expected: str) -> str:
        """Return the next character that is no space, which must be one of those expected."""
        self._skip_space()
        found = self._text[self._at : self._at + 1]
        if not found or found not in expected:
            raise ValueError(f"{found!r} at byte {self._at}, expected {' or '.join(expected)}")
        self._at += 1
        return found

    def _skip_space(self) -> None:
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        self._at = space.end()


def _utf8(text: str) -> str:
    """Return what the bytes mean that `text` has as characters."""
    return text if text.isascii() else text.encode("latin-1").decode("utf-8")


def _integer(digits: str) -> int | float:
    """Return a number as serde_json has it: what no 64 bits hold is a float, and so is -0."""
    value = _finite(digits) if len(digits) > 20 else int(digits)
    if value == 0 and digits.startswith("-"):
        return -0.0
    return value if isinstance(value, float) or value < 1 << 64 else float(value)


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"number {digits[:20]}... is out of range")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=tuple, parse_int=_integer, parse_float=_finite, parse_constant=_refuse)
