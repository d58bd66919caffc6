"""DistributedInterface on several ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest

from lowmem_load.errors import CheckpointError, ConfigError, RankError
from lowmem_load.ranks.process_group import DistributedInterface
from tests.ranks import run_ranks
from tests.unit.test_distributed import init_counter, partition_numel, train_one_step


def outcome(interface: DistributedInterface, error: BaseException | None, digest: str | None = None) -> dict[str, Any]:
    """What `agree` raised on this rank, and how many collectives it took."""
    import torch.distributed as dist

    calls = []
    original = dist.all_gather_object

    def counted(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        original(*args, **kwargs)

    dist.all_gather_object = counted
    raised: BaseException | None = None
    try:
        interface.agree("reading", error, digest)
    except BaseException as caught:
        raised = caught
    dist.all_gather_object = original
    return {
        "type": type(raised).__name__,
        "text": str(raised),
        "failures": getattr(raised, "failures", None),
        "own": raised is error,
        "cause": type(raised.__cause__).__name__ if raised else None,
        "collectives": len(calls),
    }


def _launched() -> dict[str, Any]:
    calls = init_counter()
    interface = DistributedInterface()
    interface.barrier()
    DistributedInterface(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    partition = partition_numel()
    train_one_step()
    return {
        "place": (interface.rank, interface.local_rank, interface.world_size),
        "gathered": interface.all_gather_object({"rank": interface.rank}),
        "broadcast": interface.broadcast_object(f"of {interface.rank}", src=1),
        "partition": partition,
        "inits": len(calls),
    }


@pytest.mark.parametrize(("world_size", "partition"), [(2, 32), (3, 22)])  # ceil(64 / world_size)
def test_launched_group(world_size: int, partition: int) -> None:
    for rank, found in enumerate(run_ranks(_launched, world_size=world_size)):
        assert found["place"] == (rank, rank, world_size)
        assert found["gathered"] == [{"rank": r} for r in range(world_size)]
        assert found["broadcast"] == "of 1"
        assert found["partition"] == partition
        assert found["inits"] == 1


def _destroy_and_init_again() -> list[Any]:
    seen: list[Any] = []
    for _ in range(2):
        interface = DistributedInterface()
        train_one_step()
        seen.append(interface.all_gather_object(interface.rank))
        interface.destroy()
    return [*seen, sorted(name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ)]


def test_destroy_then_init_again_keeps_the_launcher_environment() -> None:
    for found in run_ranks(_destroy_and_init_again):
        assert found == [[0, 1], [0, 1], ["LOCAL_RANK", "RANK", "WORLD_SIZE"]]


def _adopt_torch_by_hand() -> tuple[int, str, int]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    interface = DistributedInterface()
    return interface.local_rank, os.environ["LOCAL_RANK"], partition_numel()


def test_adopted_group_without_local_rank_derives_it_from_host_names() -> None:
    assert run_ranks(_adopt_torch_by_hand, world_size=3) == [(0, "0", 22), (1, "1", 22), (2, "2", 22)]


def _adopt_two_hosts() -> int:
    import socket

    import torch.distributed as dist

    dist.init_process_group("gloo")
    del os.environ["LOCAL_RANK"]
    original = socket.gethostname
    socket.gethostname = lambda: "even" if dist.get_rank() % 2 == 0 else "odd"
    try:
        return DistributedInterface().local_rank
    finally:
        socket.gethostname = original


def test_local_ranks_count_within_each_host() -> None:
    assert run_ranks(_adopt_two_hosts, world_size=3) == [0, 0, 1]


def _adopt_accelerate() -> tuple[int, int, bool]:
    import torch.distributed as dist
    from accelerate import PartialState

    state = PartialState(cpu=True)
    calls = init_counter()
    interface = DistributedInterface()
    train_one_step()
    interface.destroy()
    return len(calls), interface.rank - state.process_index, dist.is_initialized()


def test_adopts_a_group_of_accelerate() -> None:
    assert run_ranks(_adopt_accelerate) == [(0, 0, True)] * 2


def _accelerate_after_us() -> tuple[int, int]:
    from accelerate import PartialState

    calls = init_counter()
    interface = DistributedInterface()
    state = PartialState(cpu=True)
    return len(calls), interface.rank - state.process_index


def test_accelerate_takes_our_group() -> None:
    assert run_ranks(_accelerate_after_us) == [(1, 0)] * 2


def _adopt_deepspeed() -> tuple[int, int]:
    import deepspeed

    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    calls = init_counter()
    interface = DistributedInterface()
    train_one_step()
    return len(calls), interface.world_size


def test_adopts_a_group_of_deepspeed() -> None:
    assert run_ranks(_adopt_deepspeed) == [(0, 2)] * 2


def _contradiction() -> str:
    DistributedInterface()
    with pytest.raises(ConfigError) as caught:
        DistributedInterface(rank=5, world_size=2)
    return str(caught.value)


def test_contradicting_rank_is_named_on_each_rank() -> None:
    for rank, text in enumerate(run_ranks(_contradiction)):
        assert f"rank: asked for 5, live group has {rank}." in text
        assert "world_size: asked" not in text


def _agreements() -> dict[str, Any]:
    interface = DistributedInterface()
    mine = interface.rank
    one = CheckpointError("b.safetensors: truncated") if mine == 1 else None
    return {
        "fine": outcome(interface, None, "same"),
        "one fails": outcome(interface, one, "same" if mine else "other"),
        "alike": outcome(interface, CheckpointError("config.json: absent")),
        "each its own": outcome(interface, CheckpointError(f"file {mine}: absent")),
        "digests": outcome(interface, None, "bbb" if mine == 2 else "aaa"),
        "still in step": interface.all_gather_object(mine),
    }


def test_agree() -> None:
    for rank, found in enumerate(run_ranks(_agreements, world_size=3)):
        assert found["fine"]["type"] == "NoneType"

        failed = found["one fails"]
        assert failed["type"] == "RankError"
        assert failed["failures"] == {1: "CheckpointError: b.safetensors: truncated"}
        assert failed["text"].startswith("reading failed on 1 rank(s)")
        assert failed["cause"] == ("CheckpointError" if rank == 1 else "NoneType")

        assert found["alike"]["own"]
        assert found["alike"]["type"] == "CheckpointError"

        assert found["each its own"]["type"] == "RankError"
        assert found["each its own"]["failures"] == {r: f"CheckpointError: file {r}: absent" for r in range(3)}

        assert found["digests"]["failures"] == {2: "holds digest bbb, where rank(s) 0-1 hold aaa"}
        assert found["digests"]["type"] == "RankError"

        assert found["still in step"] == [0, 1, 2]
        steps = [step for step in found.values() if isinstance(step, dict)]
        assert [step["collectives"] for step in steps] == [1] * 5


def _interrupted() -> str:
    interface = DistributedInterface()
    with pytest.raises(RankError) as caught:
        interface.agree("reading", KeyboardInterrupt() if interface.rank == 0 else None)
    return str(caught.value)


def test_agree_carries_interrupts_to_the_other_rank() -> None:
    for text in run_ranks(_interrupted):
        assert "rank 0: KeyboardInterrupt" in text
