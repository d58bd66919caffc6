"""Weights of which only changes are sent, against all of them, after steps with learning rates of RL.

    python -m benchmarks.changes [--params 0.8e9] [--ranks 2] [--repeats 2]

A random model is partitioned by ZeRO-3 in bf16. Steps are simulated, so that no gradients and no optimizer take memory:
fp32 masters lie anywhere within what rounds to their weights, as after many steps, and each step adds to each of them
the learning rate times a normal number. Its deviation is 1, the most that Adam does, or 0.23, what it does if gradients
are mere noise: sqrt((1 - 0.9) / (1 + 0.9)). Rank 0 takes the tensors and drops them.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from benchmarks.checkpoint import checkpoint_of
from benchmarks.launch import REPOSITORY, run_on_ranks
from benchmarks.memory import PeakMemory
from benchmarks.methods import zero3_config
from benchmarks.results import MIB, parser_of, show_table

RATES, DEVIATIONS = (1e-6, 1e-5), (0.23, 1.0)
COLUMNS = ("parameters", "ranks", "push", "elements that change", "MiB", "seconds", "peak of rank 0, MiB")

CHUNK = 1 << 22
"""Elements that are stepped at a time."""


@dataclass(frozen=True, slots=True)
class Result:
    """One push: what rank 0 was sent; seconds and peak memory of this rank."""

    push: str
    num_sent: int
    nbytes: int
    seconds: float
    peak_bytes: int


def run_rank(checkpoint: str, repeats: int) -> list[Result]:
    import torch
    import torch.distributed as dist

    from lowmem_load import Change, iter_weights, load_model

    model = load_model(checkpoint, zero3_config("bf16"))
    generator = torch.Generator().manual_seed(dist.get_rank())
    parts = [part for p in model.parameters() for part in p.ds_tensor.data.split(CHUNK)]
    masters = []
    for part in parts:
        step = torch.nextafter(part, torch.full((), torch.inf, dtype=part.dtype)).float() - part.float()
        masters.append(part.float().add_(step.mul_(torch.rand(len(part), generator=generator).sub_(0.5))))
        part.copy_(masters[-1])
    noise = torch.randn(CHUNK, generator=generator)
    results: list[Result] = []

    def push(name: str, rate: float = 0.0, *, changed_only: bool) -> None:
        for part, master in zip(parts, masters, strict=True):
            master.add_(noise[: len(master)].roll(len(results)), alpha=rate)
            part.copy_(master)
        dist.barrier()
        start, num_sent, nbytes = time.perf_counter(), 0, 0
        with PeakMemory() as memory:
            for bucket in iter_weights(model, bucket_bytes=1 << 28, dst=0, changed_only=changed_only):
                sent = [(new.values, new.indices) if isinstance(new, Change) else (new,) for _, new in bucket]
                num_sent += sum(values.numel() for values, *_ in sent)
                nbytes += sum(tensor.nbytes for tensors in sent for tensor in tensors)
                del sent
            seconds = time.perf_counter() - start
        results.append(Result(name, num_sent, nbytes, seconds, memory.peak_bytes))
        print(results[-1], flush=True)

    for _ in range(repeats):
        push("all", changed_only=False)
    push("the first", changed_only=True)
    for rate in RATES:
        for deviation in DEVIATIONS:
            for _ in range(repeats):
                push(f"{rate:g} x {deviation:g}", rate * deviation, changed_only=True)
    return results


def main() -> None:
    arguments = parser_of(__doc__, params=[0.1e9], ranks=[2], repeats=2).parse_args()
    rows: list[tuple[str, ...]] = [COLUMNS]
    for params in arguments.params:
        with checkpoint_of(int(params)) as path:
            for world_size in arguments.ranks:
                out = REPOSITORY / "benchmarks/results/changes" / f"{world_size}-ranks"
                found = run_on_ranks(run_rank, str(path), arguments.repeats, out=out, world_size=world_size)
                pushes = [Result(**result) for result in found[0]]  # rank 0 takes all, and is the last to end
                total = max(push.num_sent for push in pushes)
                for name in dict.fromkeys(push.push for push in pushes):
                    mine = [push for push in pushes if push.push == name]
                    num_sent, nbytes, seconds, peak = (
                        statistics.median(getattr(push, field) for push in mine)
                        for field in ("num_sent", "nbytes", "seconds", "peak_bytes")
                    )
                    share = f"{num_sent / total:.2%}" if " x " in name else ""
                    cells = f"{total / 1e6:.0f} M", str(world_size), name, share, f"{nbytes / MIB:.0f}"
                    rows.append((*cells, f"{seconds:.2f}", f"{peak / MIB:.0f}"))
    show_table("benchmarks.changes", rows, docs=arguments.docs)


if __name__ == "__main__":
    main()
