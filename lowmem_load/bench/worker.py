"""One rank of one load: `python -m lowmem_load.bench.worker SPEC`, with RANK and so on as a launcher sets them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lowmem_load.bench.floor import Piece, read_plain
from lowmem_load.bench.memory import MemorySampler
from lowmem_load.fingerprint import fingerprint
from lowmem_load.hf import names
from lowmem_load.hf.active import deepspeed_config
from lowmem_load.integrity.model import model_digest
from lowmem_load.load.model import load_model, load_report
from lowmem_load.ranks.process_group import DistributedInterface
from lowmem_load.report import device_memory

STOCK, STREAMED, FLOOR = "stock", "lowmem_load", "floor"

PIECE_BYTES = 64 << 20
"""That the floor reads at a time, into fresh memory."""


@dataclass(slots=True)
class Result:
    """What one rank measured. Bytes, above the start of the load, and seconds.

    Attributes:
        method, rank, world_size: which it was.
        seconds: of the load.
        peak_bytes: of resident host memory, as the kernel keeps it: mapped files count.
        device_peak_bytes: of accelerator memory; 0 on the CPU.
        read_bytes: where the method counts them.
        digest: of the model; "" of the floor, which has none.
        phases: seconds by phase, where the method has such.
    """

    method: str
    rank: int
    world_size: int
    seconds: float
    peak_bytes: int
    device_peak_bytes: int
    read_bytes: int | None = None
    digest: str = ""
    phases: dict[str, float] = field(default_factory=dict)


def load_stock(spec: Mapping[str, Any], keywords: dict[str, Any]) -> Any:
    """Load by transformers' own ZeRO-3 path."""
    config = names.model_config(spec["folder"], {})
    cls = names.model_class(spec["auto_class"], config, False)
    with deepspeed_config(spec["ds_config"]):
        return cls.from_pretrained(spec["folder"], **{names.DTYPE_KEYWORD: "auto"}, **keywords)


def load_streamed(spec: Mapping[str, Any], keywords: dict[str, Any]) -> Any:
    """Load straight into partitions."""
    return load_model(spec["folder"], spec["ds_config"], auto_class=spec["auto_class"], **keywords)


def read_floor(spec: Mapping[str, Any], _: dict[str, Any]) -> list[torch.Tensor]:
    """Read this rank's share of the bytes of all files into fresh memory: one thread, no model."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pieces = []
    for path in spec["files"]:
        nbytes = os.path.getsize(path)
        start, end = nbytes * rank // world_size, nbytes * (rank + 1) // world_size
        pieces += [Piece(path, at, min(PIECE_BYTES, end - at)) for at in range(start, end, PIECE_BYTES)]
    return read_plain(pieces)[0]


METHODS: Mapping[str, Callable[[Mapping[str, Any], dict[str, Any]], Any]] = {
    STOCK: load_stock,
    STREAMED: load_streamed,
    FLOOR: read_floor,
}


def measure(spec: Mapping[str, Any]) -> Result:
    """Load, and measure that; then digest the model. Collective."""
    import lowmem_load.ds.partition  # noqa: F401  imported before the clock starts, as it is for stock

    ranks = DistributedInterface()
    config = names.model_config(spec["folder"], {})
    names.model_class(spec["auto_class"], config, False)
    ranks.barrier()
    device_before = device_memory().allocated_bytes
    with MemorySampler() as sampler:
        start = time.perf_counter()
        loaded = METHODS[spec["method"]](spec, {})
        seconds = time.perf_counter() - start
    result = Result(
        spec["method"],
        ranks.rank,
        ranks.world_size,
        seconds,
        sampler.use().peak,
        max(0, device_memory().peak_bytes - device_before),
    )
    if spec["method"] == STREAMED:
        report = load_report(loaded)
        result.read_bytes, result.phases = report.read_bytes, dict(report.seconds)
    if spec["method"] == FLOOR:
        result.read_bytes = sum(each.numel() for each in loaded)
    else:
        result.digest = fingerprint(map(str, sorted(model_digest(loaded).items())))
    ranks.barrier()
    return result


def main() -> None:
    """Read the spec named on the command line, run it, write this rank's result."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    result = measure(spec)
    Path(spec["out"], f"rank{result.rank}.json").write_text(json.dumps(asdict(result)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all is written; threads of gloo and DeepSpeed now and then abort a process that unwinds normally


if __name__ == "__main__":
    main()
