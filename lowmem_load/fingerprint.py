"""Digests by which ranks compare plans, configurations and arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

MAX_VALUE = 80
"""Characters of a configuration's value that a message shows; ranks compare longer ones by digest."""


def fingerprint(lines: Iterable[str]) -> str:
    """Return a digest of text lines: 64 bits in hex."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()[:16]
