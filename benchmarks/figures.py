"""Draw the figures of the documentation: `python -m benchmarks.figures RESULTS.json docs/figures`.

RESULTS.json is written by `python -m benchmarks.compare` (here: `--preset demo`, stock and lowmem on two ranks).
Needs matplotlib (`pip install matplotlib`), which nothing else here does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

from benchmarks.results import MIB

COLORS = {"stock": "#d95f0e", "lowmem": "#1b9e77"}
RANK_COLORS = ("#3b6fb6", "#e3a32a")
NAMES = {"stock": "stock ZeRO-3", "lowmem": "lowmem_load"}
DRAWN = "#333333"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write all figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument("results", type=Path, help="results.json of python -m benchmarks.compare")
    parser.add_argument("folder", type=Path, help="where the figures go")
    chosen = parser.parse_args(arguments)
    results = json.loads(chosen.results.read_text(encoding="utf-8"))
    loads = {load["method"]: load["ranks"] for load in results["loads"] if load["world_size"] == 2}
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "lowmem_load", "axes.spines.top": False})
    plt.rcParams.update({"axes.spines.right": False})
    for name, figure in {
        "memory": memory_over_time(loads),
        "paths": paths(loads),
        "phases": phases(loads),
    }.items():
        figure.savefig(chosen.folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight", facecolor="white")
        plt.close(figure)


def memory_over_time(loads: dict[str, Any]) -> Any:
    """Return the figure of resident memory over the seconds of a load, of each rank."""
    figure, axes = plt.subplots(figsize=(6.4, 3))
    for method, ranks in loads.items():
        if method not in NAMES:
            continue
        for rank, style in zip(ranks, ("-", "--"), strict=True):
            samples = rank["memory"]["samples"]
            label = f"{NAMES[method]}, rank {rank['rank']}"
            xs, ys = zip(*((at, (anon + file) / MIB) for at, anon, file in samples), strict=True)
            axes.plot(xs, ys, style, color=COLORS[method], linewidth=1.6, label=label)
    partition = loads["lowmem"][0]["partition_bytes"] / MIB
    axes.axhline(partition, color="black", linewidth=0.8)
    axes.annotate(f"partition of a rank: {partition:.0f} MiB", (1, partition), (0, -3), textcoords="offset points",
                  xycoords=("axes fraction", "data"), ha="right", va="top", fontsize=8)  # fmt: skip
    axes.set(xlabel="seconds since the start of the load", ylabel="MiB above the start", ylim=0, xlim=0)
    axes.legend(frameon=False, fontsize=8)
    return figure


def paths(loads: dict[str, Any]) -> Any:
    """Return the figure of the two ways from the files into partitions, heights in proportion to bytes."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(6.4, 4.4))
    partition = loads["lowmem"][0]["partition_bytes"] / MIB
    for axes, method in ((above, "stock"), (below, "lowmem")):
        axes.set(xlim=(0, 10), ylim=(-0.1, 2.05))
        axes.axis("off")
        axes.set_title(f"{NAMES[method]}: {_seconds(loads[method]):.1f} s", loc="left", color=COLORS[method],
                       fontweight="bold", fontsize=10)  # fmt: skip
        _box(axes, (0.1, 0), (1.2, 2), f"files\n{2 * partition:.0f} MiB", "#dddddd")
        for rank in loads[method]:
            low = 1 - rank["rank"]
            _box(axes, (7.9, low + 0.05), (2.1, 0.9), f"partition of rank {rank['rank']}\n{partition:.0f} MiB\n"
                 f"(peak {rank['memory']['peak'] / MIB:.0f} MiB)", RANK_COLORS[rank["rank"]], "white")  # fmt: skip
    moved = loads["stock"][0]["network"]["payload_bytes"] / MIB
    whole = f"each parameter\nwhole on each rank\ngathered, broadcast:\n{moved:.0f} MiB per rank"
    _box(above, (2.2, 0), (1.6, 2), f"rank 0 maps\nall of it\n{2 * partition:.0f} MiB", "#f3c9a8")
    _box(above, (4.8, 0), (2.1, 2), whole, "#f3c9a8")
    _arrow(above, (1.3, 1), (2.2, 1), "read")
    _arrow(above, (3.8, 1), (4.8, 1), "send")
    for low in (0.5, 1.5):
        _arrow(above, (6.9, low), (7.9, low), "cut up")
    for rank in loads["lowmem"]:
        low = 1.5 - rank["rank"]
        read = f"{rank['num_reads']} reads, {rank['read_bytes'] / MIB:.0f} MiB: its own bytes,"
        _arrow(below, (1.3, low), (7.9, low), f"{read}\nstraight to where they stay")
    figure.tight_layout()
    return figure


def _seconds(ranks: list[Any]) -> float:
    return max(rank["seconds"] for rank in ranks)


def _box(
    axes: Any, at: tuple[float, float], size: tuple[float, float], text: str, color: str, ink: str = DRAWN
) -> None:
    axes.add_patch(Rectangle(at, *size, facecolor=color, edgecolor="none"))
    axes.text(at[0] + size[0] / 2, at[1] + size[1] / 2, text, ha="center", va="center", fontsize=7.5, color=ink)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], text: str) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=DRAWN, linewidth=1))
    axes.text((start[0] + end[0]) / 2, start[1] + 0.08, text, ha="center", va="bottom", fontsize=8, color=DRAWN)


def phases(loads: dict[str, Any]) -> Any:
    """Return the figure of the seconds of a load by phase, of each rank."""
    figure, axes = plt.subplots(figsize=(6.4, 2.1))
    shades = {"describe": "#0b5e45", "plan": "#1b9e77", "compare": "#7fcdb0", "read": "#a9dcc8"}
    ticks = []
    rows = [rank for method in NAMES for rank in loads[method]]
    for at, rank in enumerate(rows):
        ticks.append(f"{NAMES[rank['method']]}, rank {rank['rank']}")
        left = 0.0
        for name, seconds in rank["phases_s"].items():
            axes.barh(at, seconds, left=left, color=shades[name], label=name if at == len(NAMES) else None)
            left += seconds
        axes.barh(at, rank["seconds"] - left, left=left, color=COLORS["stock"] if not left else "#e8e8e8",
                  label="waiting, and the rest" if at == len(NAMES) else None)  # fmt: skip
        axes.annotate(f" {rank['seconds']:.2f} s", (rank["seconds"], at), va="center", fontsize=8)
    axes.set_yticks(range(len(ticks)), ticks)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("seconds")
    axes.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.4, 1), ncols=5, columnspacing=1)
    return figure


if __name__ == "__main__":
    main()
