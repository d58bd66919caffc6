"""Weights of which only changes are sent, against all of them, after steps of Adam with learning rates of RL.

    python -m benchmarks.changes [--params 0.1e9] [--ranks 2] [--repeats 2]

A random model trains under ZeRO-3 in bf16, one step before each push, on eight random tokens: weights of 0.02 and steps
of one learning rate, as in real models, decide which elements change. Rank 0 takes the tensors and drops them.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.checkpoint import checkpoint_of
from benchmarks.launch import REPOSITORY, run_on_ranks
from benchmarks.methods import zero3_config
from benchmarks.results import MIB, parser_of, show_table

RATES = (1e-6, 1e-5)
COLUMNS = ("ranks", "learning rate", "push", "elements that change", "MiB", "seconds")


@dataclass(frozen=True, slots=True)
class Result:
    """One push: what rank 0 was sent; seconds of this rank."""

    rate: float
    push: str
    num_sent: int
    nbytes: int
    seconds: float


def run_rank(checkpoint: str, repeats: int) -> list[Result]:
    import deepspeed
    import torch
    import torch.distributed as dist

    from lowmem_load import Change, iter_weights, load_model

    adam = {"type": "AdamW", "params": {"lr": RATES[0], "torch_adam": True, "weight_decay": 0.0}}
    config: dict[str, Any] = {**zero3_config("bf16"), "optimizer": adam}
    engine = deepspeed.initialize(model=load_model(checkpoint, config), config=config)[0]
    generator = torch.Generator().manual_seed(dist.get_rank())
    results = []

    def push(name: str, rate: float, *, changed_only: bool) -> None:
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        tokens = torch.randint(0, 30_000, (1, 8), generator=generator)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        dist.barrier()
        start, num_sent, nbytes = time.perf_counter(), 0, 0
        for bucket in iter_weights(engine, bucket_bytes=1 << 28, dst=0, changed_only=changed_only):
            for _, new in bucket:
                values, indices = (new.values, new.indices) if isinstance(new, Change) else (new, new[:0])
                num_sent += values.numel()
                nbytes += values.nbytes + indices.nbytes
        results.append(Result(rate, name, num_sent, nbytes, time.perf_counter() - start))

    for _ in range(repeats):
        push("all", RATES[0], changed_only=False)
    push("first", RATES[0], changed_only=True)
    for rate in RATES:
        for _ in range(repeats):
            push("changes", rate, changed_only=True)
    return results


def main() -> None:
    arguments = parser_of(__doc__, params=0.1e9, ranks=[2], repeats=2).parse_args()
    rows: list[tuple[str, ...]] = [COLUMNS]
    with checkpoint_of(int(arguments.params)) as path:
        for world_size in arguments.ranks:
            out = REPOSITORY / "benchmarks/results/changes" / f"{world_size}-ranks"
            found = run_on_ranks(run_rank, str(path), arguments.repeats, out=out, world_size=world_size)
            pushes = [Result(**result) for result in found[0]]  # rank 0 takes all, and is the last to end
            total = max(push.num_sent for push in pushes)
            for rate in RATES:
                for name in ("all", "first", "changes"):
                    if not (mine := [push for push in pushes if (push.rate, push.push) == (rate, name)]):
                        continue
                    num_sent, nbytes, seconds = (
                        statistics.median(getattr(push, field) for push in mine)
                        for field in ("num_sent", "nbytes", "seconds")
                    )
                    share = f"{num_sent / total:.2%}" if name == "changes" else ""
                    rows.append((str(world_size), f"{rate:g}", name, share, f"{nbytes / MIB:.0f}", f"{seconds:.2f}"))
    show_table("benchmarks.changes", rows, docs=arguments.docs)


if __name__ == "__main__":
    main()
