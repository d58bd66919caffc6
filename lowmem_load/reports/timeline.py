"""Reports of many ranks as a picture: when each rank was in which phase."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from lowmem_load.plots import new_figure, save_figure

COLORS = {"describe": "#4c78a8", "plan": "#72b7b2", "compare": "#b279a2", "verify": "#9d755d", "read": "#f58518"}
OTHER = "#bab0ac"


def draw(reports: Iterable[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Write the picture as PNG, or as what the file's name ends in.

    Raises:
        ConfigError: there is no matplotlib, or the file cannot be written.
    """
    known = sorted(reports, key=lambda report: report["rank"])
    first = min((span["begin_s"] for report in known for span in report["spans"]), default=0.0)
    phases = dict.fromkeys(span["phase"] for report in known for span in report["spans"])
    ranks = sorted({report["rank"] for report in known})
    figure = new_figure(9, 1.5 + min(12.0, 0.3 * len(ranks)))
    axes = figure.subplots()
    from matplotlib.patches import Patch

    for report in known:
        for span in report["spans"]:
            begin, width = span["begin_s"] - first, span["end_s"] - span["begin_s"]
            axes.barh(ranks.index(report["rank"]), width, left=begin, color=COLORS.get(span["phase"], OTHER))
    every = max(1, len(ranks) // 24)
    axes.set_yticks(range(0, len(ranks), every), [f"rank {rank}" for rank in ranks[::every]])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(", ".join(dict.fromkeys(report["name"] for report in known)), loc="left", fontsize="medium")
    axes.legend(
        handles=[Patch(color=COLORS.get(phase, OTHER), label=phase) for phase in phases],
        loc="upper left",
        bbox_to_anchor=(1, 1),
    )
    save_figure(figure, path)
