"""Weights for an inference engine: TRL's own sync, and the same under `install`, in one run.

    python -m benchmarks.weights_out [--params 1.5e9] [--ranks 2 4] [--repeats 3]
    .cache/vllm/venv/bin/python -m benchmarks.weights_out --vllm [--params 0.1e9] [--ranks 2]

What runs is `VLLMGeneration.sync_weights` of the installed TRL. vLLM's place has a consumer that copies each tensor, as
vLLM does, but keeps one: on rank 0 (a server), or on each rank (colocated). Each turn has a first sync and a later one:
in its first one to a server, TRL gathers twice. The methods take turns. A third sync of each turn, which is not timed,
compares their values by a sum of the bytes.

With `--vllm` rank 0 has a real one in its process, of `make test-vllm`, and is sent bf16 weights of ZeRO-3 after steps
of AdamW with a learning rate of 1e-6, on eight random tokens: all weights, only changes, or an adapter alone.
"""

from __future__ import annotations

import functools
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.checkpoint import checkpoint_of
from benchmarks.collectives import CollectiveCounter
from benchmarks.launch import REPOSITORY, run_on_ranks
from benchmarks.memory import MemorySampler
from benchmarks.methods import zero3_config
from benchmarks.results import MIB, parser_of, show_table

METHODS = [(mode, is_ours) for mode in ("server", "colocate") for is_ours in (False, True)]
COLUMNS = ("ranks", "vLLM", "method", "first sync, s", "later ones, s", "peak anonymous, MiB", "collectives")
COLUMNS_OF_PUSHES = ("ranks", "push", "MiB", "seconds", "peak anonymous, MiB")


@dataclass(frozen=True, slots=True)
class Result:
    """One method on one rank; bytes of memory above its start."""

    mode: str
    is_ours: bool
    first_seconds: float
    later_seconds: float
    peak_anon: int
    num_collectives: int  # of a later sync
    total: int  # of all bytes that the consumer has seen


class Consumer:
    """Stands for vLLM in the same process, and for TRL's client of a server."""

    def __init__(self, largest: int) -> None:
        import torch

        self.total, self.adds_up = 0, False
        self.place = torch.zeros(largest, dtype=torch.int16)

    def load_weights(self, pairs: Iterable[tuple[str, Any]]) -> None:
        import torch

        for _, tensor in pairs:
            units = tensor.detach().reshape(-1).view(torch.int16)
            if self.adds_up:
                self.total += sum(int(piece.sum()) for piece in units.split(1 << 20))  # a sum casts all that it gets
            else:
                self.place[: len(units)].copy_(units)
            del tensor, units

    def update_named_params(self, _: Any, pairs: Iterable[tuple[str, Any]]) -> None:
        self.load_weights(pairs)

    def reset_prefix_cache(self) -> None:
        pass


def _generation(model: Any, mode: str, rank: int, consumer: Consumer) -> Any:
    import torch
    from trl.generation.vllm_generation import VLLMGeneration

    VLLMGeneration._init_vllm = lambda _: None
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3), fsdp_plugin=None)
    accelerator = SimpleNamespace(is_main_process=rank == 0, state=state, device=torch.device("cpu"))
    generation = VLLMGeneration(model, accelerator, None, mode=mode)
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=consumer))
    executor = SimpleNamespace(driver_worker=worker)
    engine = SimpleNamespace(model_executor=executor)
    generation.llm = SimpleNamespace(llm_engine=engine, reset_prefix_cache=consumer.reset_prefix_cache)
    generation.vllm_client = consumer if rank == 0 else None
    return generation


def run_rank(checkpoint: str, repeats: int) -> list[Result]:
    collectives = CollectiveCounter()
    collectives.install()
    import deepspeed
    import torch.distributed as dist

    import lowmem_load
    from lowmem_load.integrations.install import uninstall

    config = zero3_config("bf16")
    engine = deepspeed.initialize(model=lowmem_load.load_model(checkpoint, config), config=config)[0]
    results = []
    for turn in range(repeats):
        for mode, is_ours in METHODS if turn % 2 else METHODS[::-1]:
            if is_ours:
                lowmem_load.install()
            consumer = Consumer(max(parameter.ds_numel for parameter in engine.module.parameters()))
            generation = _generation(engine.module, mode, dist.get_rank(), consumer)
            seconds, peak = [], 0
            for _ in range(2):
                dist.barrier()
                collectives.use.num_calls, collectives.active = 0, True
                with MemorySampler() as memory:
                    start = time.perf_counter()
                    generation.sync_weights()
                    seconds.append(time.perf_counter() - start)
                collectives.active = False
                peak = max(peak, memory.use.peak_anon)
            num_collectives, consumer.adds_up = collectives.use.num_calls, True
            generation.sync_weights()
            results.append(Result(mode, is_ours, *seconds, peak, num_collectives, consumer.total))
            uninstall()
    return results


def _cells(world_size: int, mode: str, is_ours: bool, ranks: list[list[Result]]) -> list[str]:
    """Return a row: medians over the repeats of the slowest rank, and the largest peak of all ranks."""
    mine = [[each for each in results if (each.mode, each.is_ours) == (mode, is_ours)] for results in ranks]
    turns = list(zip(*mine, strict=True))
    first, later = (
        statistics.median(max(getattr(each, name) for each in turn) for turn in turns)
        for name in ("first_seconds", "later_seconds")
    )
    every = [result for results in mine for result in results]
    peak, collectives = max(each.peak_anon for each in every), max(each.num_collectives for each in every)
    method = "lowmem_load" if is_ours else "TRL"
    return [str(world_size), mode, method, f"{first:.2f}", f"{later:.2f}", f"{peak / MIB:.0f}", str(collectives)]


