"""Loads of many nodes from one server: `python -m benchmarks.nodes [--nodes 2 4 8] [--links 1gbit 200mbit] [--docs]`.

Nodes are Linux network namespaces. Each has two cables. The one to the storage, which is a server on this machine,
passes what the link says at most; the one to the other nodes passes all there is. Each node mounts the checkpoint, as
it would mount an NFS: a FUSE folder with a page cache of its own, which fetches what the kernel asks for by HTTP.

The model is a random Qwen3-MoE of 147 MB with an expert in each of its tensors. Each script loads it as it is, and
then with lowmem_load, in the same ranks, after the page caches were emptied. The clock stops once a rank has looked at
all values that it keeps, because transformers maps files and reads them on use. *apart* are the seconds between the
first and the last rank. Bytes are those that left the server by the links. Needs root, iproute2 with tc, `pip install
mfusepy`, and libfuse.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.launch import REPOSITORY, run_on_ranks
from benchmarks.results import log, parser_of, show_table

STORAGE = "10.88.0.1"
"""The address under which every node reaches the storage, so that all ranks name one URL."""

COLUMNS = ("script", "nodes", "ranks", "link", "way", "seconds", "apart", "left the server / model")
WAYS = ("default", "lowmem_load")
OUT = REPOSITORY / "benchmarks" / "results" / "nodes"


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def set_rate(number: int, link: str, process: int | str = "self") -> None:
    """Have the storage links of so many nodes pass `link`. A rank on a node names a process outside."""
    for node in range(number):
        shaped = f"tc qdisc replace dev lowmems{node} root tbf rate {link} burst 512kb latency 100ms"
        _call("nsenter", f"--net=/proc/{process}/ns/net", *shaped.split())


def sent_bytes(number: int) -> int:
    """Return the bytes that have left the server for so many nodes."""
    counters = (Path(f"/sys/class/net/lowmems{node}/statistics/tx_bytes") for node in range(number))
    return sum(int(counter.read_text()) for counter in counters)


@contextlib.contextmanager
def nodes(number: int, link: str) -> Iterator[list[str]]:
    """Yield the names of the namespaces; `link` is the rate of a storage link, as tc takes it (such as 1gbit)."""
    names = [f"lowmem{node}" for node in range(number)]
    _call("ip", "link", "add", "lowmembr", "type", "bridge")
    try:
        _call("ip", "link", "set", "lowmembr", "up")
        _call("ip", "addr", "add", f"{STORAGE}/32", "dev", "lo")
        for node, name in enumerate(names):
            _call("ip", "netns", "add", name)
            _call("ip", "link", "add", f"lowmemf{node}", "type", "veth", "peer", "name", "fabric", "netns", name)
            _call("ip", "link", "set", f"lowmemf{node}", "master", "lowmembr", "up")
            _call("ip", "link", "add", f"lowmems{node}", "type", "veth", "peer", "name", "storage", "netns", name)
            _call("ip", "addr", "add", f"10.88.{node + 1}.1/24", "dev", f"lowmems{node}")
            _call("ip", "link", "set", f"lowmems{node}", "up")
            inside = ("ip", "-n", name)
            _call(*inside, "addr", "add", f"10.89.0.{node + 1}/24", "dev", "fabric")
            _call(*inside, "addr", "add", f"10.88.{node + 1}.2/24", "dev", "storage")
            for device in ("lo", "fabric", "storage"):
                _call(*inside, "link", "set", device, "up")
            _call(*inside, "route", "add", STORAGE, "via", f"10.88.{node + 1}.1")
        set_rate(number, link)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "addr", "del", f"{STORAGE}/32", "dev", "lo"], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", "lowmembr"], check=False, capture_output=True)


# -- ranks -------------------------------------------------------------------------------------------------------------


def make_model(folder: Path, num_layers: int) -> int:
    """Write a Qwen3-MoE as published, an expert in each tensor; return the bytes of its weights."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=1024, intermediate_size=1024, num_hidden_layers=num_layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=64, vocab_size=8192, moe_intermediate_size=512, num_experts=16,
        num_experts_per_tok=2, dtype="bfloat16", architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="100MB")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def by_transformers(path: str, **sizes: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    return AutoModelForCausalLM.from_pretrained(
        path, distributed_config=DistributedConfig(**sizes), dtype=torch.bfloat16
    )


def transformers_fsdp(path: str, _: int) -> Any:
    return by_transformers(path, fsdp_size=int(os.environ["WORLD_SIZE"]))


def transformers_hsdp(path: str, num_local: int) -> Any:
    """Replicas are nodes, as transformers suggests."""
    return by_transformers(path, dp_replicate_size=int(os.environ["WORLD_SIZE"]) // num_local, fsdp_size=num_local)


def transformers_tp(path: str, num_local: int) -> Any:
    """Tensor parallel in each node."""
    return by_transformers(path, fsdp_size=int(os.environ["WORLD_SIZE"]) // num_local, tp_size=num_local)


def accelerate_fsdp2(path: str, _: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.fsdp2 import prepare

    return prepare(AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16))


def trainer_zero3(path: str, _: int) -> Any:
    from transformers import AutoModelForCausalLM, TrainingArguments

    from benchmarks.methods import zero3_config

    scratch = os.environ["TMPDIR"]
    kept = TrainingArguments(scratch, deepspeed=zero3_config("bf16"), bf16=True, use_cpu=True)
    return AutoModelForCausalLM.from_pretrained(path), kept


SCRIPTS: dict[str, Callable[[str, int], Any]] = {
    "transformers, FSDP2": transformers_fsdp,
    "transformers, HSDP": transformers_hsdp,
    "transformers, TP in a node": transformers_tp,
    "accelerate, FSDP2": accelerate_fsdp2,
    "Trainer, ZeRO-3": trainer_zero3,
}


def check_of(model: Any) -> float:
    """Look at all values that this rank keeps; return a sum of them."""
    model = model[0] if isinstance(model, tuple) else model
    kept = (getattr(each, "ds_tensor", getattr(each, "_local_tensor", each)) for each in model.parameters())
    return sum(float(each.detach().double().sum()) for each in kept)


def measure(script: str, path: str, links: Sequence[str], ahead_kib: int, repeats: int) -> list[dict[str, float]]:
    """Return what each load took on this rank, for each link, way and repeat."""
    import deepspeed  # noqa: F401  imported before the clock starts, as everything else
    import torch
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    import lowmem_load
    from benchmarks.checkpoint import drop_page_cache
    from benchmarks.methods import wait_for_all_gathers

    barrier, found = torch.distributed.barrier, []
    torch.distributed.init_process_group("gloo")
    wait_for_all_gathers()
    if script.startswith("accelerate"):
        os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_CPU_RAM_EFFICIENT_LOADING="true")
    num_local, is_first = int(os.environ["LOCAL_WORLD_SIZE"]), os.environ["LOCAL_RANK"] == "0"
    num_nodes, reports = torch.distributed.get_world_size() // num_local, list[Any]()
    if is_first:
        Path(f"/sys/class/bdi/0:{os.minor(os.stat(path).st_dev)}/read_ahead_kb").write_text(str(ahead_kib))
    for link, way, _ in itertools.product(links, WAYS, range(repeats)):
        gc.collect()  # an earlier model may map the files
        barrier()
        if is_first:
            drop_page_cache(Path(path))
        if torch.distributed.get_rank() == 0:
            set_rate(num_nodes, link, os.getppid())
        with (
            lowmem_load.install(strict=True, on_load=reports.append)
            if way == "lowmem_load"
            else contextlib.nullcontext()
        ):
            barrier()
            before, start = sent_bytes(num_nodes), time.monotonic()
            barrier()
            model = SCRIPTS[script](path, num_local)
            check, end = check_of(model), time.monotonic()
            barrier()
        found.append({"start": start, "end": end, "sent": sent_bytes(num_nodes) - before, "check": check})
        print(link, way, found[-1], *(each.seconds for each in reports), flush=True)
        reports.clear()
        del model
    return found


def rows_of(
    script: str, num_nodes: int, num_local: int, nbytes: int, folder: Path, options: Any
) -> Iterator[list[str]]:
    from benchmarks.slow_storage import start_server
    from tests.remote.range_server import in_own_process

    with contextlib.ExitStack() as stack:
        mount = stack.enter_context(tempfile.TemporaryDirectory())
        names = stack.enter_context(nodes(num_nodes, options.links[0]))
        host = f"{STORAGE}:{stack.enter_context(in_own_process(folder, host='0.0.0.0')).url.rpartition(':')[2]}"
        servers = []
        for name in names:
            prefix = ["nsenter", f"--net=/var/run/netns/{name}", "unshare", "--mount"]
            servers.append(start_server(folder, mount, 0, host, prefix))
            stack.callback(servers[-1].wait)
            stack.callback(servers[-1].kill)
        ranks = run_on_ranks(
            measure, script, mount, options.links, options.ahead_kib, options.repeats,
            out=OUT, world_size=num_nodes * num_local, nodes=names, mounts=[server.pid for server in servers],
        )  # fmt: skip
    if script != "Trainer, ZeRO-3":  # whose default loader leaves padding undefined
        assert all(len({each["check"] for each in of_rank}) == 1 for of_rank in ranks)
    loads = list(zip(*ranks, strict=True))
    for number, (link, way) in enumerate(itertools.product(options.links, WAYS)):
        of_way = loads[number * options.repeats : (number + 1) * options.repeats]
        ends = [[each["end"] - max(other["start"] for other in load) for each in load] for load in of_way]
        figures = (
            f"{statistics.median(max(each) for each in ends):.1f}",
            f"{statistics.median(max(each) - min(each) for each in ends):.1f}",
            f"{statistics.median(load[0]['sent'] for load in of_way) / nbytes:.2f}",
        )
        yield [script, str(num_nodes), str(num_nodes * num_local), link, way, *figures]


def main() -> None:
    parser = parser_of(__doc__, nodes=[2, 4, 8], links=["1gbit", "200mbit"], layers=2, repeats=3)
    parser.add_argument("--ranks-of-node", type=int, default=1)
    parser.add_argument("--ahead-kib", type=int, default=128, help="what the kernel reads ahead. Default: 128")
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=SCRIPTS)
    options = parser.parse_args()
    table: list[Sequence[str]] = [COLUMNS]
    with tempfile.TemporaryDirectory() as scratch:
        nbytes = make_model(Path(scratch), options.layers)
        log(f"{nbytes / 1e6:.0f} MB")
        for num_nodes, script in itertools.product(options.nodes, options.scripts):
            for row in rows_of(script, num_nodes, options.ranks_of_node, nbytes, Path(scratch), options):
                table.append(row)
                log("  ".join(row))
    show_table("benchmarks.nodes", table, docs=options.docs)


if __name__ == "__main__":
    main()
