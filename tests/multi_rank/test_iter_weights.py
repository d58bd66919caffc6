"""`iter_weights`: its buckets hold, bit for bit, what the files of `save_model` hold."""

import copy
import gc
import importlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lowmem_load import iter_weights, load_model, save_model
from lowmem_load.distributed import side_group
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.errors import ConfigError, RankError
from lowmem_load.integrations.install import streaming
from tests import builders
from tests.model_digest import model_digest
from tests.multi_rank.test_load_into import filled, meshes
from tests.multi_rank.test_modes import is_compiled
from tests.multi_rank.test_save import ADAM, BF16, FP32, adapted, counted, stage_3
from tests.parity import assert_equal
from tests.ranks import run_ranks

NAMES = ("all_gather_single", "all_gather_into_tensor", "gather", "broadcast", "isend", "irecv")
COLLECTIVES = [name for name in NAMES if hasattr(dist, name)]
"""Some releases of torch lack some of them."""


def saved(model: Any, folder: str, **kwargs: Any) -> dict[str, torch.Tensor]:
    """What `save_model` writes."""
    save_model(model, folder, **kwargs)
    files = sorted(Path(folder).glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def assert_sent(
    model: Any, wanted: dict[str, torch.Tensor], case: Any, *, is_short: bool = False, **kwargs: Any
) -> None:
    """All ranks: one bucket, middle ones, and one a tensor; to all ranks and to one. In short: middle ones."""
    total, rank, world_size = sum(value.nbytes for value in wanted.values()), dist.get_rank(), dist.get_world_size()
    is_one_collective = side_group.has_fast_gather(RankGroup(None))
    middle, others = (total // 5, ("all", world_size - 1)), [(1 << 30, ("all", 0)), (1, ("all",))]
    for bucket_bytes, receivers in [middle] if is_short else [middle, *others]:
        for to in receivers:
            with counted(COLLECTIVES) as collectives:
                buckets = [list(bucket) for bucket in iter_weights(model, bucket_bytes=bucket_bytes, dst=to, **kwargs)]
            found = [pair for bucket in buckets for pair in bucket]
            where = (case, bucket_bytes, to)
            if to not in ("all", rank):
                assert not found, where
            else:
                assert len(found) == len(wanted), where
                assert_equal(dict(found), wanted, where)
            if is_one_collective:
                of_experts = world_size if "mixtral" in str(case) else 1  # which lie on few ranks each
                assert len(collectives) <= of_experts * (2 * total / bucket_bytes + 1), where
            if world_size == 1:
                assert not collectives, where
            if bucket_bytes == 1 and not kwargs.get("merge_adapters") and to in ("all", rank):
                assert [len(bucket) for bucket in buckets] == [1] * len(wanted), where


def ways(paths: dict[str, str], swap: str | None, world_size: int) -> dict[str, tuple[str, Any, dict[str, Any]]]:
    """How each model is loaded: checkpoint, ds_config, keywords."""
    found: dict[str, tuple[str, Any, dict[str, Any]]] = {name: (name, BF16, {}) for name in paths if name != "large"}
    if world_size % 2:
        return found
    found["llama fp32"] = ("llama", FP32, {})
    found["llama stage 0"] = ("llama", {"zero_optimization": {"stage": 0}}, {})
    found["mixtral stage 2"] = ("mixtral", {"zero_optimization": {"stage": 2}}, {})
    found["odd cpu"] = ("odd", stage_3(offload_param={"device": "cpu", "pin_memory": False}), {})
    found["mixtral partial"] = ("mixtral", FP32, {"partition": ["model.layers"], "dtype": torch.float32})
    found["odd hpZ"] = ("odd", stage_3(zero_hpz_partition_size=2), {})
    if swap is not None:
        offload = {"device": "nvme", "nvme_path": swap, "buffer_size": 1_400_000, "pin_memory": False}
        found["large nvme"] = ("large", stage_3(offload_param={**offload, "buffer_count": 4}), {})
    return found


def send_all(paths: dict[str, str], out: str, swap: str | None, is_whole: bool) -> None:
    world_size = DistributedInterface().world_size
    for way, (name, config, kwargs) in ways(paths, swap, world_size).items():
        model = load_model(paths[name], config, **kwargs)
        before = model_digest(model)
        is_short = way not in ("odd", "mixtral") and not (is_whole and world_size == 2)
        assert_sent(model, saved(model, f"{out}/{way}"), way, is_short=is_short)
        if way == "odd":
            assert_sent(model, saved(model, f"{out}/cast", dtype=torch.float16), way, dtype=torch.float16)
        assert model_digest(model) == before, way
        del model
        if way.endswith("nvme"):
            gc.collect()  # else DeepSpeed's swapper outlives the folder


@pytest.fixture(scope="module")
def paths(checkpoints: Path) -> dict[str, str]:
    large = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 1, "vocab_size": 2560}
    made = {
        "llama": builders.tiny_llama(checkpoints, torch.float32),
        "odd": builders.tiny_llama(checkpoints, torch.float32, **builders.ODD_SIZES),
        "tied": builders.tiny_qwen2_tied(checkpoints, torch.float32),
        "mixtral": builders.tiny_mixtral(checkpoints, torch.float32),
        "large": builders.tiny_llama(checkpoints, torch.float32, **large),
    }
    return {name: str(path) for name, path in made.items()}


def send_meshes(paths: dict[str, str], out: str, is_whole: bool) -> None:
    """Rank function: each model on the first mesh, and one (or each, for `is_whole`) on the others."""
    for number, (mesh, shard) in enumerate(meshes(DistributedInterface().world_size).items()):
        for name, path in paths.items():
            if number > 0 and not is_whole and name != "mixtral":
                continue
            model = filled(path, shard)
            assert_sent(model, saved(model, f"{out}/{mesh} {name}"), (mesh, name), is_short=True)


def send_merged(paths: dict[str, str], out: str) -> None:
    for name in ("odd", "llama", "tied", "mixtral"):
        config = BF16 if name == "llama" else FP32
        with streaming(config):
            model = adapted(name, load_model(paths[name], config))
        holder = deepspeed.initialize(model=model, config={**config, **ADAM})[0] if name == "odd" else model
        before = model_digest(model)
        wanted = saved(holder, f"{out}/{name}", merge_adapters=True)
        assert_sent(holder, wanted, name, is_short=name != "odd", merge_adapters=True)
        assert_sent(holder, saved(holder, f"{out}/{name}-adapter"), name, is_short=True)  # the adapters alone
        assert model_digest(model) == before, name
    with streaming({"zero_optimization": {"stage": 2}}):
        model = adapted("odd", load_model(paths["odd"], {"zero_optimization": {"stage": 2}}))
    assert_sent(model, saved(model, f"{out}/whole", merge_adapters=True), "whole", is_short=True, merge_adapters=True)


ENDED = r"sending the weights .* failed on 1 rank\(s\).*\n.*rank {}: its loop over the weights ended after 2 of"


def leave_in_all_ways(model: Any, out: str, rank: int, works: Callable[[], None]) -> None:
    """Assert that the others raise when they come to the next step of a loop that rank 1, or 0, has left."""
    for way in ("closed", "closed by a thread", "closed after a save", "closed before a save"):
        for who in (1, 0):
            weights = iter_weights(model, bucket_bytes=1)
            next(weights), next(weights)
            if way == "closed after a save":
                save_model(model, out)  # within the loop
            if rank == who and way == "closed by a thread":  # as the garbage collector may
                thread = threading.Thread(target=weights.close)
                thread.start()
                thread.join()
            elif rank == who:
                weights.close()
            if way == "closed before a save":
                save_model(model, out)
            if rank != who:
                began_s = time.monotonic()
                with pytest.raises(RankError, match=ENDED.format(who)):
                    next(weights)
                assert time.monotonic() - began_s < 4, "the timeout of the process group is 5 s"
            works()


def misbehave(path: str, out: str) -> None:
    """Rank function: consumers that stop, raise or hang on rank 1. All ranks raise; then the next try works."""
    group = DistributedInterface(timeout=timedelta(seconds=5))
    model, is_odd = load_model(path, FP32), group.rank == 1
    wanted = dict(pair for bucket in iter_weights(model) for pair in bucket)

    def works() -> None:
        assert_equal(dict(pair for bucket in iter_weights(model) for pair in bucket), wanted, "again")

    for bucket in iter_weights(model, bucket_bytes=1):  # all stop
        assert len(bucket) == 1
        break
    time.sleep(0.1 * group.rank)
    works()
    leave_in_all_ways(model, out, group.rank, works)

    def consume(at_second: Callable[[], Any]) -> None:
        for number, _ in enumerate(iter_weights(model, bucket_bytes=1)):
            if is_odd and number == 1:
                at_second()

    with pytest.raises(ZeroDivisionError if is_odd else RankError, match="division" if is_odd else ENDED.format(1)):
        consume(lambda: 1 // 0)
    works()
    began_s = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1: has not come to this point in 5 s"):
        consume(lambda: time.sleep(8))
    assert time.monotonic() - began_s < 20
    works()
    for ours, theirs in zip(iter_weights(model, bucket_bytes=1), iter_weights(model, bucket_bytes=1), strict=True):
        assert_equal(dict(ours), dict(theirs), "two at a time")
    for wrong in ({"bucket_bytes": 0}, {"dst": 3}, {"dst": "none"}, {"names": ["lm_head"]}, {"dtype": torch.int8}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            next(iter_weights(model, **wrong))
    with pytest.raises(RankError, match="rank 1: has bucket_bytes, dst, dtype 2, all, None, where"):
        next(iter_weights(model, bucket_bytes=2 if is_odd else 1))
    model.generation_config.do_sample, model.generation_config.temperature = False, 0.5  # transformers saves it not so
    works()
    some = {"model.norm.weight", "lm_head.weight"}
    for names in (sorted(some), some.__contains__):
        found = dict(pair for bucket in iter_weights(model, names=names) for pair in bucket)
        assert_equal(found, {name: wanted[name] for name in some}, "names")
    assert_no_keys_are_left(group)


def assert_no_keys_are_left(group: DistributedInterface) -> None:
    """Assert that groups of loops leave none in the store. They go in the background."""
    store, until_s = torch.distributed.distributed_c10d._get_default_store(), time.monotonic() + 10
    while hasattr(store, "list_keys") and any("lowmem_load/side/" in key for key in store.list_keys()):  # since 2.13
        assert time.monotonic() < until_s
        time.sleep(0.1)
    with group.step("ending"):
        pass


def test_consumers_that_misbehave(paths: dict[str, str], tmp_path: Path) -> None:
    run_ranks(
        misbehave,
        paths["llama"],
        str(tmp_path / "saved"),
        world_size=3,
        timeout_s=150,
        env={"LOWMEM_LOAD_SILENCE_S": "5"},
    )


def change_between(path: str) -> None:
    """Rank function: a step or a change between two buckets is refused, a forward is none."""
    tokens = torch.arange(8).view(1, 8)

    def step(engine: Any) -> None:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()

    def refused(holder: Any, change: Any, match: str) -> None:
        weights = iter_weights(holder, bucket_bytes=1)
        next(weights)
        change()
        with pytest.raises(ConfigError, match=rf"^{match} while the weights were sent"):
            next(weights)

    for config in (FP32, BF16, stage_3(offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"})):
        model = load_model(path, config)
        engine = deepspeed.initialize(model=model, config={**FP32, **config, **ADAM})[0]
        wanted = dict(pair for bucket in iter_weights(engine) for pair in bucket)
        weights = iter_weights(engine, bucket_bytes=1)
        found = dict(next(weights))
        for bucket in weights:
            with torch.no_grad():
                engine(input_ids=tokens)
            found |= dict(bucket)
        assert_equal(found, wanted, "forward between buckets")
        refused(engine, lambda engine=engine: step(engine), r"an optimizer \(.*Adam.*\) stepped")
        refused(model, lambda engine=engine: step(engine), r"an optimizer \(.*Adam.*\) stepped")
        with torch.no_grad():
            refused(engine, lambda p=model.lm_head.weight.ds_tensor: p.add_(1), r"lm_head\.weight was changed")

    def move(tensor: Any) -> None:
        tensor.data = tensor.data + 1

    for config in (FP32, {"zero_optimization": {"stage": 0}}):
        model = load_model(path, config)
        held = getattr(model.lm_head.weight, "ds_tensor", model.lm_head.weight)
        refused(model, lambda held=held: move(held), r"lm_head\.weight was changed")
    new = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    refused(model, lambda: setattr(model.lm_head, "weight", new), r"lm_head\.weight was changed")
    for stage in (0, 2):
        config = {**BF16, "zero_optimization": {"stage": stage}, **ADAM}
        engine = deepspeed.initialize(model=load_model(path, config), config=config)[0]
        refused(engine, lambda engine=engine: step(engine), r"(an optimizer \(.*Adam.*\) stepped|.* was changed)")
    model = filled(path, next(iter(meshes(2).values())))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(input_ids=tokens, labels=tokens).loss.backward()
    refused(model, optimizer.step, r"an optimizer \(SGD\) stepped")
    with torch.no_grad():
        refused(model, lambda: next(model.parameters()).mul_(2), ".*was changed")


def measure(path: str) -> list[tuple[int, int]]:
    """Rank function: the peak of memory above the start, and the bytes of the largest bucket; to all, and to rank 0."""
    from benchmarks.memory import PeakMemory

    model, found = load_model(path, FP32), []
    for to in ("all", 0):
        for _ in iter_weights(model, bucket_bytes=1 << 20, dst=to):  # what is allocated once
            pass
        gc.collect()
        largest = 0
        with PeakMemory() as memory:
            for bucket in iter_weights(model, bucket_bytes=48 << 20, dst=to):
                largest = max(largest, sum(tensor.nbytes for _, tensor in bucket))
        found.append((memory.peak_bytes, largest))
    return found


def test_memory_is_two_buckets(checkpoints: Path) -> None:
    """The messages of one, and its tensors."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3, "vocab_size": 1024}
    path = str(builders.tiny_llama(checkpoints, torch.float32, **sizes))
    mib = 1 << 20
    (to_all, to_one), (also_to_all, to_none) = run_ranks(measure, path, world_size=2, timeout_s=200)
    for peak, largest in (to_all, also_to_all, to_one):
        assert 32 * mib < largest <= 48 * mib
        assert peak < 2 * 48 * mib + 8 * mib
    assert to_none[1] == 0 and to_none[0] < 40 * mib  # its message


def merge_sharded(path: str) -> None:
    """Rank function: adapters on DTensors, which `save_model` refuses, are merged as PEFT merges the whole model."""
    for mesh, shard in meshes(DistributedInterface().world_size).items():
        torch.manual_seed(0)
        wanted = adapted("odd", AutoModelForCausalLM.from_pretrained(path)).merge_and_unload().state_dict()
        model = adapted("odd", filled(path, shard))
        for kwargs in ({}, {"bucket_bytes": 1}):
            found = dict(pair for bucket in iter_weights(model, merge_adapters=True, **kwargs) for pair in bucket)
            assert_equal(found, dict(wanted), mesh)


def plan_once(path: str) -> None:
    """Rank function: a second push plans nothing, and no rank is asked what it holds."""
    module = importlib.import_module("lowmem_load.weights_out.iter_weights")
    described, steps, describe, step = [], list[str](), module._units_of, RankGroup.step
    module._units_of = lambda *args: (described.append(1), describe(*args))[1]
    RankGroup.step = lambda self, title, **kwargs: (steps.append(title), step(self, title, **kwargs))[1]

    def sent(model: Any, num_described: int) -> dict[str, torch.Tensor]:
        described.clear(), steps.clear()
        found = dict(pair for bucket in iter_weights(model) for pair in bucket)
        assert len(described) == num_described, described
        assert {step.partition(" (")[0] for step in steps} == {"planning the weights", "sending the weights"}
        return found

    world_size = DistributedInterface().world_size
    plain = load_model(path, {"zero_optimization": {"stage": 0}})
    wanted = sent(plain, 1)
    assert_equal(sent(plain, 0), wanted, "again")
    assert_equal(sent(copy.deepcopy(plain), 1), wanted, "a copy")
    names = ["lm_head.weight"]
    assert [name for bucket in iter_weights(plain, names=names) for name, _ in bucket] == ["lm_head.weight"]
    names[:] = ["model.norm.weight"]  # the plan that stays has names of its own
    assert [name for bucket in iter_weights(plain, names=names) for name, _ in bucket] == ["model.norm.weight"]
    sent(plain, 1)
    plain.lm_head.weight = torch.nn.Parameter(plain.lm_head.weight.detach() + 1)
    assert torch.equal(sent(plain, 1)["lm_head.weight"], wanted["lm_head.weight"] + 1)
    model = load_model(path, FP32)
    assert_equal(sent(model, 1), wanted, "ZeRO-3")
    assert_equal(sent(model, 0), wanted, "ZeRO-3")
    for mesh, shard in meshes(world_size).items():
        model = filled(path, shard)
        assert_equal(sent(model, 1), wanted, mesh)
        assert_equal(sent(model, 0), wanted, mesh)


def test_a_second_push_plans_nothing(paths: dict[str, str]) -> None:
    run_ranks(plan_once, paths["llama"], world_size=4, timeout_s=200, env={"NDEV_PER_NODE": "4"})


def send_in_all_ways(paths: dict[str, str], out: str, swap: str | None, is_whole: bool) -> None:
    """Rank function: one start of the ranks for all of it."""
    world_size = DistributedInterface().world_size
    if world_size in (3, 4):  # as on an accelerator: one collective for each bucket
        importlib.import_module("lowmem_load.distributed.side_group").has_fast_gather = lambda _: True
    send_all(paths, f"{out}/all", swap, is_whole)
    send_merged(paths, f"{out}/merged")
    if world_size % 2 == 0:
        send_meshes({name: paths[name] for name in ("llama", "tied", "mixtral")}, f"{out}/meshes", is_whole)
    if world_size == 2:
        merge_sharded(paths["llama"])
        change_between(paths["llama"])


WHOLE = [pytest.param(ranks, True, marks=pytest.mark.release) for ranks in (1, 2, 4)]
"""Each way with buckets of all sizes, and other numbers of ranks."""


@pytest.mark.parametrize(("world_size", "is_whole"), [(2, False), (3, False), *WHOLE])
def test_buckets_hold_what_the_files_hold(
    world_size: int, is_whole: bool, paths: dict[str, str], tmp_path: Path
) -> None:
    swap = str(tmp_path / "swap") if is_compiled("async_io") and world_size == 2 else None
    run_ranks(send_in_all_ways, paths, str(tmp_path), swap, is_whole, world_size=world_size, timeout_s=300)
