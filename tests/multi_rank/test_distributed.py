"""DistributedInterface on several ranks."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import deepspeed
import pytest
import torch.distributed as dist
from accelerate import PartialState
from deepspeed.accelerator import get_accelerator

from lowmem_load import load_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.errors import CheckpointError, RankError
from tests.ranks import run_ranks
from tests.steps import payloads
from tests.unit.test_process_group import init_counter, partition_numel, train_one_step


def error_in_a_forked_process() -> str:
    """Returns what load_model says in a process that is forked from this rank."""
    answer, told = os.pipe()
    if os.fork() == 0:
        text = "no error"
        try:
            load_model("nowhere", {"zero_optimization": {"stage": 3}})
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(told, text.encode())
        os._exit(0)
    os.close(told)
    assert select.select([answer], [], [], 20)[0], "the forked process hangs"
    with os.fdopen(answer) as pipe:
        return pipe.read()


def _launched(partition: int) -> tuple[int, int, int]:
    calls = init_counter()
    interface = DistributedInterface()
    interface.barrier()
    world_size = int(os.environ["WORLD_SIZE"])
    assert partition_numel() == partition
    train_one_step()
    assert payloads(interface, {"rank": interface.rank}) == [{"rank": r} for r in range(world_size)]
    refused = f"ConfigError: this process was forked from rank {interface.rank} while"
    assert error_in_a_forked_process().startswith(refused)
    assert payloads(interface, interface.rank) == list(range(world_size)), "nothing has changed here"
    assert len(calls) == 1
    return interface.rank, interface.local_rank, interface.world_size


def test_launched_group() -> None:
    partition = 22  # ceil(64 / 3)
    assert run_ranks(_launched, partition, world_size=3) == [(rank, rank, 3) for rank in range(3)]


def _adopt(maker: str) -> None:
    """Rank function: a group that another package has made is ours too; if we make it, it is accelerate's."""
    if maker == "accelerate":
        PartialState(cpu=True)
    elif maker == "deepspeed":
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    calls = init_counter()
    interface = DistributedInterface()
    train_one_step()
    assert PartialState(cpu=True).process_index == interface.rank
    assert (len(calls), interface.world_size) == (maker == "ours", 2)
    interface.destroy()
    assert dist.is_initialized() is (maker != "ours")


@pytest.mark.parametrize("maker", ["ours", "accelerate", "deepspeed"])
def test_one_group_for_all_packages(maker: str) -> None:
    run_ranks(_adopt, maker)


def _adopt_without_a_device() -> None:
    """Rank function: a driver's error of rank 1 is one of rank 0's next step, too."""

    def fail(_: int) -> None:
        raise RuntimeError("out of memory")

    dist.init_process_group("gloo")
    is_failing = dist.get_rank() == 1
    began_s = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if is_failing:
            patch.setattr(get_accelerator(), "set_device", fail)
        with pytest.raises(RuntimeError if is_failing else RankError, match="out of memory"):
            _step()  # which makes an interface first
    assert time.monotonic() - began_s < 10, "rank 0 does not wait for rank 1"


def test_a_device_that_fails_on_one_rank_is_an_error_of_all() -> None:
    run_ranks(_adopt_without_a_device)


def _adopt_two_hosts() -> tuple[int, int]:
    dist.init_process_group("gloo")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "even" if dist.get_rank() % 2 == 0 else "odd")
        local_rank = DistributedInterface().local_rank
    assert os.environ["LOCAL_RANK"] == str(local_rank)
    return local_rank, partition_numel()


def test_adopted_group_without_local_rank_derives_it_from_host_names() -> None:
    assert run_ranks(_adopt_two_hosts, world_size=3) == [(0, 22), (0, 22), (1, 22)]


def _step(error: BaseException | None = None, digest: str = "", title: str = "reading") -> None:
    with DistributedInterface().step(title) as step:
        step.digest = {"files": digest}
        if error is not None:
            raise error


def _nested(error: BaseException | None) -> None:
    with DistributedInterface().step("outer"):
        if error is not None:
            raise error
        _step()


