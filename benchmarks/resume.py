"""What it costs to resume a ZeRO-3 checkpoint on other numbers of ranks, with lowmem_load and with DeepSpeed.

    python -m benchmarks.resume [--params 1e8] [--ranks 4]

Two ranks save a checkpoint, which two ranks and `--ranks` ranks load. The table has the seconds of the slowest rank,
the MiB above the start and the MiB read of the rank that took most, and how far the next three losses are from
those of the run that was not interrupted.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.memory import PeakMemory
from benchmarks.results import MIB, parser_of, show_table
from tests.ranks import run_ranks

LAYERS = 4
TAG, UNIVERSAL_TAG = "global_step3", "universal"
UNIVERSAL = {"checkpoint": {"load_universal": True}}


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def measured(call: Callable[[], object]) -> dict[str, float]:
    before = bytes_read()
    with PeakMemory() as sampler:
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
    read = bytes_read() - before
    return {"seconds": seconds, "peak_mib": sampler.peak_bytes / MIB, "read_mib": read / MIB}


def make_engine(world_size: int, params: float, is_universal: bool) -> Any:
    """Return an engine of a random Llama, whose samples are split among the ranks."""
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.integrations import HfDeepSpeedConfig

    from lowmem_load.distributed.process_group import DistributedInterface
    from tests.multi_rank.test_resume import ADAM, BF16, SAMPLES, WARMUP

    hidden = max(64, int((params / (LAYERS * 12 + 8)) ** 0.5) // 64 * 64)
    shape = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "vocab_size": 4 * hidden}
    config = LlamaConfig(num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=8, **shape)
    micro = {"train_micro_batch_size_per_gpu": SAMPLES // world_size}
    ds_config = {"zero_optimization": {"stage": 3, "sub_group_size": 10_000_000}, **micro, **ADAM, **BF16, **WARMUP}
    DistributedInterface()
    torch.manual_seed(0)
    alive = HfDeepSpeedConfig(ds_config)  # from_config makes partitions while it is there
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    del alive
    return deepspeed.initialize(model=model, config={**ds_config, **(UNIVERSAL if is_universal else {})})[0]


def save(folder: str, world_size: int, params: float) -> list[float]:
    """Rank function: trains three steps, saves, and trains three more, whose losses it returns."""
    from tests.multi_rank.test_resume import train

    engine = make_engine(world_size, params, is_universal=False)
    train(engine, 0, 3)
    engine.save_checkpoint(folder)
    return train(engine, 3, 6)


def load(folder: str, world_size: int, params: float, way: str, tag: str) -> dict[str, Any]:
    import torch.distributed as dist

    from lowmem_load import load_checkpoint
    from tests.multi_rank.test_resume import train

    is_default = way == "default"
    engine = make_engine(world_size, params, is_universal=is_default and tag == UNIVERSAL_TAG)
    dist.barrier()
    run = engine.load_checkpoint if is_default else lambda *args: load_checkpoint(engine, *args)
    return {**measured(lambda: run(folder, tag)), "losses": train(engine, 3, 6)}


def convert(folder: str) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    flags = {"keep_temp_folder": False, "strict": True, "inject_missing_state": False}
    places = {"input_folder": f"{folder}/{TAG}", "output_folder": f"{folder}/{UNIVERSAL_TAG}"}
    main(argparse.Namespace(**places, **workers, **flags))


def cost(params: float, other_ranks: int, docs: bool) -> None:
    """Print what going on costs, on as many ranks as have saved and on others."""
    rows: list[Sequence[str]] = [("ranks now", "", "seconds", "peak, MiB", "read, MiB", "losses apart")]
    names = ("seconds", "peak_mib", "read_mib")
    with tempfile.TemporaryDirectory() as folder:
        expected = run_ranks(save, folder, 2, params, world_size=2, timeout_s=400)[0]
        converted = measured(lambda: convert(folder))
        rows.append(("any", "default, ds_to_universal", *(f"{converted[name]:.2f}" for name in names), ""))
        for ranks, way, tag in (
            (2, "default", TAG),
            (2, "lowmem_load", TAG),
            (other_ranks, "lowmem_load", TAG),
            (other_ranks, "default", UNIVERSAL_TAG),
        ):
            found = run_ranks(load, folder, ranks, params, way, tag, world_size=ranks, timeout_s=400)
            apart = max(abs(one - other) for one, other in zip(found[0]["losses"], expected, strict=True))
            most = [f"{max(each[name] for each in found):.2f}" for name in names]
            rows.append((str(ranks), way if tag == TAG else f"{way}, universal", *most, f"{apart:.2g}"))
    show_table("benchmarks.resume", rows, docs=docs)


def main() -> None:
    options = parser_of(__doc__, params=1e8, ranks=4).parse_args()
    cost(options.params, options.ranks, options.docs)


if __name__ == "__main__":
    main()
