"""Compare ways to load a checkpoint under ZeRO-3 in one run: `python -m benchmarks.compare --preset demo`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import cached_bytes, checkpoint_of, drop_page_cache, read_headers, warm_page_cache
from benchmarks.launch import GroupError, run_group
from benchmarks.machine import Machine, describe_machine
from benchmarks.methods import DTYPES, METHODS
from benchmarks.plots import plot_memory_over_time, plot_results
from benchmarks.results import (
    Group,
    different_weights,
    group_to_json,
    loss_failures,
    median_group,
    network_failures,
    ratios,
)
from benchmarks.table import (
    DEFINITIONS,
    log,
    loss_lines,
    markdown_table,
    rank_table,
    ratio_table,
    repeat_lines,
    summary_lines,
)
from benchmarks.worker import RankResult, Spec
from lowmem_load.bench.memory import available_bytes

# Memory of a rank beside weights: imports and the modules themselves are about 0.7 GiB here.
RANK_OVERHEAD_BYTES = 2**30
# Over all ranks. ZeRO-3 with AdamW keeps 14 (bf16 weights 2, fp32 weights 4, two moments 8); with gradients and what a
# step makes for a while, 32 to 35 were measured at 2 ranks on models of 0.5 and 0.1 B parameters.
TRAIN_BYTES_PER_PARAM = 36
# Trained instead when the measured model is too large to train here.
SMALL_TRAIN_PARAMS = 100_000_000
# The share of the available memory that a load or training may be expected to take.
MEMORY_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class Preset:
    """A named comparison: how many parameters, which methods at which numbers of ranks, how many training steps."""

    num_params: int
    ranks_of_method: dict[str, tuple[int, ...]]
    train_steps: int
    family: str = "llama"


PRESETS = {
    "demo": Preset(500_000_000, dict.fromkeys(METHODS, (2,)), train_steps=5),
    "llama-1.5b": Preset(
        1_500_000_000,
        {"ordinary": (2,), "stock": (1, 2, 4), "lowmem": (1, 2, 4), "floor": (1, 2, 4), "tuned": (1, 2, 4)},
        train_steps=0,
    ),
    # No floor: a fused target is made of many tensors in the files, so it has no partition that is one of theirs.
    "qwen3-moe": Preset(1_000_000_000, {"stock": (2,), "lowmem": (1, 2, 4)}, train_steps=0, family="qwen3-moe"),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run does, from the preset and the command line."""

    num_params: int
    family: str
    loads: list[tuple[str, int]]  # (method, world_size) in the order of the run
    train_steps: int
    dtype: str
    repeats: int
    once: tuple[str, ...]  # methods that are not repeated
    cold: bool
    out: Path
    cache: Path
    keep_checkpoint: bool


