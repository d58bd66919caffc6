"""DistributedInterface in one process. Groups are made in fresh ones: torch, DeepSpeed and os.environ keep state."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowmem_load import load_into
from lowmem_load.distributed import environment, process_group
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.distributed.side_group import SideGroup
from lowmem_load.distributed.steps import Alone
from lowmem_load.errors import CheckpointError, ConfigError, RankError
from tests.ranks import run_ranks
from tests.steps import payloads

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def test_without_a_group_the_error_says_how_to_make_one() -> None:
    with pytest.raises(ConfigError, match=r"^there is no process group: .*init_process_group .* on every rank before"):
        load_into(torch.nn.Linear(1, 1), "model")


def launcher_env() -> dict[str, str]:
    return {name: os.environ[name] for name in LAUNCHER if name in os.environ}


def init_counter() -> list[int]:
    """A list that grows by one for each call of torch's init_process_group from now on."""
    import torch.distributed as dist

    calls: list[int] = []
    original = dist.init_process_group

    def counted(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        original(*args, **kwargs)

    dist.init_process_group = counted
    return calls


def partition_numel() -> int:
    """Elements that zero.Init leaves of an 8 x 8 weight on this rank."""
    import deepspeed
    import torch

    with deepspeed.zero.Init(dtype=torch.float32):
        layer = torch.nn.Linear(8, 8, bias=False)
    return int(layer.weight.ds_tensor.numel())


def train_one_step() -> None:
    """Goes through what deepspeed.initialize checks, and through its own groups."""
    import deepspeed
    import torch

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Linear(8, 8)
    engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)).sum())
    engine.step()


def error_text(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


# -- what happens in a fresh process that no launcher started ----------------------------------------------------------


def lone_process_needs_no_launcher_and_initializes_once() -> None:
    calls = init_counter()
    interface = DistributedInterface()
    again = DistributedInterface(backend="gloo", timeout=timedelta(minutes=30))
    place = (interface.rank, again.world_size, interface.local_rank, str(interface.device), interface.backend)
    assert place == (0, 1, 0, "cpu", "gloo")
    numbers = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert launcher_env() == {**numbers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert payloads(interface, "a") == ["a"]
    assert partition_numel() == 64
    interface.barrier()
    train_one_step()
    assert len(calls) == 1, "zero.Init or deepspeed.initialize made a group"


def destroy_leaves_nothing_and_the_next_group_trains() -> None:
    import deepspeed
    import torch.distributed as dist

    for _ in range(2):
        interface = DistributedInterface()
        train_one_step()
        interface.destroy()
        interface.destroy()
        assert (dist.is_initialized(), deepspeed.comm.is_initialized(), launcher_env()) == (False, False, {})
    assert "was destroyed" in error_text(lambda: interface.rank)


def contradicting_arguments_are_all_named_with_both_values() -> None:
    DistributedInterface(timeout=timedelta(minutes=7))
    text = error_text(lambda: DistributedInterface(backend="nccl", timeout=timedelta(minutes=9)))
    assert "backend: asked for nccl, live group has gloo; timeout: asked for 0:09:00, live group has 0:07:00" in text


def a_group_of_torch_is_adopted_and_destroyed_only_by_force() -> None:
    import deepspeed
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(minutes=3))
    calls = init_counter()
    interface = DistributedInterface(timeout=timedelta(minutes=3), backend="gloo")
    train_one_step()
    assert launcher_env() == {"LOCAL_RANK": "0"}
    assert "live group has 0:03:00" in error_text(lambda: DistributedInterface(timeout=timedelta(minutes=4)))
    assert deepspeed.comm.is_initialized()
    interface.destroy()
    assert dist.is_initialized()
    interface.destroy(force=True)
    assert (dist.is_initialized(), launcher_env(), len(calls)) == (False, {}, 0)


def fake_backend_is_one_rank_of_many() -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=517, world_size=1024)
    interface = DistributedInterface(timeout=timedelta(minutes=1))
    with pytest.raises(CheckpointError, match="gone"), interface.step("planning"):
        raise CheckpointError("model.safetensors: gone")
    interface.barrier()
    place = (interface.rank, interface.world_size, interface.local_rank, interface.backend)
    assert place == (517, 1024, 0, "fake")
    assert payloads(interface, "x") == ["x"] * 1024
    assert partition_numel() == 1  # ceil(64 / 1024)
    assert list(launcher_env()) == ["LOCAL_RANK"]


def without_launcher(act: Callable[[], None]) -> None:
    for name in LAUNCHER:
        os.environ.pop(name, None)
    act()


