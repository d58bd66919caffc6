"""Loads for FSDP2 on CPU ranks: accelerate and transformers as they are, and behind `lowmem_load.install()`.

`python -m benchmarks.fsdp2`: a random bf16 Llama, two ranks, fp32 masters (accelerate) or bf16 shards (transformers).
Each load is a fresh set of processes. Prints seconds and the peak of each rank above its start, anonymous and
file-backed memory apart. accelerate itself chooses no FSDP on CPU ranks, so its `fsdp2_prepare_model` is called with a
stand-in for the accelerator.
"""

from __future__ import annotations

import os
import tempfile
import time
import types
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import checkpoint_of, warm_page_cache
from benchmarks.launch import run_on_ranks
from benchmarks.results import log, parser_of, show_table

WAYS = ("accelerate", "accelerate, install()", "fully_shard, lazy()", "transformers", "transformers, install()")
COLUMNS = ("way", "seconds", "shard", "rank 0 anonymous", "rank 0 file", "rank 1 anonymous", "rank 1 file")
MIB = 1 << 20


def prepare(model: Any) -> Any:
    """Do what `Accelerator.prepare` does under fsdp_version 2, cpu_ram_efficient_loading and bf16."""
    import accelerate.utils.fsdp_utils as fsdp_utils
    import torch
    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    PartialState(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=True, auto_wrap_policy="transformer_based_wrap"
    )
    accelerator = types.SimpleNamespace(
        state=types.SimpleNamespace(fsdp_plugin=plugin),
        device=torch.device("cpu"),
        mixed_precision="bf16",
        is_main_process=torch.distributed.get_rank() == 0,
        torch_device_mesh=None,
    )
    return fsdp_utils.fsdp2_prepare_model(accelerator, model)


def shard_lazily(path: str) -> Any:
    """Shard a lazy model by torch's own function, in fp32."""
    import torch
    from torch.distributed.fsdp import fully_shard

    import lowmem_load

    model = lowmem_load.lazy(path, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def measure(way: str, path: str) -> dict[str, Any]:
    import torch
    import transformers
    from transformers.models.llama import modeling_llama  # noqa: F401  imported before the start

    from benchmarks.memory import MemorySampler

    library, _, install = way.partition(", ")
    torch.distributed.init_process_group("gloo")
    if library == "accelerate":
        os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_CPU_RAM_EFFICIENT_LOADING="true")
    if install == "install()":
        import lowmem_load

        lowmem_load.install()
    torch.distributed.barrier()
    start = time.perf_counter()
    with MemorySampler() as memory:
        if library == "accelerate":
            model = prepare(transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16))
        elif library == "fully_shard":
            model = shard_lazily(path)
        else:
            config = transformers.distributed.DistributedConfig(fsdp_size=torch.distributed.get_world_size())
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path, distributed_config=config, dtype=torch.bfloat16
            )
        torch.distributed.barrier()
        seconds = time.perf_counter() - start
    shard = sum(each._local_tensor.nbytes for each in model.parameters())
    return {"seconds": seconds, "shard": shard, "anonymous": memory.use.peak_anon, "file": memory.use.peak_file}


def main() -> None:
    options = parser_of(__doc__, params=575_000_000).parse_args()
    rows: list[tuple[str, ...]] = [COLUMNS]
    with tempfile.TemporaryDirectory() as scratch, checkpoint_of(options.params) as path:
        for way in WAYS:
            warm_page_cache(path)
            out = Path(tempfile.mkdtemp(dir=scratch))
            found = run_on_ranks(measure, way, str(path), out=out, world_size=2)
            seconds = max(each["seconds"] for each in found)
            memory = (f"{each[kind] / MIB:,.0f} MiB" for each in found for kind in ("anonymous", "file"))
            rows.append((way, f"{seconds:.1f}", f"{found[0]['shard'] / MIB:,.0f} MiB", *memory))
            log("  ".join(rows[-1]))
    show_table("benchmarks.fsdp2", rows, docs=options.docs)


if __name__ == "__main__":
    main()
