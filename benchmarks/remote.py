"""Loads from an HTTP server: `python -m benchmarks.remote [--params 1.5e9] [--docs]`. Root on Linux for the links.

- *this machine*: two ranks load from a range server next to them. The *client alone* fetches the same bytes into fresh
  memory, in two processes of as many threads, by Python's http.client.
- *50 ms, 1 Gbit/s*: the same, with a wait of the server before each answer, over a link of that rate.
- *fresh nodes*: two nodes of two ranks, each with a link of 1 Gbit/s to the server. Either each node downloads the
  checkpoint and then loads it, or the ranks load from the server.

Nodes are network namespaces (`benchmarks.nodes`).
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import checkpoint_of
from benchmarks.launch import REPOSITORY, run_on_ranks
from benchmarks.memory import MemorySampler
from benchmarks.methods import zero3_config
from benchmarks.nodes import STORAGE, nodes
from benchmarks.results import MIB, log, parser_of, show_table
from tests.remote.range_server import in_own_process

COLUMNS = (
    "where",
    "way",
    "ranks",
    "seconds",
    "of them reading",
    "GB/s",
    "of the link",
    "peak - partition, MiB",
    "requests",
)
REQUEST_BYTES, THREADS = 16 << 20, 16
LINK, RATE = "1gbit", 125e6
"""What a link passes: 1 Gbit/s, and the same in bytes per second."""
LATENCY_MS = 50
OUT = REPOSITORY / "benchmarks" / "results" / "remote"


# -- ranks -------------------------------------------------------------------------------------------------------------


def fetch(host: str, jobs: Sequence[tuple[str, int, int]], memory: memoryview) -> None:
    """Fetch ranges into memory, one after the other, on one connection for each thread."""
    starts = [sum(nbytes for _, _, nbytes in jobs[:number]) for number in range(len(jobs))]

    def run(numbers: Sequence[int]) -> None:
        connection = HTTPConnection(host)
        for number in numbers:
            file, first, nbytes = jobs[number]
            connection.request("GET", file, headers={"Range": f"bytes={first}-{first + nbytes - 1}"})
            answer, at = connection.getresponse(), starts[number]
            while at < starts[number] + nbytes:
                at += answer.readinto(memory[at : starts[number] + nbytes])
            answer.read()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(run, [range(first, len(jobs), THREADS) for first in range(THREADS)]))


def parts(sizes: dict[str, int], rank: int, world_size: int) -> list[tuple[str, int, int]]:
    """Return the requests for one rank's share of each file."""
    found = []
    for file, nbytes in sizes.items():
        start, end = nbytes * rank // world_size, nbytes * (rank + 1) // world_size
        found += [(f"/{file}", at, min(REQUEST_BYTES, end - at)) for at in range(start, end, REQUEST_BYTES)]
    return found


def run_rank(spec: dict[str, Any]) -> dict[str, Any]:
    import deepspeed  # noqa: F401  imported before the clock starts, as everything else
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    from lowmem_load import get_load_report, load_model
    from lowmem_load.distributed.process_group import DistributedInterface

    ranks, host = DistributedInterface(), spec["url"].partition("//")[2].strip("/")
    ranks.barrier()
    start = time.perf_counter()
    with MemorySampler() as memory:
        if spec["way"] == "client alone":
            jobs = parts(spec["sizes"], ranks.rank, ranks.world_size)
            fresh = torch.empty(sum(nbytes for _, _, nbytes in jobs), dtype=torch.uint8)
            fetch(host, jobs, memoryview(fresh.numpy()))
            held, requests, reading = fresh.nbytes, len(jobs), time.perf_counter() - start
        else:
            name = spec["url"]
            if spec["way"] == "download, then load":
                name = tempfile.gettempdir()
                if os.environ["LOCAL_RANK"] == "0":
                    download(spec["url"], spec["files"], Path(name))
                ranks.barrier()
            report = get_load_report(load_model(name, zero3_config("bf16")))
            reading = report.seconds["read"]
            held, requests = report.partition_bytes, report.requests.num_requests
        ranks.barrier()
    return {
        "seconds": time.perf_counter() - start,
        "reading": reading,
        "extra": memory.use.peak - held,
        "requests": requests,
    }


def download(url: str, files: Sequence[str], folder: Path) -> None:
    from urllib.request import urlopen

    def one(file: str) -> None:
        with urlopen(url + file) as answer, (folder / file).open("wb") as out:
            shutil.copyfileobj(answer, out, 1 << 20)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, files))


# -- the tables --------------------------------------------------------------------------------------------------------


def rows(checkpoint: Path, repeats: int) -> Iterator[list[str]]:
    sizes = {path.name: path.stat().st_size for path in sorted(checkpoint.glob("*.safetensors"))}
    files = [path.name for path in checkpoint.iterdir() if path.is_file()]
    nbytes = sum(sizes.values())

    def row(where: str, way: str, names: Sequence[str], behaviour: dict[str, Any]) -> list[str]:
        found = []
        for _ in range(repeats):
            with in_own_process(checkpoint, host="0.0.0.0", **behaviour) as server:
                url = server.url.replace("127.0.0.1", STORAGE if names[0] else "127.0.0.1") + "/"
                spec = {"way": way, "url": url, "sizes": sizes, "files": files}
                found.append(run_on_ranks(run_rank, spec, out=OUT, world_size=2 * len(names), nodes=names))
        seconds = [max(each["seconds"] for each in ranks) for ranks in found]
        took, ranks = statistics.median(seconds), found[0]
        link = f"{nbytes / len(names) / took / RATE:.2f}" if names[0] else ""
        extra = max(each["extra"] for ranks in found for each in ranks) / MIB
        num_requests = sum(each["requests"] for each in ranks)
        if way == "download, then load":
            link, num_requests = f"{nbytes / took / RATE:.2f}", 0
        reading = statistics.median(max(each["reading"] for each in ranks) for ranks in found)
        speed = f"{nbytes / took / 1e9:.2f}"
        made = [
            where,
            way,
            str(2 * len(names)),
            f"{took:.2f}",
            f"{reading:.2f}",
            speed,
            link,
            f"{extra:.0f}",
            str(num_requests),
        ]
        log(" | ".join(made))
        return made

    here = [""]
    for way in ("client alone", "lowmem_load", "client alone", "lowmem_load"):
        yield row("this machine", way, here, {})
    with nodes(1, LINK) as far:
        for way in ("client alone", "lowmem_load"):
            yield row(f"{LATENCY_MS} ms, 1 Gbit/s", way, far, {"latency_ms": LATENCY_MS})
    with nodes(2, LINK) as fresh:
        for way in ("download, then load", "lowmem_load"):
            yield row("fresh nodes", way, fresh, {})


def main() -> None:
    chosen = parser_of(__doc__, params=1.5e9, repeats=3).parse_args()
    with checkpoint_of(int(chosen.params)) as checkpoint:
        table = list(rows(checkpoint, chosen.repeats))
    show_table("benchmarks.remote", [COLUMNS, *table], docs=chosen.docs)


if __name__ == "__main__":
    main()
