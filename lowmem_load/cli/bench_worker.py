"""One rank of one load: `python -m lowmem_load.cli.bench_worker SPEC`, with RANK and so on as a launcher sets them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from lowmem_load.api.load_model import load_model
from lowmem_load.cli.bench import FLOOR, STOCK, STREAMED
from lowmem_load.cli.bench_memory import PeakMemory
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.fingerprint import fingerprint
from lowmem_load.hf import names
from lowmem_load.hf.active import deepspeed_config
from lowmem_load.io.source import LocalFile
from lowmem_load.report import device_memory
from lowmem_load.saving.model_digest import model_digest

CHUNK_BYTES = 64 << 20
"""Bytes of one read of the floor."""


def load_stock(spec: Mapping[str, Any]) -> Any:
    """Load by transformers' own ZeRO-3 path."""
    cls = names.model_class(None, names.model_config(spec["folder"], {}), False)
    with deepspeed_config(spec["ds_config"]):
        return cls.from_pretrained(spec["folder"], **{names.DTYPE_KEYWORD: "auto"})


def load_streamed(spec: Mapping[str, Any]) -> Any:
    """Load by lowmem_load."""
    return load_model(spec["folder"], spec["ds_config"])


def read_floor(spec: Mapping[str, Any]) -> list[torch.Tensor]:
    """Read this rank's share of the bytes of all files into fresh memory, in one thread."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    memory = []
    for path in spec["files"]:
        with closing(LocalFile(path)) as file:
            start, end = file.nbytes * rank // world_size, file.nbytes * (rank + 1) // world_size
            for at in range(start, end, CHUNK_BYTES):
                memory.append(torch.empty(min(CHUNK_BYTES, end - at), dtype=torch.uint8))
                file.read_into(at, memory[-1].numpy().data)
    return memory


METHODS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    STOCK: load_stock,
    STREAMED: load_streamed,
    FLOOR: read_floor,
}


def measure(spec: Mapping[str, Any], ranks: DistributedInterface) -> dict[str, Any]:
    """Load and measure it, then compute the digest of the model. Collective.

    Returns:
        Seconds of the load; peaks above its start, of resident host memory (mapped files count) and of accelerator
        memory (0 on the CPU); the digest of the model, "" for the floor.
    """
    import lowmem_load.ds.partition  # noqa: F401  import DeepSpeed before the clock starts, for every method

    names.model_class(None, names.model_config(spec["folder"], {}), False)
    ranks.barrier()
    device_before = device_memory().allocated_bytes
    with PeakMemory() as memory:
        start = time.perf_counter()
        loaded = METHODS[spec["method"]](spec)
        seconds = time.perf_counter() - start
    device_peak_bytes = max(0, device_memory().peak_bytes - device_before)
    digest = "" if spec["method"] == FLOOR else fingerprint(map(str, sorted(model_digest(loaded).items())))
    ranks.barrier()
    return {
        "seconds": seconds,
        "peak_bytes": memory.peak_bytes,
        "device_peak_bytes": device_peak_bytes,
        "digest": digest,
    }


def main() -> None:
    """Read the spec named on the command line, run it, write this rank's result."""
    spec, ranks = json.loads(Path(sys.argv[1]).read_text()), DistributedInterface()
    result = measure(spec, ranks)
    Path(spec["out"], f"rank{ranks.rank}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of gloo and DeepSpeed sometimes abort a process that exits normally


if __name__ == "__main__":
    main()
