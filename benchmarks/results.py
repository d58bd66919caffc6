"""Results of one benchmark run: grouped by load, checked against each other, reduced to ratios."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.worker import RankResult

# Methods that must end with bit-identical partitions. The floors join them when they read the dtype that is loaded.
MODEL_METHODS = ("stock", "ordinary", "lowmem")


@dataclass(slots=True)
class Group:
    """All ranks of one load; `seconds_of_repeats` has the slowest rank's seconds of each repetition."""

    method: str
    world_size: int
    ranks: list[RankResult]
    seconds_of_repeats: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds of the slowest rank."""
        return max(rank.seconds for rank in self.ranks)

    @property
    def over_partition_bytes(self) -> int:
        """Largest peak above the rank's own partition."""
        return max(rank.memory.peak - rank.partition_bytes for rank in self.ranks)


def median_group(repeats: list[list[RankResult]]) -> Group:
    """Return the repetition of median duration (the lower one of an even number)."""
    groups = sorted((Group(ranks[0].method, len(ranks), ranks) for ranks in repeats), key=lambda group: group.seconds)
    chosen = groups[(len(groups) - 1) // 2]
    chosen.seconds_of_repeats = [max(rank.seconds for rank in ranks) for ranks in repeats]
    return chosen


def find_group(groups: list[Group], method: str, world_size: int) -> Group | None:
    """Return the group of this method and world size, or None if it was not run."""
    return next((group for group in groups if (group.method, group.world_size) == (method, world_size)), None)


def different_weights(groups: list[Group], floor_dtype_equal: bool) -> tuple[list[str], list[str]]:
    """Return (what was compared, what differs), one line each: partitions must be equal bit for bit."""
    compared, differences = [], []
    for world_size in sorted({group.world_size for group in groups}):
        names = [*MODEL_METHODS, "floor", "tuned"] if floor_dtype_equal else list(MODEL_METHODS)
        present = [group for name in names if (group := find_group(groups, name, world_size))]
        if len(present) < 2:
            continue
        reference = present[0]
        differences += [line for other in present[1:] for line in _differences(reference, other)]
        num_parameters = len(reference.ranks[0].digests)
        methods = ", ".join(group.method for group in present)
        compared.append(f"{world_size} ranks: {num_parameters} parameters x {world_size} ranks, {methods}")
    return compared, differences


def _differences(reference: Group, other: Group) -> list[str]:
    lines = []
    for expected, got in zip(reference.ranks, other.ranks, strict=True):
        where = f"rank {got.rank} of {reference.world_size}"
        for name in sorted(expected.digests.keys() | got.digests.keys()):
            if name not in got.digests or name not in expected.digests:
                lacking = other.method if name not in got.digests else reference.method
                lines.append(f"{name}: {where}: missing from {lacking}")
            elif expected.digests[name] != got.digests[name]:
                lines.append(f"{name}: {where}: {other.method} differs from {reference.method}")
    return lines


def network_failures(groups: list[Group]) -> list[str]:
    """Return a line for each lowmem rank that moved a payload large enough to be weights."""
    return [
        f"lowmem, rank {rank.rank} of {group.world_size}: {rank.network.large_payload_bytes} bytes in payloads over "
        f"64 KiB went over the network; expected 0"
        for group in groups
        if group.method == "lowmem"
        for rank in group.ranks
        if rank.network.large_payload_bytes
    ]


def loss_failures(groups: list[Group]) -> list[str]:
    """Return a line for each rank whose stock and lowmem losses differ in any bit."""
    lines = []
    for group in groups:
        if group.method != "lowmem" or not (stock := find_group(groups, "stock", group.world_size)):
            continue
        for expected, got in zip(stock.ranks, group.ranks, strict=True):
            if expected.losses != got.losses:
                lines.append(
                    f"rank {got.rank} of {group.world_size}: stock losses {expected.losses}, lowmem {got.losses}"
                )
    return lines


def ratios(groups: list[Group]) -> list[dict[str, Any]]:
    """Return, per world size, the figures that compare methods; None where a method was not run."""
    rows = []
    for world_size in sorted({group.world_size for group in groups}):
        stock, ordinary, lowmem, floor, tuned = (
            find_group(groups, name, world_size) for name in ("stock", "ordinary", "lowmem", "floor", "tuned")
        )
        rows.append(
            {
                "world_size": world_size,
                "ordinary_over_lowmem_seconds": _ratio(ordinary, lowmem),
                "stock_over_lowmem_seconds": _ratio(stock, lowmem),
                "lowmem_over_floor_seconds": _ratio(lowmem, floor),
                "lowmem_over_tuned_seconds": _ratio(lowmem, tuned),
                "stock_over_floor_seconds": _ratio(stock, floor),
                "ordinary_over_floor_seconds": _ratio(ordinary, floor),
                "lowmem_read_over_needed": read_over_needed_of(lowmem) if lowmem else None,
                "peak_minus_partition_bytes": {
                    group.method: group.over_partition_bytes for group in groups if group.world_size == world_size
                },
            }
        )
    return rows


def _ratio(above: Group | None, below: Group | None) -> float | None:
    return above.seconds / below.seconds if above and below else None


def read_over_needed_of(group: Group) -> float | None:
    """Return the bytes that were read over those that were needed; None where that is not known."""
    needed = sum(rank.needed_bytes or 0 for rank in group.ranks)
    return sum(rank.read_bytes or 0 for rank in group.ranks) / needed if needed else None


def group_to_json(group: Group) -> dict[str, Any]:
    """Return a group as JSON data; the digests of a rank are folded into one."""
    ranks = []
    for rank in group.ranks:
        fields = asdict(rank)
        digests = fields.pop("digests")
        lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
        fields["digest_of_digests"] = hashlib.sha256(lines.encode()).hexdigest()
        ranks.append(fields)
    return {
        "method": group.method,
        "world_size": group.world_size,
        "seconds": group.seconds,
        "seconds_median_of_repeats": median(group.seconds_of_repeats),
        "seconds_of_repeats": group.seconds_of_repeats,
        "ranks": ranks,
    }