def _steps() -> None:
    mine = DistributedInterface().rank
    _step(digest="same")

    error = CheckpointError("b.safetensors: truncated") if mine == 1 else None
    with pytest.raises(RankError, match=r"^reading failed on 1 rank\(s\)") as failed:
        _step(error, "same" if mine else "other")
    assert failed.value.failures == {1: "CheckpointError: b.safetensors: truncated"}
    assert type(failed.value.__cause__) is (CheckpointError if mine == 1 else type(None))

    alike = CheckpointError("config.json: absent")
    with pytest.raises(CheckpointError) as own:
        _step(alike)
    assert own.value is alike

    with pytest.raises(CheckpointError, match="function f at 0x"):  # addresses and devices are each rank's own
        _step(CheckpointError(f"<function f at {hex(4096 + mine)}> on cuda:{mine}"))

    with pytest.raises(RankError) as failed:
        _step(CheckpointError(f"file {mine}: absent"))
    assert failed.value.failures == {r: f"CheckpointError: file {r}: absent" for r in range(3)}

    with pytest.raises(RankError) as failed:
        _step(digest="bbb" if mine == 2 else "aaa")
    assert failed.value.failures == {2: "has files bbb, where rank(s) 0-1 have aaa"}

    with pytest.raises(RankError) as failed:
        _step(title="saving" if mine == 1 else "loading")
    assert failed.value.failures == {1: "is at 'saving', where rank(s) 0, 2 are at 'loading'"}

    with pytest.raises(RankError, match="rank 2: LookupError: between two steps"):
        _nested(LookupError("between two steps") if mine == 2 else None)

    with pytest.raises(RankError, match=r"rank 0: TypeError: Object of type bytes is not JSON serializable"):
        payloads(DistributedInterface(), b"" if mine == 0 else "")

    with pytest.raises(KeyboardInterrupt) if mine == 0 else pytest.raises(RankError, match="rank 0: KeyboardInterrupt"):
        _step(KeyboardInterrupt() if mine == 0 else None)

    if mine == 0:  # it is interrupted while it waits for the others
        threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
    else:
        time.sleep(1.5)
    with pytest.raises(KeyboardInterrupt) if mine == 0 else pytest.raises(RankError, match="rank 0: left reading: Key"):
        _step()

    with pytest.MonkeyPatch.context() as patch:
        if mine == 1:
            patch.setenv("LOWMEM_LOAD_SILENCE_S", "soon")
        with pytest.raises(RankError, match=r"rank 1: ConfigError: .*SILENCE_S"):
            _step()

    outcome: Any = pytest.raises(LookupError) if mine == 1 else nullcontext()
    with outcome, DistributedInterface().session("the load"):
        _step()
        if mine == 1:
            raise LookupError("after the last step")
    if mine != 1:  # they hear of it at their next step, though their load was over
        with pytest.raises(RankError, match="rank 1: left the load: LookupError: after the last step"):
            _step()
    assert payloads(DistributedInterface(), mine) == [0, 1, 2]  # all are in line again


def test_all_ranks_go_on_or_raise() -> None:
    run_ranks(_steps, world_size=3)


def _nested_groups() -> None:
    """Rank function: some ranks do a step of their own inside a step of all, and it fails."""
    world = DistributedInterface()
    mine = world.rank
    groups = [dist.new_group(ranks) for ranks in ([1, 2], [2])]  # all ranks make them

    def expect(kind: type[BaseException], text: str, work: Callable[[], None]) -> None:
        start_s = time.monotonic()
        with pytest.raises(kind, match=text) as caught:
            work()
        assert type(caught.value) is kind
        assert time.monotonic() - start_s < 10, "the timeout of the process group is 30 minutes"
        assert payloads(world, mine) == [0, 1, 2], "all are in line again"

    def inner_step(group: Any, error: BaseException) -> None:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            with world.subgroup(group).step("inner"):
                if mine == 2:
                    raise error

    def outer_step(group: Any, error: BaseException) -> None:
        with world.step("outer"):
            inner_step(group, error)

    expect(
        RankError,
        r"(?s)outer failed on 2 rank.*rank 1: RankError: inner failed.*ValueError: of rank 2",
        lambda: outer_step(groups[0], ValueError("of rank 2")),
    )
    expect(
        RankError,
        r"outer failed on 1 rank\(s\).*\nrank 2: ValueError: alone",
        lambda: outer_step(groups[1], ValueError("alone")),
    )
    interrupted = KeyboardInterrupt if mine == 2 else RankError
    expect(interrupted, "KeyboardInterrupt" * (mine != 2), lambda: outer_step(groups[0], KeyboardInterrupt()))

    def session() -> None:
        with world.session("the load"):
            inner_step(groups[0], ValueError("in a session"))
            with world.step("after"):
                pass

    expect(RankError, "in a session", session)