@dataclass(frozen=True, slots=True)
class Push:
    """One push to vLLM, of one rank: bytes that it took, seconds, and bytes of memory above the start."""

    name: str
    nbytes: int
    seconds: float
    peak_anon: int


class CountingClient:
    """The client of docs/howto/rlhf.md, which counts what comes."""

    def __init__(self, vllm: Any) -> None:
        from tests.vllm_cpu.engine import client_of

        self.nbytes, self._client, self.reset_prefix_cache = 0, client_of(vllm), vllm.reset_prefix_cache

    def __call__(self, bucket: Any) -> None:
        self.apply_changes(bucket)

    def apply_changes(self, bucket: Any) -> None:
        from lowmem_load import Change

        parts = [(new.values, new.indices) if isinstance(new, Change) else (new,) for _, new in bucket]
        self.nbytes += sum(part.nbytes for tensors in parts for part in tensors)
        self._client.apply_changes(bucket)


def run_vllm_rank(checkpoint: str, repeats: int) -> list[Push]:
    import deepspeed
    import torch
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model
    from vllm.lora.request import LoRARequest

    from lowmem_load import load_model, push_weights, save_model
    from tests.vllm_cpu.engine import loadable_engine

    deepspeed.init_distributed("gloo")
    options = {"max_num_batched_tokens": 4096, "skip_tokenizer_init": True, "dtype": "bfloat16", "enable_lora": True}
    # Each rank has to make one, but only that of rank 0 is used.
    vllm = loadable_engine(model=checkpoint, distributed_executor_backend="external_launcher", **options)
    client, results = CountingClient(vllm), list[Push]()
    adam = {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True, "weight_decay": 0.0}}
    config: dict[str, Any] = {**zero3_config("bf16"), "optimizer": adam}
    engine = deepspeed.initialize(model=load_model(checkpoint, config), config=config)[0]
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(load_model(checkpoint, config), lora, autocast_adapter_dtype=False)
    adapted = deepspeed.initialize(model=adapted, config=config)[0]
    generator = torch.Generator().manual_seed(dist.get_rank())

    def push_to_vllm(**keywords: bool) -> None:
        push_weights(engine, client if dist.get_rank() == 0 else None, bucket_bytes=1 << 28, **keywords)

    def push_adapter() -> None:
        folder = Path("/dev/shm", Path(checkpoint).name)
        save_model(adapted, folder)
        if dist.get_rank() == 0:
            assert vllm.llm_engine.add_lora(LoRARequest("adapter", 1, str(folder), load_inplace=True))
            client.nbytes = sum(file.stat().st_size for file in folder.iterdir())
            shutil.rmtree(folder)

    def measure(name: str, trained: Any, push: Callable[[], None]) -> None:
        tokens = torch.randint(0, 30_000, (1, 8), generator=generator)
        trained.backward(trained(input_ids=tokens, labels=tokens).loss)
        trained.step()
        client.nbytes = 0
        dist.barrier()
        with MemorySampler() as memory:
            start = time.perf_counter()
            push()
            seconds = time.perf_counter() - start
        results.append(Push(name, client.nbytes, seconds, memory.use.peak_anon))

    for _ in range(repeats):
        measure("all weights", engine, push_to_vllm)
        measure("an adapter alone", adapted, push_adapter)
    measure("the first of changes, which is all", engine, functools.partial(push_to_vllm, changed_only=True))
    for _ in range(repeats):
        measure("only changes", engine, functools.partial(push_to_vllm, changed_only=True))
    return results


def _row_of(world_size: int, name: str, ranks: list[list[Push]]) -> list[str]:
    """Return a row: medians over the repeats of rank 0, which ends last, and the largest peak of all ranks."""
    first, *_ = mine = [[push for push in pushes if push.name == name] for pushes in ranks]
    nbytes, seconds = (statistics.median(getattr(push, field) for push in first) for field in ("nbytes", "seconds"))
    peak = max(push.peak_anon for pushes in mine for push in pushes)
    return [str(world_size), name, f"{nbytes / MIB:.1f}", f"{seconds:.2f}", f"{peak / MIB:.0f}"]


def main() -> None:
    parser = parser_of(__doc__, params=1.5e9, ranks=[2, 4], repeats=3)
    parser.add_argument("--vllm", action="store_true", help="push to a real vLLM, with the Python of make test-vllm")
    arguments = parser.parse_args()
    rows: list[Sequence[str]] = [COLUMNS_OF_PUSHES if arguments.vllm else COLUMNS]
    with checkpoint_of(int(arguments.params)) as path:
        for world_size in arguments.ranks:
            out = REPOSITORY / "benchmarks/results/weights_out" / f"{world_size}-ranks"
            function = run_vllm_rank if arguments.vllm else run_rank
            found = run_on_ranks(function, str(path), arguments.repeats, out=out, world_size=world_size)
            if arguments.vllm:
                pushes = [[Push(**push) for push in pushes] for pushes in found]
                rows += [_row_of(world_size, name, pushes) for name in dict.fromkeys(each.name for each in pushes[0])]
                continue
            ranks = [[Result(**result) for result in results] for results in found]
            totals = {
                each.total for number, rank in enumerate(ranks) for each in rank if each.mode != "server" or not number
            }
            if len(totals) != 1:
                raise SystemExit(f"{world_size} ranks: the methods gave different bytes: {totals}")
            rows += [_cells(world_size, mode, is_ours, ranks) for mode, is_ours in METHODS]
    show_table("benchmarks.weights_out" + " --vllm" * arguments.vllm, rows, docs=arguments.docs)


if __name__ == "__main__":
    main()
