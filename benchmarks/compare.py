"""Compare ways to load a checkpoint under ZeRO-3 in one run: seconds, memory, and whether the weights are equal.

    python -m benchmarks.compare --preset demo
    python -m benchmarks.compare --model /models/Llama-3.1-8B --ranks 4 --cold --repeats 3

A model without a preset is loaded as `--ds-config` says, by its own class. Each run starts fresh processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import checkpoint_of, drop_page_cache, read_headers, warm_page_cache
from benchmarks.launch import GroupError
from benchmarks.memory import available_bytes
from benchmarks.methods import DTYPES, METHODS
from benchmarks.results import (
    DEFINITIONS,
    Group,
    different_weights,
    load_table,
    log,
    loss_failures,
    machine_lines,
    median_group,
    network_failures,
    summary_lines,
    write_docs,
)
from benchmarks.worker import RankResult, Spec, run_group

RANK_OVERHEAD_BYTES = 2**30
"""Memory of a rank in addition to weights: imports and the modules themselves are about 0.7 GiB here."""

TRAIN_BYTES_PER_PARAM = 36
"""Over all ranks. ZeRO-3 with AdamW keeps 14 (bf16 weights 2, fp32 weights 4, two moments 8); with gradients and what a
step makes for a while, 32 to 35 were measured at 2 ranks on models of 0.5 and 0.1 B parameters."""

MEMORY_SHARE = 0.85
"""The share of the available memory that a load or training may be expected to take."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A named comparison: how many parameters, which methods at which numbers of ranks, how many training steps."""

    num_params: int
    ranks_of_method: dict[str, tuple[int, ...]]
    train_steps: int


