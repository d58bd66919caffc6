"""Going on from checkpoints of ZeRO-3 on other ranks: what it costs beside DeepSpeed's own ways, and that it is right.

    python -m benchmarks.resume save FOLDER --ranks 2 [--params 1e8]      trains, saves, trains on
    python -m benchmarks.resume convert FOLDER                            DeepSpeed's ds_to_universal
    python -m benchmarks.resume load FOLDER --ranks 4 --method ours       loads, measures, trains on
    python -m benchmarks.resume consolidate FOLDER --method ours          a model folder of it; or zero_to_fp32
    python -m benchmarks.resume matrix                                    tiny models, 2 to 1, 2 to 4, 4 to 3, 3 to 2

Methods of `load`: ours, ours-universal, stock (as many ranks as have saved), stock-universal (after `convert`). Each
prints one line of JSON: seconds of the slowest rank, MiB above the start of the rank that took most, MiB that a rank
read at most, and the largest difference of the next three losses from those of the run that was not interrupted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import read_io
from lowmem_load.bench.memory import MemorySampler
from tests.ranks import run_ranks

MIB = float(1 << 20)
MATRIX = ("2:1", "2:4", "4:3", "3:2")
LAYERS = 4


def _engine(world_size: int, params: float, universal: bool) -> Any:
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from lowmem_load import DistributedInterface, streaming
    from tests.multi_rank.test_resume import ADAM, BF16, SAMPLES, UNIVERSAL, WARMUP

    hidden = max(64, int((params / (LAYERS * 12 + 8)) ** 0.5) // 64 * 64)
    shape = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "vocab_size": 4 * hidden}
    config = LlamaConfig(num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=8, **shape)
    micro = {"train_micro_batch_size_per_gpu": SAMPLES // world_size}
    ds_config = {"zero_optimization": {"stage": 3, "sub_group_size": 10_000_000}, **micro, **ADAM, **BF16, **WARMUP}
    DistributedInterface()
    torch.manual_seed(0)
    with streaming(ds_config):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return deepspeed.initialize(model=model, config={**ds_config, **(UNIVERSAL if universal else {})})[0]


def save(folder: str, world_size: int, params: float) -> list[float]:
    """Rank function: trains three steps, saves, and trains three more, whose losses it returns."""
    from tests.multi_rank.test_resume import train

    engine = _engine(world_size, params, universal=False)
    train(engine, 0, 3)
    engine.save_checkpoint(folder)
    return train(engine, 3, 6)


def load(folder: str, world_size: int, params: float, method: str) -> dict[str, Any]:
    """Rank function: loads in one way, and trains on."""
    import torch.distributed as dist

    from lowmem_load import load_checkpoint
    from tests.multi_rank.test_resume import train

    engine = _engine(world_size, params, universal=method == "stock-universal")
    tag = "universal" if "universal" in method else "global_step3"
    dist.barrier()
    before = read_io()
    with MemorySampler() as sampler:
        start = time.perf_counter()
        if method.startswith("ours"):
            load_checkpoint(engine, folder, tag)
        else:
            engine.load_checkpoint(folder, tag)
        seconds = time.perf_counter() - start
    read = read_io().rchar - before.rchar - sampler.proc_bytes_read
    use = sampler.use()
    return {"seconds": seconds, "peak": use.peak, "read": read, "losses": train(engine, 3, 6)}


def _measured(name: str, call: Callable[[], object]) -> dict[str, Any]:
    before = read_io()
    with MemorySampler() as sampler:
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
    read = read_io().rchar - before.rchar - sampler.proc_bytes_read
    return {
        "method": name, "seconds": round(seconds, 2), "peak_mib": round(sampler.use().peak / MIB),
        "read_mib": round(read / MIB),
    }  # fmt: skip


def _convert(folder: str) -> dict[str, Any]:
    from deepspeed.checkpoint.ds_to_universal import main

    tag = f"{folder}/global_step3"
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    flags = {"keep_temp_folder": False, "strict": True, "inject_missing_state": False}
    arguments = argparse.Namespace(input_folder=tag, output_folder=f"{folder}/universal", **workers, **flags)
    return _measured("ds_to_universal", lambda: main(arguments))


def _consolidate(folder: str, method: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=folder) as out:
        if method == "ours":
            from lowmem_load import consolidate

            return _measured("consolidate", lambda: consolidate(folder, f"{out}/made"))
        from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_state_dict

        return _measured(
            "zero_to_fp32",
            lambda: convert_zero_checkpoint_to_state_dict(folder, f"{out}/made", safe_serialization=True),
        )


def _load(folder: str, ranks: int, params: float, method: str) -> dict[str, Any]:
    expected = json.loads(Path(folder, "losses.json").read_text())
    found = run_ranks(load, folder, ranks, params, method, world_size=ranks, timeout_s=400)
    differences = [abs(one - other) for one, other in zip(found[0]["losses"], expected, strict=True)]
    return {
        "method": method,
        "ranks": ranks,
        "seconds": round(max(each["seconds"] for each in found), 2),
        "peak_mib": round(max(each["peak"] for each in found) / MIB),
        "read_mib": round(max(each["read"] for each in found) / MIB),
        "loss_difference": max(differences),
    }


def _matrix(pairs: Sequence[str]) -> None:
    from tests.multi_rank.test_modes import is_compiled
    from tests.multi_rank.test_resume import cases, checkpoints_of, go_on_elsewhere, save_and_go_on

    for pair in pairs:
        saved_by, resumed_by = map(int, pair.split(":"))
        with tempfile.TemporaryDirectory() as name:
            paths = checkpoints_of(Path(name))
            losses = run_ranks(save_and_go_on, paths, name, cases(), world_size=saved_by, timeout_s=300)[0]
            swap = f"{name}/swap" if is_compiled("async_io") else None
            differences = run_ranks(go_on_elsewhere, paths, name, losses, swap, world_size=resumed_by, timeout_s=300)[0]
        for way, difference in differences.items():
            print(
                json.dumps({"saved_by": saved_by, "resumed_by": resumed_by, "way": way, "loss_difference": difference})
            )


def main() -> None:
    """Parse the command line and run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("save", "convert", "load", "consolidate", "matrix"))
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--params", type=float, default=1e8)
    parser.add_argument("--method", default="ours")
    parser.add_argument("--pairs", nargs="+", default=MATRIX, help="of the matrix: ranks that save, and that go on")
    options = parser.parse_args()
    if options.part == "matrix":
        _matrix(options.pairs)
    elif options.part == "save":
        losses = run_ranks(save, options.folder, options.ranks, options.params, world_size=options.ranks, timeout_s=400)
        Path(options.folder, "losses.json").write_text(json.dumps(losses[0]))
    elif options.part == "convert":
        print(json.dumps(_convert(options.folder)))
    elif options.part == "consolidate":
        print(json.dumps(_consolidate(options.folder, options.method)))
    else:
        print(json.dumps(_load(options.folder, options.ranks, options.params, options.method)))


if __name__ == "__main__":
    main()
