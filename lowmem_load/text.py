"""Sizes, counts, ranks and digests as text; names of modules; URLs without secrets."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Sequence
from urllib.parse import urlsplit


def size(nbytes: float) -> str:
    """Return bytes as text, in the largest unit of which there is at least one: "1.50 GiB"."""
    amount, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.{2 if abs(amount) < 10 else 1}f} {unit}"


def share(done: int, total: int) -> str:
    """Return bytes that are done, of all, as text: "1.5 of 20.0 MiB"."""
    return f"{done / (1 << 20):.1f} of {total / (1 << 20):.1f} MiB"


def count(number: float) -> str:
    """Return a number of elements as text: "8.03 B", "1,234"."""
    for power, unit in ((12, "T"), (9, "B"), (6, "M")):
        if number >= 10**power:
            return f"{number / 10**power:.2f} {unit}"
    return f"{number:,.0f}"


def is_below(name: str, chosen: Iterable[str]) -> bool:
    """Whether the module or parameter of this name is a chosen one or lies below one."""
    return any(not top or name == top or name.startswith(f"{top}.") for top in chosen)


def outer_prefix(names: Collection[str], keys: Collection[str]) -> str:
    """Return the keys with which all names begin, each followed by a dot; "" if they begin with none."""
    outer = ""
    while names and (
        longer := [f"{outer}{key}." for key in keys if all(name.startswith(f"{outer}{key}.") for name in names)]
    ):
        outer = longer[0]
    return outer


def plain_url(url: str) -> str:
    """Return a URL without credentials, query and fragment; only its scheme if it is malformed."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # else the path may begin within a password
    except ValueError:
        return f"{url.partition('://')[0]}://..."
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def is_http(url: str) -> bool:
    """Return whether a URL is on an HTTP server."""
    return urlsplit(url).scheme in ("http", "https")


def without_secrets(text: str) -> str:
    """Return a text without user names, passwords and queries in its URLs."""
    return re.sub(r"(?<=://)[^/\s'\"]*@", "", re.sub(r"\?[^\s'\"<>)]*", "?...", text))


# -- digests by which ranks compare plans, configurations and arguments -----------------------------------------------

MAX_VALUE = 80  # characters of a configuration's value that a message shows; ranks compare longer ones by digest


def fingerprint(lines: Iterable[str]) -> str:
    """Return a digest of text lines: 64 bits in hex."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()[:16]


def key_of(value: object) -> bytes:
    """Return a key for numbers and text, for dicts that untrusted files fill.

    The hashes of tuples of numbers can be made equal, and then a dict compares each key with all others.
    """
    return hashlib.blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def spell_ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks with runs shortened: [0, 1, 2, 5] is `0-2, 5`."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
