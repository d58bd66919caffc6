"""The figures of a benchmark run: peak memory and seconds as bars, memory over time as lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt  # the backend has to be chosen before pyplot is imported
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from benchmarks.results import Group

COLORS = {"ordinary": "#8c6bb1", "stock": "#d95f0e", "lowmem": "#1b9e77", "floor": "#7f7f7f", "tuned": "#c0c0c0"}
MIB = 2**20


def plot_results(groups: list[Group], title: str, path: Path) -> None:
    """Write peak memory and load time of every rank as bars."""
    ranks = [rank for group in groups for rank in group.ranks]
    figure, (memory_axes, time_axes) = plt.subplots(2, 1, figsize=(max(8, 1 + 0.75 * len(ranks)), 9))
    positions = _positions(groups)
    _plot_memory(memory_axes, groups, positions)
    _plot_seconds(time_axes, groups, positions)
    labels = [f"rank {rank.rank}" for rank in ranks]
    for axes in (memory_axes, time_axes):
        axes.set_xticks(positions, labels, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.15)
        _label_groups(axes, groups, positions)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _positions(groups: list[Group]) -> list[float]:
    positions = []
    at = 0.0
    for index, group in enumerate(groups):
        if index and group.world_size != groups[index - 1].world_size:
            at += 0.8  # a wider gap where the number of ranks changes
        for _ in group.ranks:
            positions.append(at)
            at += 1.0
        at += 0.5
    return positions


def _label_groups(axes: Any, groups: list[Group], positions: list[float]) -> None:
    first = 0
    for group in groups:
        count = len(group.ranks)
        middle = (positions[first] + positions[first + count - 1]) / 2
        text = f"{group.method}\n{group.world_size} rank{'s' if group.world_size > 1 else ''}"
        axes.annotate(
            text, (middle, 0), (0, -22), xycoords=("data", "axes fraction"), textcoords="offset points",
            ha="center", va="top", fontsize=9, color=COLORS[group.method], fontweight="bold",
        )  # fmt: skip
        first += count


def _plot_memory(axes: Any, groups: list[Group], positions: list[float]) -> None:
    ranks = [rank for group in groups for rank in group.ranks]
    colors = [COLORS[rank.method] for rank in ranks]
    anon = [rank.memory.anon_at_peak / MIB for rank in ranks]
    file = [rank.memory.file_at_peak / MIB for rank in ranks]
    axes.bar(positions, anon, 0.8, color=colors)
    axes.bar(
        positions, file, 0.8, bottom=anon, color=colors, alpha=0.35, hatch="//", edgecolor="white"
    )  # fmt: skip
    partition = [rank.partition_bytes / MIB for rank in ranks]
    left, right = [at - 0.45 for at in positions], [at + 0.45 for at in positions]
    axes.hlines(partition, left, right, color="black", linewidth=2)
    for at, rank in zip(positions, ranks, strict=True):
        height = max(rank.memory.peak, rank.memory.anon_at_peak + rank.memory.file_at_peak)
        axes.annotate(f"{rank.memory.peak / MIB:.0f}", (at, height / MIB), (0, 3), textcoords="offset points",
                      ha="center", fontsize=8)  # fmt: skip
    axes.set_ylabel("peak memory of the rank above its start, MiB")
    # Colours tell the methods apart, so the legend is in grey.
    handles = [
        Patch(facecolor="gray", label="anonymous at the peak (sampled)"),
        Patch(facecolor="gray", alpha=0.35, hatch="//", edgecolor="white", label="file-backed at the peak (sampled)"),
        Line2D([], [], color="black", linewidth=2, label="partition"),
    ]
    axes.legend(handles=handles, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)


def _plot_seconds(axes: Any, groups: list[Group], positions: list[float]) -> None:
    ranks = [rank for group in groups for rank in group.ranks]
    seconds = [rank.seconds for rank in ranks]
    axes.bar(positions, seconds, 0.8, color=[COLORS[rank.method] for rank in ranks])
    for at, value in zip(positions, seconds, strict=True):
        axes.annotate(f"{value:.2f}", (at, value), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.set_ylabel("seconds of the load")


def plot_memory_over_time(groups: list[Group], title: str, path: Path) -> None:
    """Write memory over time: one row per method, one column per number of ranks; axes shared in a column."""
    world_sizes = sorted({group.world_size for group in groups})
    methods = [method for method in COLORS if any(group.method == method for group in groups)]
    figure, grid = plt.subplots(
        len(methods), len(world_sizes), figsize=(1.5 + 5.5 * len(world_sizes), 1.2 + 2.3 * len(methods)),
        squeeze=False, sharex="col", sharey="col",
    )  # fmt: skip
    for row, method in enumerate(methods):
        for column, world_size in enumerate(world_sizes):
            axes = grid[row][column]
            axes.set_title(f"{method}, {world_size} rank{'s' if world_size > 1 else ''}", fontsize=9)
            group = next((g for g in groups if (g.method, g.world_size) == (method, world_size)), None)
            if group is None:
                axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", color="gray")
                continue
            _plot_samples(axes, group)
        grid[row][0].set_ylabel("MiB above start")
    for axes in grid[-1]:
        axes.set_xlabel("seconds since the start of the load")
    figure.suptitle(title, fontsize=10)
    handles = [Line2D([], [], color=f"C{rank}", label=f"rank {rank}") for rank in range(max(world_sizes))]
    handles += [
        Line2D([], [], color="gray", label="anonymous + file-backed"),
        Line2D([], [], color="gray", linestyle=":", label="anonymous"),
        Line2D([], [], color="black", linewidth=0.8, label="partition"),
    ]
    figure.legend(handles=handles, loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _plot_samples(axes: Any, group: Group) -> None:
    for rank in group.ranks:
        times = [sample[0] for sample in rank.memory.samples]
        anon = [sample[1] / MIB for sample in rank.memory.samples]
        total = [(sample[1] + sample[2]) / MIB for sample in rank.memory.samples]
        color = f"C{rank.rank}"
        axes.plot(times, total, color=color, linewidth=1.2)
        axes.plot(times, anon, color=color, linewidth=1.0, linestyle=":")
    partition = max(rank.partition_bytes for rank in group.ranks) / MIB
    axes.axhline(partition, color="black", linewidth=0.8)


def plot_scale(worlds: list[dict[str, Any]], layers: list[dict[str, Any]], path: Path) -> None:
    """Write what a rank costs, before and now: against the size of the world, and against the number of tensors.

    Args:
        worlds, layers: results of `benchmarks.scale` as JSON has them; failed ones are left out.
        path: of the figure; its name says of which kind.
    """
    plt.rcParams["svg.hashsalt"] = "lowmem_load"  # the same file of the same figures
    figure, grid = plt.subplots(2, 2, figsize=(10, 7))
    for column, (rows, across, label) in enumerate(
        [(worlds, "world_size", "ranks of the world"), (layers, "num_tensors", "tensors of the checkpoint")]
    ):
        time_axes, cost_axes = grid[0][column], grid[1][column]
        for version, color in (("before", COLORS["stock"]), ("now", COLORS["lowmem"])):
            measured = (row for row in rows if row["version"] == version and "failed" not in row)
            found = sorted(measured, key=lambda row: row[across])
            xs = [row[across] for row in found]
            seconds = [row["phases_s"]["describe"] + row["phases_s"]["plan"] for row in found]
            reads = [row["touched"]["num_reads"] for row in found]
            over = [row["over_bytes"] / MIB for row in found]
            time_axes.plot(xs, seconds, "o-", color=color, label=version)
            cost_axes.plot(xs, over if column else reads, "o-", color=color, label=version)
        time_axes.set_title(rows[0]["model"], fontsize=10)
        time_axes.set_ylabel("CPU seconds to describe and plan")
        cost_axes.set_ylabel("peak over the partition, MiB" if column else "reads of the rank")
        for axes in (time_axes, cost_axes):
            axes.set_xlabel(label)
            axes.margins(y=0.15)
            axes.legend(fontsize=8, frameon=False)
            axes.spines[["top", "right"]].set_visible(False)
            if column:
                axes.xaxis.set_major_formatter("{x:,.0f}")
            else:
                axes.set_xscale("log")
                axes.set_xticks(sorted({row[across] for row in rows}), minor=False)
                axes.xaxis.set_major_formatter("{x:.0f}")
                axes.xaxis.set_minor_locator(NullLocator())
        time_axes.set_ylim(bottom=0)
    grid[1][0].set_yscale("log")
    grid[1][1].set_ylim(bottom=0)
    figure.suptitle("Simulated: one process is one rank of the world, its checkpoint sparse files", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
