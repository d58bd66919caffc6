"""Only changes are sent: after each round the receivers have, bit for bit, what `save_model` writes."""

import contextlib
import gc
import importlib
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

from lowmem_load import Change, apply_changes, iter_weights, load_model, push_weights
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.errors import ConfigError, RankError
from lowmem_load.weights_out.rank_shards import rank_shards, unwrapped
from tests import builders
from tests.multi_rank.test_iter_weights import saved
from tests.multi_rank.test_load_into import filled, meshes
from tests.multi_rank.test_push_weights import Taker
from tests.multi_rank.test_save import ADAM, BF16, FP32, stage_3
from tests.parity import assert_equal
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
    model: Any, case: str, out: str, change: Callable[[int], None] | None = None, rounds: int = 3, **kwargs: Any
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

    model.config.dtype, model.config.architectures = torch.float64, None  # which `save_pretrained` corrects
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


class Engine:
    """A client that takes changes. It may die at a bucket, the last one too, or leave its work undone."""

    def __init__(self) -> None:
        self.state: dict[str, torch.Tensor] = {}
        self.num_changes = self.num_tensors = self.num_buckets = 0
        self.dies_at = self.sleeps_at = -1

    def apply_changes(self, bucket: list[tuple[str, Any]]) -> Any:
        """Take a bucket."""
        self.state |= {name: new for name, new in bucket if name not in self.state}
        apply_changes(self.state, bucket)
        self.num_changes += sum(isinstance(new, Change) for _, new in bucket)
        self.num_tensors += sum(isinstance(new, torch.Tensor) for _, new in bucket)
        self.num_buckets += 1
        if self.num_buckets - 1 == self.dies_at:
            raise ConnectionError("the server is gone")
        return self.late() if self.num_buckets - 1 == self.sleeps_at else None

    async def late(self) -> None:
        """Do nothing."""

    def update_named_params(self, _: Any, pairs: Any) -> None:
        """Take full tensors."""
        self.state |= dict(pairs)


def push(model: Any, engine: Engine | None, **kwargs: Any) -> tuple[int, int]:
    """Push, and return how many changes and tensors have come."""
    if engine is not None:
        engine.num_changes = engine.num_tensors = engine.num_buckets = 0
    push_weights(model, engine, changed_only=True, bucket_bytes=30_000, **kwargs)
    return (engine.num_changes, engine.num_tensors) if engine is not None else (0, 0)


def push_changes(path: str, out: str) -> None:
    """Rank function: engines that take all, die, go and come again have what is saved after each push."""
    rank, model = DistributedInterface().rank, load_model(path, BF16)
    num_tensors, rounds = len(saved(model, f"{out}/first")), 0

    def change_few() -> dict[str, torch.Tensor]:
        nonlocal rounds
        rounds += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.ds_tensor[rounds % 16] += 1  # type: ignore[attr-defined]
        return saved(model, f"{out}/{rounds}")

    def assert_pushed(engine: Engine | None, *, is_full: bool) -> None:
        wanted = change_few()
        found = push(model, engine)
        if engine is not None:
            assert found == ((0, num_tensors) if is_full else (num_tensors, 0))
            assert_equal(engine.state, wanted, rounds)

    engine = Engine()
    mine = engine if rank == 1 else None
    assert_pushed(mine, is_full=True)
    assert_pushed(mine, is_full=False)
    last = engine.num_buckets - 1
    for name, number in (("dies_at", 0), ("dies_at", 1), ("dies_at", last), ("sleeps_at", last)):
        setattr(engine, name, number)
        change_few()
        with pytest.raises(RankError, match=r"rank 1: .*(the server is gone|returned a coroutine)"):
            push(model, mine)
        engine.dies_at = engine.sleeps_at = -1
        assert_pushed(mine, is_full=True)
        assert_pushed(mine, is_full=False)
    assert_pushed(Engine() if rank == 1 else None, is_full=True)  # another one
    assert_pushed(mine, is_full=True)
    other = load_model(path, BF16)
    for options in ({}, {"changed_only": True}):  # its weights take the place of the model's
        push_weights(other, mine, bucket_bytes=30_000, **options)
        assert_pushed(mine, is_full=True)
    here, there = engine if rank == 1 else None, Engine() if rank == 0 else None
    assert_pushed(here or there, is_full=True)  # now two of them
    assert_pushed(here or there, is_full=False)
    assert_pushed(there, is_full=True)
    for bucket in iter_weights(model, changed_only=True, bucket_bytes=30_000, dst=0):
        assert not any(isinstance(new, Change) for _, new in bucket), "it is not the client"
    is_gone, there = weakref.ref(there) if there else lambda: None, None
    gc.collect()
    assert is_gone() is None, "the snapshot does not keep an engine"
    for client in (print, Taker()):
        with pytest.raises(
            RankError, match=r"rank 0: ConfigError: push_weights: client: .* has no method apply_changes"
        ):
            push_weights(model, client if rank == 0 else None, changed_only=True)


def test_engines_have_all_weights_after_each_push(checkpoints: Path, tmp_path: Path) -> None:
    path = builders.tiny_llama(checkpoints, torch.float32)
    run_ranks(push_changes, str(path), str(tmp_path), world_size=2, timeout_s=200)
