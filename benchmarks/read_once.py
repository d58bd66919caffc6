"""Loads replicas on nodes with a storage link each: `python -m benchmarks.read_once [--nodes 2 4] [--ways off auto]`.

The storage is an HTTP server (`benchmarks.nodes`). Under ZeRO stage 0 the rank of each node holds the whole model, some
2 GB. `--link` is the rate of a storage link, as tc takes it. Needs root, and iproute2 with tc.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.launch import run_on_ranks
from benchmarks.nodes import STORAGE, nodes
from benchmarks.results import parser_of, show_table

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


def load(url: str, share: str) -> dict[str, Any]:
    """Load in this rank; return what it took."""
    from lowmem_load import get_load_report, load_model
    from lowmem_load.distributed.process_group import DistributedInterface

    ranks = DistributedInterface()
    ranks.barrier()
    start, before_s = time.perf_counter(), time.process_time()
    config = {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
    model = load_model(url, config, share_reads=share)
    ranks.barrier()
    report, seconds = get_load_report(model), time.perf_counter() - start
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


def main() -> None:
    from tests.remote.range_server import in_own_process

    options = parser_of(__doc__, nodes=[2, 4], ways=["off", "auto"], link="1gbit", layers=17, repeats=1).parse_args()
    rows: list[Sequence[str]] = [COLUMNS]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        folder.mkdir()
        nbytes = make_checkpoint(folder, options.layers)
        for num_nodes in options.nodes:
            with nodes(num_nodes, options.link) as names, in_own_process(folder, host="0.0.0.0") as server:
                url, alone_s = server.url.replace("127.0.0.1", STORAGE), 0.0
                for share in options.ways * options.repeats:
                    server.reset()
                    found = run_on_ranks(load, url, share, out=Path(scratch, "out"), world_size=num_nodes, nodes=names)
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
    main()