@pytest.mark.parametrize(
    "act",
    [
        lone_process_needs_no_launcher_and_initializes_once,
        destroy_leaves_nothing_and_the_next_group_trains,
        contradicting_arguments_are_all_named_with_both_values,
        a_group_of_torch_is_adopted_and_destroyed_only_by_force,
        fake_backend_is_one_rank_of_many,
    ],
)
def test_in_a_fresh_process(act: Callable[[], None]) -> None:
    run_ranks(without_launcher, act, world_size=1)


# -- what the environment and the arguments say ------------------------------------------------------------------------


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*LAUNCHER, *environment.FOREIGN_SIZES):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_partial_launcher_environment_names_what_is_missing(no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setenv("RANK", "1")
    no_launcher.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ConfigError, match="WORLD_SIZE, LOCAL_RANK, MASTER_PORT missing, while MASTER_ADDR, RANK ask"):
        DistributedInterface()
    assert "WORLD_SIZE" not in os.environ


@pytest.mark.parametrize(
    ("name", "world_size", "bound"),
    [("cuda", 2, torch.device("cuda", 3)), ("cuda", 1, None), ("xpu", 2, None)],  # one has nobody to talk to
)
def test_nccl_is_told_its_device(
    monkeypatch: pytest.MonkeyPatch, name: str, world_size: int, bound: torch.device | None
) -> None:
    monkeypatch.setattr(process_group, "accelerator", lambda: SimpleNamespace(device_name=lambda: name))
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert process_group._device_to_bind(world_size) == bound


def test_a_rank_without_its_device_is_named_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Accelerator:
        def device_name(self) -> str:
            return "cuda"

        def device_count(self) -> int:
            return 0 if threading.current_thread().name.endswith("_1") else 1

        def visible_devices_envs(self) -> list[str]:
            return ["CUDA_VISIBLE_DEVICES"]

        def set_device(self, number: int) -> None:
            assert number == 0

    monkeypatch.setattr(process_group, "accelerator", Accelerator)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    store = torch.distributed.HashStore()
    together = threading.Barrier(2)

    def choose(_: int) -> dict[int, str]:
        together.wait()
        rank = int(threading.current_thread().name[-1])
        with pytest.raises(RankError, match="making the process group failed") as failed:
            process_group._agree_on_nonce(store, rank, 2, timedelta(seconds=20))
        return failed.value.failures

    with ThreadPoolExecutor(2, thread_name_prefix="rank") as pool:
        first, second = pool.map(choose, range(2))
    assert first == second
    assert list(first) == [1]
    assert "this process sees 0 cuda device(s), CUDA_VISIBLE_DEVICES=7" in first[1]


def test_rank_of_a_foreign_launcher_is_not_taken_for_a_lone_process(no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_SIZE is 4"):
        DistributedInterface()
    no_launcher.delenv("OMPI_COMM_WORLD_SIZE")
    assert environment.alone()["WORLD_SIZE"] == "1"


def test_a_loop_that_is_closed_while_python_ends_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")  # since Python 3.12

    side = SideGroup(Alone())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    side.close_later()
    side.close()


# -- variables of the environment that say which rank this is ----------------------------------------------------------


def test_launcher_variable_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "one")
    with pytest.raises(ConfigError, match="LOCAL_RANK: the environment has 'one', expected an integer"):
        environment.integer("LOCAL_RANK")


def test_default_timeout_is_thirty_minutes_or_what_deepspeed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPSPEED_TIMEOUT", raising=False)
    assert environment.default_timeout() == timedelta(minutes=30)
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "120")
    assert environment.default_timeout() == timedelta(minutes=120)


def test_what_was_set_here_is_removed_unless_somebody_has_changed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THERE", "1")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("CHANGED", "")
    added = environment.set_missing({"THERE": "2", "EMPTY": "3", "CHANGED": "4"})
    assert (os.environ["THERE"], added) == ("1", {"EMPTY": "3", "CHANGED": "4"})
    os.environ["CHANGED"] = "5"
    environment.unset(added)
    assert ("EMPTY" in os.environ, os.environ["CHANGED"]) == (False, "5")


@pytest.mark.parametrize(
    ("allowed", "local_ranks", "cores"),
    [
        (64, 8, 8),  # no mask
        (8, 8, 8),  # bound by the launcher, each to its own
        (16, 8, 2),  # a container's, for all of its ranks
        (4, 8, 4),
        (2, 64, 1),
        (64, 1, 64),
    ],
)
def test_cores_of_a_rank(monkeypatch: pytest.MonkeyPatch, allowed: int, local_ranks: int, cores: int) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)))
    assert environment.cores(local_ranks) == cores
