"""Whether files were written by one save, as far as their times tell.

A save over an earlier one that was killed leaves files of both, with equal names, sizes and shapes. torch's files have
nothing in them that tells one save from another. Copies may have other times than their originals: tools that do not
keep them write one file after the other.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable

from lowmem_load.errors import CheckpointError

SLACK_S = 1.0
"""Clocks of servers, and file systems that keep whole seconds."""

PATIENCE_S = 10.0
"""Ranks write at the same time. One may be this much later than all others, or as long as it takes to copy its file."""

COPIED_BYTES_PER_S = 25e6


def check_written_before(last: str, paths: Iterable[str]) -> None:
    """Raise CheckpointError if some files were written before the one that a save writes last, and some after it."""
    end = os.stat(last).st_mtime
    times = {path: os.stat(path).st_mtime for path in paths}
    later = [path for path, when in times.items() if when > end + SLACK_S]
    if later and any(when < end for when in times.values()):
        raise _of_two_saves(later[0], times[later[0]], last, end, last)


def check_written_together(paths: Iterable[str]) -> None:
    """Raise CheckpointError if ranks have written their files at times that are too far apart."""
    files = sorted((os.stat(path).st_mtime, path, os.stat(path).st_size) for path in paths)
    for (before, earlier, _), (when, path, nbytes) in itertools.pairwise(files):
        if when - before > PATIENCE_S + nbytes / COPIED_BYTES_PER_S:
            raise _of_two_saves(path, when, earlier, before, os.path.join(os.path.dirname(path), "*"))


def _of_two_saves(later: str, when: float, earlier: str, before: float, to_touch: str) -> CheckpointError:
    return CheckpointError(
        f"{later}: was written at {_shown(when)}, {os.path.basename(earlier)} at {_shown(before)}: a save over an "
        "earlier one did not end; take another checkpoint. If these are of one save, and were copied without their "
        f"times: touch {to_touch}"
    )


def _shown(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