def test_a_step_of_some_ranks_that_fails_inside_a_step_of_all_fails_on_all() -> None:
    run_ranks(_nested_groups, world_size=3)


def _groups_after_failures(failing: list[int | None]) -> list[str]:
    """Rank function: makes a group in each attempt, in which one rank fails before it does a step."""
    port, is_first = int(os.environ["MASTER_PORT"]), os.environ["RANK"] == "0"
    base = dist.TCPStore("127.0.0.1", port, is_master=is_first, timeout=timedelta(seconds=3))
    rank, found = int(os.environ["RANK"]), list[str]()
    for attempt, who in enumerate(failing):
        store = dist.PrefixStore(f"attempt {attempt}", base)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=3))
        text = "ok"
        try:
            if who == rank:
                raise OSError("my own code failed")
            _step()
        except (OSError, RankError) as error:
            text = str(error)
        found.append(text)
        base.set(f"{attempt} {rank}", "")
        base.wait([f"{attempt} {each}" for each in range(3)], timedelta(seconds=60))
        dist.destroy_process_group()
    return found


def _meets_again(failing: list[int | None]) -> list[str]:
    """Rank function: the same with groups of `DistributedInterface`, in which one rank fails before it makes one."""
    found = list[str]()
    for who in failing:
        text = "ok"
        try:
            if who == int(os.environ["RANK"]):
                time.sleep(5)  # longer than the others wait
                raise OSError("my own code failed")
            interface = DistributedInterface(timeout=timedelta(seconds=3))
            assert payloads(interface, interface.rank) == [0, 1]
            interface.destroy()
        except (OSError, RankError) as error:
            text = str(error)
        found.append(text)
    return found


@pytest.mark.parametrize(
    ("work", "failing", "world_size"),
    [(_groups_after_failures, [1, 0, None, 2, None], 3), (_meets_again, [None, 1, None, 0, None], 2)],
)
def test_a_group_works_whatever_groups_each_rank_has_made_before(
    work: Callable[[list[int | None]], list[str]], failing: list[int | None], world_size: int
) -> None:
    for rank, texts in enumerate(run_ranks(work, failing, world_size=world_size)):
        for who, text in zip(failing, texts, strict=True):
            expected = "ok" if who is None else "my own code failed" if who == rank else f"rank {who}: has not come to"
            assert expected in text, (rank, who, text)


PROCESS = """
import os, signal, sys, torch.distributed as dist
from datetime import timedelta
from lowmem_load.distributed.steps import RankGroup
base, name = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False), sys.argv[2]
base.set(f"here for {name}", "")
dist.init_process_group(
    "gloo", store=dist.PrefixStore(name, base), rank=1, world_size=2, timeout=timedelta(seconds=8)
)
if name == "first":
    sys.exit()
if name == "third":
    with RankGroup(None).step("reading"):
        os.kill(os.getpid(), signal.SIGKILL)
try:
    with RankGroup(None).step("reading"):
        raise OSError("of the fresh process")
except Exception as error:
    print(error)
with RankGroup(None).step("telling") as step:
    step.payload = "fresh"
print(step.payloads)
"""


def _survive() -> None:
    """Rank function: this process stays; the other rank is a process that ends before its first load, then another."""
    base = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=8))  # for which ranks wait

    @contextmanager
    def group(name: str) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-c", PROCESS, str(base.port), name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as other:
            base.wait([f"here for {name}"], timedelta(seconds=100))
            store = dist.PrefixStore(name, base)
            dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timedelta(seconds=8))
            yield other
        dist.destroy_process_group()

    with group("first"), pytest.raises(RankError, match="rank 1: has not come to this point in 8 s"):
        _step()
    with group("second") as fresh:
        with pytest.raises(RankError, match="rank 1: OSError: of the fresh process"):
            _step()
        assert payloads(RankGroup(None), "survivor") == ["survivor", "fresh"]
        said = fresh.communicate()[0]
        assert "rank 1: OSError: of the fresh process" in said and "['survivor', 'fresh']" in said
    with group("third"), pytest.raises(RankError, match="rank 1: has sent no heartbeat for more than 8 s"):
        _step()


def test_a_survivor_meets_a_fresh_process_in_another_group() -> None:
    """As under Ray."""
    run_ranks(_survive, world_size=1, timeout_s=250, env={"LOWMEM_LOAD_GONE_S": "8"})