PRESETS = {
    "demo": Preset(500_000_000, dict.fromkeys(METHODS, (2,)), train_steps=1),
    "llama-1.5b": Preset(1_500_000_000, dict.fromkeys(METHODS, (1, 2, 4)), train_steps=0),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run does, from the preset and the command line."""

    num_params: int
    loads: list[tuple[str, int]]  # (method, world_size) in the order of the run
    train_steps: int
    dtype: str
    ds_config: dict[str, Any] | None  # instead of the common one
    model: Path | None  # instead of a random one
    repeats: int
    once: tuple[str, ...]  # methods that are not repeated
    cold: bool
    is_touched: bool  # whether the memory of each load was touched before
    out: Path
    docs: bool


def parse_arguments(arguments: Sequence[str] | None = None) -> list[Plan]:
    """Return what the command line asks for: a plan for each state of memory and page cache, as found first."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="load this checkpoint, instead of a random one")
    parser.add_argument("--ds-config", type=Path, metavar="FILE", help="JSON; plain ZeRO-3 by default")
    parser.add_argument("--preset", choices=PRESETS, default="demo")
    parser.add_argument("--params", type=int, metavar="N", help="parameters of the model, instead of the preset's")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="numbers of ranks, for every method")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="methods to run, instead of all")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype to load in; the checkpoint is bf16")
    parser.add_argument("--train-steps", type=int, metavar="N", help="steps that both train after the load")
    parser.add_argument("--repeats", type=int, default=1, help="repetitions; the one of median duration is shown")
    parser.add_argument("--once", nargs="+", choices=METHODS, default=[], help="methods that are not repeated")
    parser.add_argument("--cold", action="store_true", help="drop the shard files from the page cache before each load")
    parser.add_argument(
        "--also-cold", action="store_true", help="load, too, with a cold page cache and memory as found"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the results")
    parser.add_argument("--docs", action="store_true", help="write the tables into benchmarks/RESULTS.md")
    chosen = parser.parse_args(arguments)
    preset = PRESETS[chosen.preset]
    if chosen.model:
        preset = Preset(0, dict.fromkeys(METHODS, (2,)), train_steps=0)
    if min(chosen.ranks or [1]) < 1 or chosen.repeats < 1:
        parser.error("--ranks and --repeats have to be at least 1")
    ranks_of_method = {
        method: tuple(chosen.ranks or preset.ranks_of_method[method])
        for method in METHODS
        if method in (chosen.methods or METHODS)
    }
    world_sizes = sorted({world_size for ranks in ranks_of_method.values() for world_size in ranks})
    plan = Plan(
        num_params=chosen.params or preset.num_params,
        loads=[
            (m, world_size) for world_size in world_sizes for m in ranks_of_method if world_size in ranks_of_method[m]
        ],
        train_steps=preset.train_steps if chosen.train_steps is None else chosen.train_steps,
        dtype=chosen.dtype,
        ds_config=json.loads(chosen.ds_config.read_text()) if chosen.ds_config else None,
        model=chosen.model.resolve() if chosen.model else None,
        repeats=chosen.repeats,
        once=tuple(chosen.once),
        cold=chosen.cold,
        is_touched=False,
        out=chosen.out.resolve(),
        docs=chosen.docs,
    )
    plans = [plan, replace(plan, is_touched=True, train_steps=0, out=plan.out / "touched")]
    if chosen.also_cold:
        plans.append(replace(plan, cold=True, train_steps=0, out=plan.out / "cold"))
    return plans


def reason_to_skip(world_size: int, model_bytes: int) -> str | None:
    """Return why a load does not fit in memory, or None."""
    # The partitions, what a method holds besides, and pages of mapped files, which count as used while they are mapped.
    expected = 3 * model_bytes + world_size * RANK_OVERHEAD_BYTES
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
            if reason := reason_to_skip(world_size, model_bytes):
                skipped[method, world_size] = f"skipped: {method}, {world_size} ranks: {reason}"
                log(skipped[method, world_size])
                continue
            (drop_page_cache if plan.cold else warm_page_cache)(checkpoint)
            out = plan.out / "runs" / f"{method}-{world_size}-{repeat}"
            steps = train_steps if method in ("default", "lowmem") and repeat == 0 else 0
            spec = Spec(
                method,
                str(checkpoint),
                plan.dtype,
                steps,
                str(out),
                ds_config=plan.ds_config,
                is_touched=plan.is_touched,
            )
            ranks = run_group(spec, world_size, on_gpu)
            runs[method, world_size].append(ranks)
            peak = max(rank.memory.peak for rank in ranks) / 2**20
            log(f"done: {method}, {world_size} ranks: {max(r.seconds for r in ranks):.2f} s, peak {peak:.0f} MiB")
    groups = []
    for repeats in runs.values():
        if repeats:
            group = median_group(repeats)
            for shown, trained in zip(group.ranks, repeats[0], strict=True):
                shown.losses = trained.losses
            groups.append(group)
    return groups, list(skipped.values())


def report(plan: Plan, groups: list[Group], notes: list[str]) -> list[str]:
    """Print the table and the checks; return what failed."""
    # Of another checkpoint, loading may convert what the files hold.
    is_floor_equal = plan.dtype == "bf16" and plan.model is None
    compared, failures = different_weights(groups, floor_dtype_equal=is_floor_equal)
    failures += network_failures(groups) + loss_failures(groups)
    log("\n".join(["", *notes, "", load_table(groups), "", DEFINITIONS, ""]))
    for line in compared:
        log(f"same weights checked (sha256 of each partition without padding): {line}")
    for group in groups:
        for rank in group.ranks:
            if rank.losses:
                losses = " ".join(f"{loss:.6f}" for loss in rank.losses)
                log(f"training losses: {group.method}, rank {rank.rank} of {group.world_size}: {losses}")
    for line in summary_lines(groups):
        log(line)
    return failures


def _describe_run(plan: Plan, num_params: int, num_bytes: int) -> list[str]:
    how = "dropped before each load by posix_fadvise DONTNEED" if plan.cold else "all shard files read before each load"
    name = str(plan.model or "random Llama")
    model = f"{name}, {num_params / 1e9:.3f} B parameters, {num_bytes / 1e9:.2f} GB"
    memory = "touched before" if plan.is_touched else "as found"
    cache = f"page cache {'cold' if plan.cold else 'warm'}, memory {memory}"
    return [
        f"model: {model}, loaded as {plan.dtype}, {cache}",
        *machine_lines(),
        f"{cache}: {how}; the ranks are processes on this machine with one thread each; no figure is simulated",
        f"load average before the first load: {os.getloadavg()[0]:.1f} (other work lengthens the seconds)",
    ]


def compare(plans: Sequence[Plan]) -> int:
    """Run plans of one model; return the exit status: 1 where weights, losses or the network count are not right."""
    import torch

    on_gpu, first = torch.cuda.is_available(), plans[0]
    if on_gpu and max(world_size for _, world_size in first.loads) > torch.cuda.device_count():
        raise SystemExit(f"--ranks: more than the {torch.cuda.device_count()} GPUs of this machine")
    failures, texts = [], []
    random_model = checkpoint_of(first.num_params)
    with contextlib.nullcontext(first.model) if first.model else random_model as checkpoint:
        for plan in plans:
            plan.out.mkdir(parents=True, exist_ok=True)
            groups, notes = _run(plan, checkpoint, on_gpu)
            failures += report(plan, groups, notes)
            texts.append("\n".join([*(f"- {note}" for note in notes), "", load_table(groups)]))
    if first.docs:
        write_docs("benchmarks.compare", "\n\n".join(texts))
    for failure in failures:
        log(f"FAILED: {failure}")
    return 1 if failures else 0


def _run(plan: Plan, checkpoint: Path, on_gpu: bool) -> tuple[list[Group], list[str]]:
    tensors = read_headers(checkpoint)
    num_params = sum(tensor.numel for tensor in tensors)
    notes = _describe_run(plan, num_params, sum(tensor.nbytes for tensor in tensors))
    train_needs = TRAIN_BYTES_PER_PARAM * num_params + max(n for _, n in plan.loads) * RANK_OVERHEAD_BYTES
    train_here = plan.train_steps > 0 and train_needs <= MEMORY_SHARE * (available_bytes() or 0)
    if plan.train_steps > 0 and not train_here:
        notes.append(f"not trained: this model needs about {train_needs / 2**30:.0f} GiB for that")
    groups, skipped = run_loads(plan, checkpoint, plan.train_steps if train_here else 0, on_gpu)
    if not groups:
        raise SystemExit("nothing was run: every load was skipped")
    return groups, notes + skipped


def main() -> None:
    try:
        sys.exit(compare(parse_arguments()))
    except GroupError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
