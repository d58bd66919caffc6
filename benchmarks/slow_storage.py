"""Loads from slow storage: `python -m benchmarks.slow_storage [--ranks 4] [--wait-ms 1 10] [--ways default lowmem]`.

The storage is a FUSE folder that waits before it answers a read. Each load mounts it again, so the page cache is empty.
The kernel caches, reads ahead and maps files as on NFS. Two models of random weights are loaded: a Llama, whose
partitions are ranges of the files, and a Qwen3-VL-MoE, whose expert is transposed on load.

Needs `pip install mfusepy`, libfuse, and root.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from benchmarks.launch import REPOSITORY, run_on_ranks
from benchmarks.methods import zero3_config
from benchmarks.results import parser_of, show_table

WAYS = {"default": "default", "lowmem": "lowmem_load"}
"""What tables call them."""
COLUMNS = ("model", "ranks", "wait ms", "way", "seconds", "reads of a rank", "read MiB", "read / needed")
MOUNT_TIMEOUT_S = 20.0

Server = subprocess.Popen[bytes]


def make_llama(folder: Path) -> None:
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


def serve(folder: Path, mount: str, wait_s: float, host: str = "") -> None:
    """Show a folder at `mount`, read-only, until it is unmounted; every read is answered `wait_s` late.

    With `host`, all that is read comes from an HTTP server of the same folder.
    """
    import mfusepy

    of_thread = threading.local()

    def fetch(path: str, size: int, offset: int) -> bytes:
        if not hasattr(of_thread, "connection"):
            of_thread.connection = HTTPConnection(host)
        of_thread.connection.request("GET", path, headers={"Range": f"bytes={offset}-{offset + size - 1}"})
        answer = of_thread.connection.getresponse()
        content: bytes = answer.read()
        return content if answer.status == 206 else b""  # it begins behind the end

    class SlowFolder(mfusepy.Operations):  # type: ignore[misc]  # where it is not installed
        use_ns = True

        def _path(self, path: str) -> Path:
            return folder / path.lstrip("/")

        def getattr(self, path: str, _fh: int | None = None) -> dict[str, Any]:
            try:
                found = os.lstat(self._path(path))
            except OSError as error:
                raise mfusepy.FuseOSError(error.errno) from error
            times = {f"st_{name}": getattr(found, f"st_{name}_ns") for name in ("atime", "ctime", "mtime")}
            names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid")
            return {name: getattr(found, name) for name in names} | times

        def readdir(self, path: str, _fh: int) -> list[str]:
            return [".", "..", *os.listdir(self._path(path))]

        def open(self, path: str, _flags: int) -> int:
            return os.open(self._path(path), os.O_RDONLY)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            time.sleep(wait_s)
            return fetch(path, size, offset) if host else os.pread(fh, size, offset)

        def release(self, _path: str, fh: int) -> int:
            os.close(fh)
            return 0

    # A file that is opened again is still cached, as on NFS if nobody has written to it.
    mfusepy.FUSE(SlowFolder(), mount, foreground=True, ro=True, kernel_cache=True)


def start_server(folder: Path, mount: str, wait_s: float, host: str = "", prefix: Sequence[str] = ()) -> Server:
    """Start `serve` in a process; return it once the folder is mounted. `prefix` is a command that runs it."""
    command = [sys.executable, "-m", "benchmarks.slow_storage", str(folder), mount, str(wait_s), *filter(None, [host])]
    server, until = subprocess.Popen([*prefix, *command], cwd=REPOSITORY), time.monotonic() + MOUNT_TIMEOUT_S
    while not os.path.ismount(f"/proc/{server.pid}/root{mount}"):  # it may have mounts of its own
        if server.poll() is not None or time.monotonic() > until:
            server.kill()
            raise SystemExit("FUSE cannot be mounted here: pip install mfusepy, libfuse, and root")
        time.sleep(0.05)
    return server


@contextlib.contextmanager
def mounted(folder: Path, wait_s: float) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as mount:
        server = start_server(folder, mount, wait_s)
        try:
            yield Path(mount)
        finally:
            subprocess.run(["umount", "-l", mount], check=False)
            server.wait(MOUNT_TIMEOUT_S)


def load(way: str, path: str, config_folder: str) -> dict[str, Any]:
    import deepspeed  # noqa: F401  imported before the clock starts, as everything else
    import transformers
    from transformers.integrations import HfDeepSpeedConfig

    from lowmem_load import get_load_report, load_model
    from lowmem_load.distributed.process_group import DistributedInterface

    ranks = DistributedInterface()
    config = transformers.AutoConfig.from_pretrained(config_folder)
    cls = getattr(transformers, config.architectures[0])
    ranks.barrier()
    start = time.perf_counter()
    if way == "default":
        kept = HfDeepSpeedConfig(zero3_config("bf16"))
        cls.from_pretrained(path)
        del kept
        return {"seconds": time.perf_counter() - start}
    report = get_load_report(load_model(path, zero3_config("bf16"), auto_class=cls))
    figures = {name: getattr(report, name) for name in ("read_bytes", "num_reads", "needed_bytes")}
    return {"seconds": time.perf_counter() - start, **figures}


def measure(model: str, folder: Path, wait_ms: float, way: str, num_ranks: int) -> list[str]:
    with mounted(folder, wait_ms / 1e3) as path, tempfile.TemporaryDirectory() as out:
        found = run_on_ranks(load, way, str(path), str(folder), out=Path(out), world_size=num_ranks)
    row = [model, str(num_ranks), f"{wait_ms:g}", WAYS[way], f"{max(each['seconds'] for each in found):.1f}"]
    if way == "default":
        return [*row, "", "", ""]
    read, needed, reads = (sum(each[name] for each in found) for name in ("read_bytes", "needed_bytes", "num_reads"))
    return [*row, f"{reads / num_ranks:.0f}", f"{read / 2**20:.0f}", f"{read / needed:.2f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, ranks=[4], repeats=1)
    parser.add_argument("--wait-ms", type=float, nargs="+", default=[1.0, 10.0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args(arguments)
    rows: list[Sequence[str]] = [COLUMNS]
    with tempfile.TemporaryDirectory() as scratch:
        for model in options.models:
            folder = Path(scratch, model)
            MODELS[model](folder)
            loads = itertools.product(options.ranks, options.wait_ms, range(options.repeats), options.ways)
            for num_ranks, wait_ms, _, way in loads:
                rows.append(measure(model, folder, wait_ms, way, num_ranks))
                print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    show_table("benchmarks.slow_storage", rows, docs=options.docs)


if __name__ == "__main__":
    if len(sys.argv) >= 4 and Path(sys.argv[1]).is_dir():
        serve(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), *sys.argv[4:])
    else:
        main()
