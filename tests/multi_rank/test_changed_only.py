"""Only changes are sent: after each round the receivers have, bit for bit, what `save_model` writes."""

import contextlib
import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

from lowmem_load import Change, apply_changes, iter_weights, load_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.errors import ConfigError, RankError
from lowmem_load.weights_out.rank_shards import rank_shards, unwrapped
from tests import builders
from tests.multi_rank.test_iter_weights import assert_equal, saved
from tests.multi_rank.test_load_into import filled, meshes
from tests.multi_rank.test_save import ADAM, BF16, FP32, stage_3
from tests.ranks import run_ranks

SHARES = (0.0, 0.0, 0.002, 0.05, 0.5, 1.0)
"""Of the elements of a tensor that change in a round."""
TOKENS = torch.arange(8).view(1, 8)


def change_some(model: Any, number: int, *, masters: bool = False) -> None:
    """Change a share of what this rank owns of each tensor: the same on all ranks, or another one of each rank."""
    rank = dist.get_rank()
    for shard in rank_shards(unwrapped(model), rank, masters=masters):
        together = random.Random(f"{number} {shard.source.name}")
        own = random.Random(f"{number} {shard.source.name} {shard.local_region}")  # replicas stay alike
        share = (together if together.random() < 0.8 else own).choice(SHARES)
        with torch.no_grad(), shard.flat() as memory:
            chosen = torch.rand(len(memory), generator=torch.Generator().manual_seed(own.getrandbits(32))) < share
            memory[chosen] = -memory[chosen] + 1 if number % 2 else float("nan")


def assert_rounds(
    model: Any, case: str, out: str, change: Callable[[int], None] | None = None, rounds: int = 4, **kwargs: Any
) -> set[str]:
    """Assert that `apply_changes` makes of the first round's tensors what is saved after each; return what has come."""
    rank, kinds, state = dist.get_rank(), set[str](), dict[str, torch.Tensor]()
    dtype = kwargs.get("dtype")
    masters = dtype == torch.float32
    for number in range(rounds):
        buckets = [list(bucket) for bucket in iter_weights(model, changed_only=True, bucket_bytes=60_000, **kwargs)]
        pairs = [pair for bucket in buckets for pair in bucket]
        wanted = saved(model, f"{out}/{case}-{number}", dtype=dtype)
        if kwargs.get("dst", rank) not in ("all", rank):
            assert not pairs, case
        else:
            if number:
                apply_changes(state, pairs)
                kinds |= {type(new).__name__ for _, new in pairs}
                kinds |= {"nothing"} if len(pairs) < len(wanted) else set()
            else:
                state = dict(pairs)
            assert_equal(state, wanted, (case, number))
        (change or (lambda number: change_some(model, number, masters=masters)))(number)
    return kinds


def train(engine: Any) -> Callable[[int], None]:
    def step(_: int) -> None:
        engine.backward(engine(input_ids=TOKENS, labels=TOKENS).loss)
        engine.step()

    return step


