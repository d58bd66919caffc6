"""A picture of a comparison: seconds and host memory of each method."""

from __future__ import annotations

import os
from collections.abc import Sequence

from lowmem_load.bench.compare import Row
from lowmem_load.plots import new_figure, save_figure


def draw(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Write the picture as PNG, or as what the file's name ends in.

    Raises:
        ConfigError: there is no matplotlib, or the file cannot be written.
    """
    run = [row for row in rows if not row.skipped]
    figure = new_figure(8, 1.2 + 0.5 * len(run))
    left, right = figure.subplots(1, 2, sharey=True)
    methods = [row.method for row in run]
    left.barh(methods, [row.seconds for row in run], color="#4c78a8")
    left.set_xlabel("seconds, slowest rank")
    left.invert_yaxis()
    right.barh(methods, [row.peak_bytes / 2**20 for row in run], color="#f58518")
    right.set_xlabel("MiB of host memory, largest rank")
    save_figure(figure, path)
