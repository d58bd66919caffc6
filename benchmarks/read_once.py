"""Loads replicas on nodes with a storage link each: `python -m benchmarks.read_once [--nodes 2 4] [--ways off auto]`.

Each node is a network namespace with two cables: one to the storage, an HTTP server, which passes 1 Gbit/s, and one to
the other nodes, which passes all there is. Under ZeRO stage 0 the rank of each node holds the whole model, some 2 GB.
Needs root, and iproute2 with tc.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import show_table

REPOSITORY = Path(__file__).resolve().parents[1]
COLUMNS = (
    "nodes",
    "link",
    "share_reads",
    "seconds",
    "CPU s of all",
    "of those alone",
    "left storage / model",
    "peak MiB above the model",
)
STORAGE, FABRIC_PORT = "10.88.0.1", 29_433
TIMEOUT_S = 600


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def make_checkpoint(folder: Path, num_layers: int) -> int:
    """Write a Llama of random bits; return the bytes of its weights."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=num_layers, num_attention_heads=16,
        vocab_size=32_000, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in LlamaForCausalLM(config).state_dict().items()}
    config.save_pretrained(folder)
    torch.manual_seed(0)
    state = {name: torch.randint(15_000, 16_000, shape, dtype=torch.int16) for name, shape in shapes.items()}
    save_file({name: value.view(torch.bfloat16) for name, value in state.items()}, folder / "model.safetensors")
    return sum(value.nbytes for value in state.values())


@contextlib.contextmanager
def namespaces(num_nodes: int, link: str) -> Iterator[list[str]]:
    names = [f"lowmem{number}" for number in range(num_nodes)]
    run("ip", "link", "add", "lowmembr", "type", "bridge")
    try:
        run("ip", "link", "set", "lowmembr", "up")
        run("ip", "addr", "add", f"{STORAGE}/32", "dev", "lo")
        for number, name in enumerate(names):
            run("ip", "netns", "add", name)
            run("ip", "link", "add", f"lowmemf{number}", "type", "veth", "peer", "name", "fabric", "netns", name)
            run("ip", "link", "set", f"lowmemf{number}", "master", "lowmembr", "up")
            run("ip", "link", "add", f"lowmems{number}", "type", "veth", "peer", "name", "storage", "netns", name)
            run("ip", "addr", "add", f"10.88.{number + 1}.1/24", "dev", f"lowmems{number}")
            run("ip", "link", "set", f"lowmems{number}", "up")
            run("tc", "qdisc", "add", "dev", f"lowmems{number}", "root", "tbf", "rate", link, "burst", "256k",
                "latency", "50ms")  # fmt: skip
            inside = ("ip", "-n", name)
            run(*inside, "addr", "add", f"10.89.0.{number + 1}/24", "dev", "fabric")
            run(*inside, "addr", "add", f"10.88.{number + 1}.2/24", "dev", "storage")
            for device in ("lo", "fabric", "storage"):
                run(*inside, "link", "set", device, "up")
            run(*inside, "route", "add", STORAGE, "via", f"10.88.{number + 1}.1")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "addr", "del", f"{STORAGE}/32", "dev", "lo"], check=False)
        subprocess.run(["ip", "link", "del", "lowmembr"], check=False)


def load(url: str, share: str) -> dict[str, Any]:
    """Load in this rank; return what it took."""
    from lowmem_load import DistributedInterface, load_model, load_report

    ranks = DistributedInterface()
    ranks.barrier()
    start, before_s = time.perf_counter(), time.process_time()
    config = {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
    model = load_model(url, config, share_reads=share)
    ranks.barrier()
    report, seconds = load_report(model), time.perf_counter() - start
    check = [
        float(value.detach().float().sum()) for value in list(model.parameters())[:: len(list(model.parameters())) // 4]
    ]
    return {
        "seconds": seconds,
        "cpu_s": time.process_time() - before_s,
        "phases": report.seconds,
        "read_bytes": report.read_bytes,
        "received_bytes": report.received_bytes,
        "peak_bytes": report.peak_memory.total_bytes,
        "check": check,
    }


def measure(names: Sequence[str], url: str, share: str, out: Path) -> list[dict[str, Any]]:
    processes = []
    for rank, name in enumerate(names):
        places = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": len(names), "LOCAL_WORLD_SIZE": 1}
        meeting = {"MASTER_ADDR": "10.89.0.1", "MASTER_PORT": FABRIC_PORT, "GLOO_SOCKET_IFNAME": "fabric"}
        env = {**os.environ, **{key: str(value) for key, value in (places | meeting).items()}}
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "benchmarks.read_once", "--rank"]
        command += [url, share, str(out / f"{rank}.json")]
        processes.append(subprocess.Popen(command, env=env, cwd=REPOSITORY))
    for process in processes:
        if process.wait(TIMEOUT_S):
            raise SystemExit("a rank failed")
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(len(names))]


def main() -> None:
    from tests.remote.range_server import in_own_process

    parser = argparse.ArgumentParser(prog="python -m benchmarks.read_once", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--ways", nargs="+", default=["off", "auto"])
    parser.add_argument("--link", default="1gbit", help="rate of a storage link, as tc takes it")
    parser.add_argument("--layers", type=int, default=17)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--docs", action="store_true", help="write the table into docs/measured.md")
    options = parser.parse_args()
    rows: list[Sequence[str]] = [COLUMNS]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        folder.mkdir()
        nbytes = make_checkpoint(folder, options.layers)
        for num_nodes in options.nodes:
            with namespaces(num_nodes, options.link) as names, in_own_process(folder, host="0.0.0.0") as server:
                url, alone_s = server.url.replace("127.0.0.1", STORAGE), 0.0
                for share in options.ways * options.repeats:
                    server.reset()
                    found = measure(names, url, share, Path(scratch))
                    assert len({str(each["check"]) for each in found}) == 1
                    seconds, sent = max(each["seconds"] for each in found), server.stats()["bytes_sent"]
                    alone_s = seconds if share == "off" else alone_s
                    peak = max(each["peak_bytes"] for each in found) - nbytes
                    figures = f"{seconds:.1f}", f"{sum(each['cpu_s'] for each in found):.1f}"
                    ratios = f"{seconds / alone_s:.2f}" if alone_s else "", f"{sent / nbytes:.3f}"
                    rows.append([str(num_nodes), options.link, share, *figures, *ratios, f"{peak / 2**20:.0f}"])
                    print(rows[-1], found[0]["phases"], file=sys.stderr, flush=True)
    show_table("benchmarks.read_once", rows, docs=options.docs)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        Path(sys.argv[4]).write_text(json.dumps(load(sys.argv[2], sys.argv[3])))
    else:
        main()