def send_changes(paths: dict[str, str], out: str) -> None:
    """Rank function: models whose elements are changed at random, on ZeRO-3, FSDP2 and whole; and models that train."""
    world_size = DistributedInterface().world_size
    if world_size == 4:  # as on an accelerator: one collective for each bucket
        importlib.import_module("lowmem_load.distributed.side_group").has_fast_gather = lambda _: True
    cpu = {"device": "cpu", "pin_memory": False}
    ways: dict[str, tuple[str, Any]] = {name: (name, BF16) for name in paths}
    ways |= {"fp32": ("odd", FP32), "whole": ("tied", {"zero_optimization": {"stage": 0}})}
    ways |= {"cpu": ("mixtral", stage_3(offload_param=cpu)), "hpZ": ("mixtral", stage_3(zero_hpz_partition_size=2))}
    kinds: set[str] = set()
    for way, (name, config) in ways.items():
        model = load_model(paths[name], config)
        kinds |= assert_rounds(model, way, out, dst="all" if way == "mixtral" else world_size - 1)
    for mesh, shard in meshes(world_size).items():
        for name, path in paths.items():
            kinds |= assert_rounds(filled(path, shard), f"{mesh} {name}", out)
    assert kinds == {"Tensor", "Change", "nothing"} or dist.get_rank() < world_size - 1
    cast = filled(paths["odd"], shard)
    assert_rounds(cast, "cast", out, dtype=torch.bfloat16)
    for way, config in (
        ("bf16 Adam", BF16),
        ("fp32 Adam", FP32),
        ("offload", stage_3(offload_optimizer=cpu, offload_param=cpu)),
    ):
        engine_config = {**BF16, **config, **ADAM} if way != "fp32 Adam" else {**FP32, **ADAM}
        engine = deepspeed.initialize(model=load_model(paths["mixtral"], engine_config), config=engine_config)[0]
        assert_rounds(engine, way, out, train(engine))
        assert_rounds(engine, f"{way} masters", out, train(engine), dtype=torch.float32)
    model = filled(paths["odd"], shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(_: int) -> None:
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert_rounds(model, "SGD", out, step)


@pytest.mark.parametrize("world_size", [2, 4])
def test_changes_make_what_is_saved(world_size: int, checkpoints: Path, tmp_path: Path) -> None:
    paths = {
        "odd": str(builders.tiny_llama(checkpoints, torch.float32, **builders.ODD_SIZES)),
        "tied": str(builders.tiny_qwen2_tied(checkpoints, torch.float32)),
        "mixtral": str(builders.tiny_mixtral(checkpoints, torch.float32)),
    }
    run_ranks(send_changes, paths, str(tmp_path), world_size=world_size, timeout_s=300)


def ways_to_lose(model: Any, rank: int) -> list[Callable[[], None]]:
    """What may come between two rounds, so that the later one cannot send changes alone."""

    def leave() -> None:
        weights = iter_weights(model, changed_only=True)
        next(weights)
        weights.close()

    def fail() -> None:
        with contextlib.closing(iter_weights(model, changed_only=True)) as weights:
            for _ in weights:
                if rank == 1:
                    raise ZeroDivisionError

    def leave_alone() -> None:
        for number, _ in enumerate(iter_weights(model, changed_only=True)):
            if rank == 1 and number == 0:
                return

    def send_dense() -> None:
        for _ in iter_weights(model):
            pass

    def lose() -> None:
        """As if this rank alone had been interrupted."""
        module: Any = importlib.import_module("lowmem_load.weights_out.iter_weights")
        if rank == 1:
            module._KEPT.clear()

    def replace() -> None:
        model.config.use_cache = not model.config.use_cache

    return [leave, fail, leave_alone, send_dense, lose, replace]


def send_all_again(path: str, out: str) -> None:
    """Rank function: what follows an error, a loop that was left, or anything that changed is sent in full."""
    rank, model = DistributedInterface().rank, load_model(path, BF16)
    num_tensors = len(saved(model, f"{out}/saved"))

    def num_sent(**kwargs: Any) -> int:
        pairs = [pair for bucket in iter_weights(model, changed_only=True, **kwargs) for pair in bucket]
        assert not any(isinstance(new, Change) for _, new in pairs)
        return len(pairs)

    assert num_sent() == num_tensors
    assert num_sent() == 0, "nothing has changed"
    for between in ways_to_lose(model, rank):
        with contextlib.suppress(ZeroDivisionError, RankError):
            between()
        assert num_sent() == num_tensors, between
        assert num_sent() == 0, between
    for kwargs in ({"dtype": torch.float16}, {"bucket_bytes": 1000}, {"dst": 0}):
        assert num_sent(**kwargs) == (num_tensors if kwargs.get("dst", rank) == rank else 0), kwargs
        assert num_sent(**kwargs) == 0, kwargs
    assert num_sent(names=["lm_head.weight"]) == 1 and num_sent(names=["lm_head.weight"]) == 0
    one, other = (iter_weights(model, changed_only=True, bucket_bytes=1) for _ in range(2))
    assert all(len(ours) == len(theirs) == 1 for ours, theirs in zip(one, other, strict=True)), "two at a time"
    assert num_sent(bucket_bytes=1) == 0
    for wrong in ({"names": lambda name: True}, {"merge_adapters": True}):
        with pytest.raises(ConfigError, match="iter_weights: changed_only: "):
            next(iter_weights(model, changed_only=True, **wrong))
    with pytest.raises(RankError, match="rank 1: has changed_only True, where"):
        next(iter_weights(model, changed_only=rank == 1))


def test_all_is_sent_again(checkpoints: Path, tmp_path: Path) -> None:
    path = builders.tiny_llama(checkpoints, torch.float32)
    run_ranks(send_all_again, str(path), str(tmp_path), world_size=3, timeout_s=200)
