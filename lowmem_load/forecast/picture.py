"""A picture of the memory that a job takes, by phase."""

from __future__ import annotations

import os
from collections.abc import Sequence

from lowmem_load.forecast.job import Forecast
from lowmem_load.plots import new_figure, save_figure
from lowmem_load.quantities import size


def memory_by_phase(found: Forecast) -> Sequence[tuple[str, str, int]]:
    """Return phase, whose memory, and bytes: what loading and training need, in order."""
    phases = []
    for need in found.verdict.needs:
        whose = "node" if need.what.startswith("host") else "GPU"
        phases.append(("loading" if need.what.endswith("loading") else "training", whose, need.needed_bytes))
    return phases


def draw(found: Forecast, path: str | os.PathLike[str]) -> None:
    """Write the picture as PNG, or as what the file's name ends in.

    Raises:
        ConfigError: there is no matplotlib, or the file cannot be written.
    """
    phases = memory_by_phase(found)
    limits = {"node": None, "GPU": None} | {
        ("node" if need.what.startswith("host") else "GPU"): need.available_bytes for need in found.verdict.needs
    }
    whose = list(dict.fromkeys(each for _, each, _ in phases))
    figure = new_figure(7, 1.2 + 1.1 * len(whose))
    for axes, each in zip(figure.subplots(len(whose), squeeze=False)[:, 0], whose, strict=True):
        bars = [(phase, nbytes / 2**30) for phase, owner, nbytes in phases if owner == each]
        axes.barh([phase for phase, _ in bars], [amount for _, amount in bars], color=["#4c78a8", "#f58518"])
        axes.set_xlabel(f"GiB of a {each}")
        axes.invert_yaxis()
        limit = limits[each]
        if limit is not None:
            axes.axvline(limit / 2**30, color="black", linestyle="--")
            axes.set_title(f"there is: {size(limit)}", loc="right", fontsize="small")
    figure.suptitle(f"{found.name}: {found.world_size} ranks")
    save_figure(figure, path)
