"""What waiting ranks say on stderr of those that have not come, such as those of a script that loads on rank 0 only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping

from lowmem_load.distributed.heartbeat import SAME_ORDER
from lowmem_load.errors import listed
from lowmem_load.text import spell_ranks

NOTICE_S = 30.0
"""Seconds that a rank waits before it says for whom. Before each further line it waits twice as long."""

MAX_SHOWN = 4
"""Ranks of which a line says what they do."""


def say_who_is_absent(rank: int, waited_s: float, place: str, absent: str) -> None:
    """Write to stderr for whom a rank waits, and where; `absent` is the text of `absent_text`. It never fails."""
    line = f"lowmem_load: rank {rank} has waited {waited_s:.0f} s {place} for {absent}; {SAME_ORDER}"
    with contextlib.suppress(Exception):  # stderr may be closed
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def absent_text(absent: Mapping[int, str]) -> str:
    """Return ranks that have not come as text, given what is known of them; "" if there are none."""
    details = listed([f"rank {rank} {text}" for rank, text in absent.items()], MAX_SHOWN)
    return f"rank(s) {spell_ranks([*absent])} ({details})" if absent else ""
