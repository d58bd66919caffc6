"""Loads from slow storage: python -m benchmarks.network_storage [--wait-ms 1 10] [--ranks 1 2 4].

The storage is FUSE on this machine with a wait before each read (`benchmarks/slow_storage.py`), mounted anew for each
load, so that nothing is in the page cache. Two models of random weights: a Llama, whose partitions are runs in the
file, and a Qwen3-VL-MoE, whose expert is transposed on load.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.launch import run_processes
from benchmarks.machine import describe_machine
from benchmarks.methods import zero3_config
from benchmarks.table import aligned

WAYS: dict[str, dict[str, str]] = {
    "stock": {},
    "default": {},
    "alone": {"LOWMEM_LOAD_SHARE_READS": "off"},
}
"""Settings of the environment by the name of the row."""

COLUMNS = ("model", "ranks", "wait ms", "way", "seconds", "reads of a rank", "read MiB", "of needed")


def make_llama(folder: Path) -> None:
    """Write a Llama of some 80 million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12}
    LlamaForCausalLM(LlamaConfig(vocab_size=32_000, **sizes)).bfloat16().save_pretrained(folder)


def make_transposed(folder: Path) -> None:
    """Write a Qwen3-VL-MoE of some 60 million parameters, its expert as published: transposed."""
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    small = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 1024}
    vision = {**small, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    text = {
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 2048,
        "moe_intermediate_size": 3072,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "rope_parameters": {"rope_type": "default", "mrope_section": [24, 20, 20], "rope_theta": 10000.0},
    }
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    Qwen3VLMoeForConditionalGeneration(config).bfloat16().save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    turned = {name: value.mT.contiguous() if ".experts." in name else value for name, value in state.items()}
    save_file(turned, folder / "model.safetensors", {"format": "pt"})


MODELS = {"llama": make_llama, "experts transposed": make_transposed}


@contextlib.contextmanager
def mounted(folder: Path, wait_s: float) -> Iterator[Path]:
    """Yield the folder as seen through slow storage."""
    with tempfile.TemporaryDirectory() as mount:
        command = [sys.executable, "-m", "benchmarks.slow_storage", str(folder), mount, str(wait_s)]
        server = subprocess.Popen(command)
        try:
            until = time.monotonic() + 20
            while not os.path.ismount(mount):
                if server.poll() is not None or time.monotonic() > until:
                    raise SystemExit("FUSE cannot be mounted here: pip install mfusepy, libfuse, and root")
                time.sleep(0.05)
            yield Path(mount)
        finally:
            subprocess.run(["umount", "-l", mount], check=False)
            server.wait(20)


def load(spec: dict[str, Any]) -> dict[str, Any]:
    """Load as one rank says, and return what it took."""
    import deepspeed  # noqa: F401  imported before the clock starts, as everything else
    import transformers

    from lowmem_load import DistributedInterface, load_model, load_report

    ranks = DistributedInterface()
    config = transformers.AutoConfig.from_pretrained(spec["config"])
    cls = getattr(transformers, config.architectures[0])
    ranks.barrier()
    start = time.perf_counter()
    if spec["way"] == "stock":
        from transformers.integrations import HfDeepSpeedConfig

        kept = HfDeepSpeedConfig(zero3_config("bf16"))
        cls.from_pretrained(spec["path"])
        del kept
        return {"seconds": time.perf_counter() - start}
    report = load_report(load_model(spec["path"], zero3_config("bf16"), auto_class=cls))
    figures = {name: getattr(report, name) for name in ("read_bytes", "num_reads", "needed_bytes")}
    return {"seconds": time.perf_counter() - start, **figures}


def measure(model: str, folder: Path, wait_s: float, way: str, num_ranks: int) -> list[str]:
    """Return a row of the table."""
    settings = WAYS[way]
    with mounted(folder, wait_s) as path, tempfile.TemporaryDirectory() as out:
        spec = {"way": way, "path": str(path), "config": str(folder), "out": out}
        os.environ.update(settings)
        try:
            texts = run_processes("benchmarks.network_storage", spec, Path(out), num_ranks, on_gpu=False)
        finally:
            for name in settings:
                del os.environ[name]
    found = [json.loads(text) for text in texts]
    row = [model, str(num_ranks), f"{wait_s * 1e3:g}", way, f"{max(each['seconds'] for each in found):.1f}"]
    if way == "stock":
        return [*row, "", "", ""]
    read, needed = (sum(each[name] for each in found) for name in ("read_bytes", "needed_bytes"))
    reads = statistics.mean(each["num_reads"] for each in found)
    return [*row, f"{reads:.0f}", f"{read / 2**20:.0f}", f"{read / needed:.2f}"]


def worker(path: Path) -> None:
    """Be one rank."""
    spec = json.loads(path.read_text())
    Path(spec["out"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(load(spec)))
    os._exit(0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every model, wait and way, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network_storage", description=__doc__.splitlines()[0])
    parser.add_argument("--wait-ms", type=float, nargs="+", default=[1.0, 10.0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in options.models:
            folder = Path(scratch, model)
            MODELS[model](folder)
            for num_ranks, wait_ms, way in itertools.product(options.ranks, options.wait_ms, options.ways):
                rows.append(measure(model, folder, wait_ms / 1e3, way, num_ranks))
                print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    print("\n".join([*describe_machine().lines(), "", *aligned([COLUMNS, *rows])]))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        worker(Path(sys.argv[1]))
    else:
        main()
