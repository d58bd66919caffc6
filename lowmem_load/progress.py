"""The progress bar of a load or a save, on rank 0."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from tqdm.auto import tqdm

DELAY_S = 3.0
"""Seconds before the bar appears where it was not asked for: what is short stays quiet."""


@contextlib.contextmanager
def progress_bar(total: int, description: str, asked: bool | None, rank: int) -> Iterator[Callable[[int], object]]:
    """Yield a function that is told of bytes that are done.

    Args:
        total: bytes.
        description: what stands before the bar.
        asked: True shows it, False does not, None shows a long one where stderr is a terminal.
        rank: of this process; only rank 0 shows anything.
    """
    if rank != 0 or not (sys.stderr.isatty() if asked is None else asked):
        yield _unseen
        return
    with tqdm(
        total=total,
        desc=description,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=False,  # whatever TQDM_DISABLE says
        delay=0 if asked else DELAY_S,
    ) as bar:
        yield bar.update


def _unseen(_: int) -> None: ...
