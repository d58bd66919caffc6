"""Reads the JSON of a safetensors header as strictly as safetensors does (serde_json 1), one tensor at a time.

Python's `json` accepts more, such as lone surrogates and NaN, and makes objects of 26 times a hostile header's size.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

DESCRIPTION_CHARS, MAX_DESCRIPTION_CHARS = 1 << 10, 1 << 16
"""Characters of one tensor's description: the first attempt to read it, and the limit. Most have about 60."""

MIN_CHARS_PER_STRING, FREE_STRINGS = 32, 1024
"""Bound on the entries of the metadata. Each takes some 220 bytes of memory, and real ones are long and few."""

MAX_DEPTH = 126
"""Nested brackets of a description. serde_json stops at 128 in all."""

METADATA = "__metadata__"

FIELDS = ("dtype", "shape", "data_offsets")

_SPACE = re.compile(r"[ \t\n\r]*")


class HeaderReader:
    """Reads one header. `metadata` has its free-form strings, if there are any, once all tensors were read."""

    def __init__(self, header: bytes) -> None:
        self.metadata: dict[str, str] | None = None
        self._has_metadata = False
        self._text = header.decode("utf-8")
        self._at = 0

    def tensors(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and fields of each tensor; a name may come twice. ValueError: safetensors refuses the header."""
        for name in self._names():
            if name == METADATA:
                self._read_metadata()
            else:
                yield name, self._description()
        self._skip_space()
        if self._at != len(self._text):
            raise ValueError(f"something follows its end, character {self._at}")

    def _names(self) -> Iterator[str]:
        # Of an object; the caller reads the value that follows each.
        self._take("{")
        more = self._take('"}') == '"'
        while more:
            name = self._string()
            self._take(":")
            yield name
            more = self._take(",}") == ","
            if more:
                self._take('"')

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
            for name in self._names():
                self._take('"')
                if name in self.metadata:
                    raise ValueError(f"{name!r} comes twice")
                if len(self.metadata) > FREE_STRINGS + self._at // MIN_CHARS_PER_STRING:
                    raise ValueError(f"too many strings up to character {self._at}")
                self.metadata[name] = self._string()
        except ValueError as error:
            raise ValueError(f"{METADATA} must map strings to strings: {error}") from error

    def _description(self) -> dict[str, Any]:
        self._skip_space()
        start = self._at
        if self._text[start : start + 1] != "{":
            return {}
        pairs, length = self._decoded(start)
        self._at += length
        _check_depth(pairs, 1)
        if "\\u" in self._text[start : self._at]:
            json.dumps(pairs, ensure_ascii=False).encode()  # UnicodeEncodeError for a lone surrogate
        fields = [pair for pair in pairs if pair[0] in FIELDS]
        if len(fields) != len(dict(fields)):
            raise ValueError(f"a field comes twice at character {start}")
        return dict(fields)

    def _decoded(self, start: int) -> tuple[Any, int]:
        for limit in (DESCRIPTION_CHARS, MAX_DESCRIPTION_CHARS):
            try:
                return _DECODER.raw_decode(self._text[start : start + limit])
            except (ValueError, RecursionError) as error:
                reason = str(error)
        if start + MAX_DESCRIPTION_CHARS < len(self._text):
            reason = f"malformed, or no end within {MAX_DESCRIPTION_CHARS} characters"
        raise ValueError(f"the description at character {start}: {reason}")

    def _string(self) -> str:
        string: str
        string, self._at = _DECODER.raw_decode(self._text, self._at - 1)
        string.encode()  # UnicodeEncodeError for a lone surrogate
        return string

    def _take(self, expected: str) -> str:
        self._skip_space()
        character = self._text[self._at : self._at + 1]
        if not character or character not in expected:
            raise ValueError(f"{character!r} at character {self._at}, expected {' or '.join(expected)}")
        self._at += 1
        return character

    def _skip_space(self) -> None:
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        self._at = space.end()


def _check_depth(container: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} nested brackets in a description")
    for value in (pair[1] for pair in container) if isinstance(container, tuple) else container:
        if isinstance(value, tuple | list):
            _check_depth(value, depth + 1)


def _integer(digits: str) -> int | float:
    """Return a number as serde_json does: -0 is a float, and so is a number beyond 64 bits."""
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