def parse_arguments(arguments: Sequence[str] | None = None) -> list[Plan]:
    """Return what the command line asks for: a plan for each state of the page cache."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="demo")
    parser.add_argument("--params", type=int, metavar="N", help="parameters of the model, instead of the preset's")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="numbers of ranks, for every method")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="methods to run, instead of all")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype to load in; the checkpoint is bf16")
    parser.add_argument("--train-steps", type=int, metavar="N", help="steps that stock and lowmem train after the load")
    parser.add_argument("--repeats", type=int, default=1, help="repetitions; the one of median duration is shown")
    parser.add_argument("--once", nargs="+", choices=METHODS, default=[], help="methods that are not repeated")
    parser.add_argument("--cold", action="store_true", help="drop the shard files from the page cache before each load")
    parser.add_argument("--also-cold", action="store_true", help="do all of it, then again as with --cold")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the results")
    parser.add_argument("--cache", type=Path, default=Path(".cache/benchmarks"), help="folder of the checkpoints")
    parser.add_argument("--keep-checkpoint", action="store_true", help="leave a new checkpoint for the next run")
    chosen = parser.parse_args(arguments)
    preset = PRESETS[chosen.preset]
    if min(chosen.ranks or [1]) < 1 or chosen.repeats < 1:
        parser.error("--ranks and --repeats have to be at least 1")
    ranks_of_method = {
        method: tuple(chosen.ranks or preset.ranks_of_method[method])
        for method in METHODS
        if method in (chosen.methods or METHODS) and method in preset.ranks_of_method
    }
    world_sizes = sorted({world_size for ranks in ranks_of_method.values() for world_size in ranks})
    plan = Plan(
        num_params=chosen.params or preset.num_params,
        family=preset.family,
        loads=[
            (m, world_size) for world_size in world_sizes for m in ranks_of_method if world_size in ranks_of_method[m]
        ],
        train_steps=preset.train_steps if chosen.train_steps is None else chosen.train_steps,
        dtype=chosen.dtype,
        repeats=chosen.repeats,
        once=tuple(chosen.once),
        cold=chosen.cold,
        out=chosen.out.resolve(),
        cache=chosen.cache.resolve(),
        keep_checkpoint=chosen.keep_checkpoint,
    )
    again = [replace(plan, cold=True, train_steps=0, out=plan.out / "cold")] if chosen.also_cold else []
    return [plan, *again]


def reason_to_skip(method: str, world_size: int, model_bytes: int) -> str | None:
    """Return why a load does not fit in memory, or None."""
    copies = world_size + 1 if method == "ordinary" else 2  # ordinary: one full copy per rank, then the partitions
    # One more copy: pages of mapped files count as used while they are mapped.
    expected = (copies + 1) * model_bytes + world_size * RANK_OVERHEAD_BYTES
    available = available_bytes()
    if available is None or expected <= MEMORY_SHARE * available:
        return None
    return f"needs about {expected / 2**30:.1f} GiB of {available / 2**30:.1f} GiB available"


def run_loads(plan: Plan, checkpoint: Path, train_steps: int, on_gpu: bool) -> tuple[list[Group], list[str]]:
    """Run all loads of the plan, repetitions interleaved so that drift of the machine meets all of them alike.

    Returns the groups, and a line for each load that was skipped.
    """
    runs: dict[tuple[str, int], list[list[RankResult]]] = {load: [] for load in plan.loads}
    skipped: dict[tuple[str, int], str] = {}
    itemsize = DTYPES[plan.dtype].itemsize
    model_bytes = sum(tensor.numel for tensor in read_headers(checkpoint)) * itemsize
    for repeat in range(plan.repeats):
        for method, world_size in plan.loads:
            if repeat and method in plan.once:
                continue
            if reason := reason_to_skip(method, world_size, model_bytes):
                skipped[method, world_size] = f"skipped: {method}, {world_size} ranks: {reason}"
                log(skipped[method, world_size])
                continue
            _set_page_cache(checkpoint, cold=plan.cold)
            out = plan.out / "runs" / f"{method}-{world_size}-{repeat}"
            steps = train_steps if method in ("stock", "lowmem") and repeat == 0 else 0
            spec = Spec(method, str(checkpoint), plan.dtype, steps, str(out), is_cold=plan.cold)
            ranks = run_group(spec, world_size, on_gpu)
            runs[method, world_size].append(ranks)
            peak = max(rank.memory.peak for rank in ranks) / 2**20
            log(f"done: {method}, {world_size} ranks: {max(r.seconds for r in ranks):.2f} s, peak {peak:.0f} MiB")
    groups = []
    for repeats in runs.values():
        if repeats:
            group = median_group(repeats)
            for shown, trained in zip(group.ranks, repeats[0], strict=True):
                shown.losses, shown.train_seconds = trained.losses, trained.train_seconds
                shown.train_peak_bytes = trained.train_peak_bytes
            groups.append(group)
    return groups, list(skipped.values())


def _set_page_cache(checkpoint: Path, *, cold: bool) -> None:
    if not cold:
        warm_page_cache(checkpoint)
        return
    drop_page_cache(checkpoint)
    if kept := cached_bytes(checkpoint):
        log(f"the page cache kept {kept / 2**20:.1f} MiB of the shard files, though it was asked to drop them")


def train_small(plan: Plan, on_gpu: bool) -> list[Group]:
    """Train a smaller model, built the same way, where the measured one does not fit."""
    groups = []
    with checkpoint_of(SMALL_TRAIN_PARAMS, plan.cache, plan.keep_checkpoint, log) as checkpoint:
        for method, world_size in plan.loads:
            if method in ("stock", "lowmem"):
                out = plan.out / "runs" / f"{method}-{world_size}-train"
                spec = Spec(method, str(checkpoint), plan.dtype, plan.train_steps, str(out))
                groups.append(Group(method, world_size, run_group(spec, world_size, on_gpu)))
    return groups


def report(plan: Plan, machine: Machine, groups: list[Group], trained: list[Group], notes: list[str]) -> list[str]:
    """Print tables and checks, write results.json and the figures; return what failed."""
    ratio_rows = ratios(groups)
    compared, failures = different_weights(groups, floor_dtype_equal=plan.dtype == "bf16")
    failures += network_failures(groups) + loss_failures(trained)
    methods = [method for method in METHODS if any(group.method == method for group in groups)]
    log()
    for line in [*notes, "", *rank_table(groups), "", *repeat_lines(groups), *ratio_table(ratio_rows, methods), ""]:
        log(line)
    log(DEFINITIONS)
    log()
    for line in [*markdown_table(groups), ""]:
        log(line)
    for line in compared:
        log(f"same weights checked (sha256 of each partition without padding): {line}")
    if lines := loss_lines(trained):
        log("training losses, which must be equal bit for bit between stock and lowmem:")
        for line in lines:
            log(f"  {line}")
    results: dict[str, Any] = {
        "machine": asdict(machine),
        "notes": notes,
        "plan": asdict(plan),
        "loads": [group_to_json(group) for group in groups],
        "ratios": ratio_rows,
        "trained": [
            {"method": g.method, "world_size": g.world_size, "losses": [r.losses for r in g.ranks]} for g in trained
        ],
        "same_weights": compared,
        "failures": failures,
    }
    (plan.out / "results.json").write_text(json.dumps(results, default=str))
    title = "\n".join([notes[0], machine.cpu + ", " + machine.versions_text(), machine.date])
    plot_results(groups, title, plan.out / "results.png")
    plot_memory_over_time(groups, title, plan.out / "memory_over_time.png")
    log(f"written: {plan.out}/results.json, results.png, memory_over_time.png")
    for line in summary_lines(groups):
        log(line)
    return failures


def _describe_run(plan: Plan, machine: Machine, num_params: int, num_bytes: int) -> list[str]:
    how = "dropped before each load by posix_fadvise DONTNEED" if plan.cold else "all shard files read before each load"
    model = f"random {plan.family}, {num_params / 1e9:.3f} B parameters, {num_bytes / 1e9:.2f} GB bf16"
    cache = f"page cache {'cold' if plan.cold else 'warm'}"
    return [
        f"model: {model}, loaded as {plan.dtype}, {cache}",
        *machine.lines(),
        f"{cache}: {how}; the ranks are processes on this machine with one thread each; no figure is simulated",
        f"load average before the first load: {os.getloadavg()[0]:.1f} (other work lengthens the seconds)",
    ]


def compare(plans: Sequence[Plan]) -> int:
    """Run plans of one model; return the exit status: 1 where weights, losses or the network count are not right."""
    import torch

    on_gpu, first = torch.cuda.is_available(), plans[0]
    if on_gpu and max(world_size for _, world_size in first.loads) > torch.cuda.device_count():
        raise SystemExit(f"--ranks: more than the {torch.cuda.device_count()} GPUs of this machine")
    failures = []
    with checkpoint_of(first.num_params, first.cache, first.keep_checkpoint, log, first.family) as checkpoint:
        for plan in plans:
            plan.out.mkdir(parents=True, exist_ok=True)
            failures += _compare(plan, checkpoint, on_gpu)
    for failure in failures:
        log(f"FAILED: {failure}")
    return 1 if failures else 0


def _compare(plan: Plan, checkpoint: Path, on_gpu: bool) -> list[str]:
    machine = describe_machine()
    tensors = read_headers(checkpoint)
    num_params = sum(tensor.numel for tensor in tensors)
    notes = _describe_run(plan, machine, num_params, sum(tensor.nbytes for tensor in tensors))
    train_needs = TRAIN_BYTES_PER_PARAM * num_params + max(n for _, n in plan.loads) * RANK_OVERHEAD_BYTES
    train_here = plan.train_steps > 0 and train_needs <= MEMORY_SHARE * (available_bytes() or 0)
    groups, skipped = run_loads(plan, checkpoint, plan.train_steps if train_here else 0, on_gpu)
    if not groups:
        raise SystemExit("nothing was run: every load was skipped")
    trained = groups
    if plan.train_steps > 0 and not train_here:
        trained = train_small(plan, on_gpu)
        notes.append(
            f"training: this model needs about {train_needs / 2**30:.0f} GiB to train, so the losses are of a smaller "
            f"one built the same way ({SMALL_TRAIN_PARAMS / 1e6:.0f} M parameters)"
        )
    return report(plan, machine, groups, trained, notes + skipped)


def main() -> None:
    """Run the comparison that the command line asks for."""
    try:
        sys.exit(compare(parse_arguments()))
    except GroupError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
