"""Mutates inputs: as bytes, as JSON, as opcodes of a pickle. The same generator gives the same inputs."""

import contextlib
import json
import pickletools
import random
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

ODD_NUMBERS = (0, 1, -1, 2, 3, 7, 8, 255, 256, 1 << 31, 1 << 32, 10**12, (1 << 61) - 1, 1 << 63, 1 << 64, -(1 << 63))
ODD_VALUES: tuple[Any, ...] = (
    *ODD_NUMBERS,
    *(None, True, False, "", "auto", "a", "\0", "..", "/", "1", 1.5, 1e300, float("nan"), float("inf"), -0.0),
    *([], {}, [[]], [{}], [None], {"": None}, {"a": {"b": {"c": []}}}, [1, 2, 3], ["a", "b"]),
)


def mutated(data: bytes, kind: str, words: Sequence[bytes], others: Sequence[bytes], rng: random.Random) -> bytes:
    """Return a variation of `data`, by one to four changes."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        changed = None
        if kind == "json" and rng.random() < 0.7:
            changed = _mutated_json(data, words, rng)
        elif kind == "pickle" and rng.random() < 0.7:
            changed = _mutated_pickle(data, words, others, rng)
        data = _mutated_bytes(data, words, others, rng) if changed is None else changed
    return data


def _mutated_bytes(data: bytes, words: Sequence[bytes], others: Sequence[bytes], rng: random.Random) -> bytes:
    at, end = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    how = rng.randrange(8)
    if how == 0 and data:
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if how == 1:
        return data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at:]
    if how == 2:
        return data[:at] + data[min(end, at + rng.choice((1, 4, 64))) :]
    if how == 3:
        return data[:at] + data[at : min(end, at + 64)] * rng.choice((2, 3, 20)) + data[end:]
    if how == 4 and others:
        other = rng.choice(others)
        cut = rng.randint(0, len(other))
        return data[:at] + other[cut:]
    if how == 5:
        width = rng.choice((1, 2, 4, 8))
        number = rng.choice(ODD_NUMBERS) & ((1 << 8 * width) - 1)
        return data[:at] + number.to_bytes(width, "little") + data[at + width :]
    if how == 6:
        return data[:at] + str(rng.choice(ODD_NUMBERS)).encode() + data[at + rng.choice((0, 1, 2)) :]
    word = rng.choice(words)
    return data[:at] + word + data[at + rng.choice((0, len(word))) :]


def _mutated_json(data: bytes, words: Sequence[bytes], rng: random.Random) -> bytes | None:
    first, newline, rest = data.partition(b"\n")  # the first line of a header says how much data follows
    head, text = (first + newline, rest) if newline and first.isdigit() else (b"", data)
    try:
        value = json.loads(text)
        places = list(_places(value))
    except (ValueError, RecursionError):
        return None
    if head and rng.random() < 0.1:
        head = b"%d\n" % rng.choice((0, 1, 4, 8, 16, 64, 4096))
    if not places:
        return head + json.dumps(rng.choice(ODD_VALUES)).encode()
    container, key = rng.choice(places)
    how = rng.randrange(6)
    if how == 0:
        del container[key]
    elif how == 1:
        container[key] = _word(words, rng)
    elif how == 2:
        other, other_key = rng.choice(places)
        container[key] = json.loads(json.dumps(other[other_key]))
    elif how == 3 and isinstance(container, dict):
        container[str(_word(words, rng))] = container.pop(key)
    elif how == 4 and isinstance(container[key], int | float):
        container[key] = container[key] + rng.choice((-8, -4, -1, 1, 4, 8)) if rng.random() < 0.7 else -container[key]
    else:
        container[key] = json.loads(json.dumps(rng.choice(ODD_VALUES)))
    return head + json.dumps(value, ensure_ascii=rng.random() < 0.5, separators=(",", ":")).encode("utf-8", "replace")


def _word(words: Sequence[bytes], rng: random.Random) -> Any:
    word = rng.choice(words)
    try:
        return json.loads(word)
    except ValueError:
        return word.decode("utf-8", "replace")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container within `value`, with each of its keys or positions."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _mutated_pickle(data: bytes, words: Sequence[bytes], others: Sequence[bytes], rng: random.Random) -> bytes | None:
    opcodes = _opcodes(data)
    if len(opcodes) < 2:
        return None
    at, end = sorted((rng.randrange(len(opcodes)), rng.randrange(len(opcodes))))
    end = min(end, at + rng.choice((1, 1, 4, 16)))
    how = rng.randrange(6)
    if how == 0:
        del opcodes[at:end]
    elif how == 1:
        opcodes[at:at] = opcodes[at:end]
    elif how == 2:
        opcodes[at], opcodes[end] = opcodes[end], opcodes[at]
    elif how == 3 and others:
        foreign = _opcodes(rng.choice(others))
        start = rng.randint(0, len(foreign))
        opcodes[at:end] = foreign[start : start + rng.choice((1, 4, 16))]
    elif how == 4:
        number = rng.choice(ODD_NUMBERS)
        opcodes[at] = rng.choice(
            (b"K" + bytes([number & 255]), b"J" + (number & 0xFFFFFFFF).to_bytes(4, "little"), b"\x8a\x09")
        ) + (number.to_bytes(9, "little", signed=True) if rng.random() < 0.3 else b"")
    else:
        opcodes.insert(at, rng.choice(words))
    return b"".join(opcodes)


def _opcodes(data: bytes) -> list[bytes]:
    """Return the bytes of each opcode, and what follows the last one that can be read."""
    starts = []
    with warnings.catch_warnings(), contextlib.suppress(ValueError):
        warnings.simplefilter("ignore")  # about escapes in strings
        for _, _, position in pickletools.genops(data):
            starts.append(position)
    return [data[start:end] for start, end in pairwise([*starts, len(data)])]
