"""Device memory is filled with the right bytes, in the right order, by asynchronous copies."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lowmem_load.files import uploads
from lowmem_load.files.executor import Executor
from lowmem_load.planning import expression as ex
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.reads import ReadLimits
from lowmem_load.planning.regions import FlatRange
from tests.ranks import SIMULATED, run_ranks

SHAPE = (600, 1000)
NUMEL = 600_000
SLOT = 64 << 10
"""Bytes of a slot here: the values are 37 slots of float32, and there are 4 slots."""

SLOW_GBPS = 0.004
"""A slot takes 16 ms: longer than it is read, also on a machine that is busy."""


def values() -> torch.Tensor:
    return torch.arange(NUMEL, dtype=torch.float32).reshape(SHAPE)


@contextlib.contextmanager
def small_slots() -> Iterator[Executor]:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(uploads, "SLOT_BYTES", SLOT)
        with Executor() as executor:
            yield executor


def fill(executor: Executor, node: ex.Expression, destination: torch.Tensor) -> None:
    planner = Planner(ReadLimits(staging_bytes=SLOT))
    planned = planner.plan_fill("w", node, FlatRange(0, destination.numel()), on_host=False)
    executor.fill(planned, destination, planner.values, planner.constants)


def leaf(path: str) -> ex.Source:
    return ex.Source(path, "w", 0, SHAPE, torch.float32)


def nodes(path: str) -> dict[str, tuple[ex.Expression, torch.Tensor]]:
    """An expression of each kind, and its value."""
    source, whole = leaf(path), values()

    def double(inputs: Any) -> torch.Tensor:
        return inputs[0] * 2

    return {
        "as it lies": (source, whole),
        "cast": (ex.cast(source, torch.bfloat16), whole.to(torch.bfloat16)),
        "cast twice": (ex.cast(ex.cast(source, torch.bfloat16), torch.float64), whole.to(torch.bfloat16).double()),
        "transposed": (ex.permute(source, (1, 0)), whole.t()),
        "every other": (ex.slice_dim(ex.slice_dim(source, 0, 0, 2, 300), 1, 1, 3, 333), whole[::2, 1::3]),
        "held": (ex.cast(ex.hold(whole.t()), torch.float16), whole.t().half()),
        "held, transposed": (ex.permute(ex.hold(whole), (1, 0)), whole.t()),
        "computed": (ex.Computed("double", double, (source,), SHAPE, torch.float32), whole * 2),
        "elementwise": (ex.Elementwise("double", double, (source,), SHAPE, torch.float32), whole * 2),
    }


def compare_all(path: str) -> None:
    from tests.device.simulated import counters, reset

    device = torch.device("sim", 1)
    wanted = nodes(path)
    filled = {name: torch.empty(value.numel(), dtype=value.dtype, device=device) for name, (_, value) in wanted.items()}
    before = torch.accelerator.memory_allocated(device)
    reset()
    with small_slots() as executor:
        for name, (node, _) in wanted.items():
            fill(executor, node, filled[name])
        buffer = torch.empty(NUMEL, dtype=torch.bfloat16, device=device)
        executor.move(values(), buffer)
        strided = torch.empty(NUMEL // 2, dtype=torch.float32, device=device)
        executor.move(values().view(-1)[::2], strided)
        executor.finish()
        counted = counters()
    assert [name for name in counted if "pageable" in name or "blocking" in name or "temporary" in name] == []
    assert counted["stream synchronised"] == (1, 0) and "device synchronised" not in counted
    for name, (_, value) in wanted.items():
        assert torch.equal(filled[name].cpu(), value.reshape(-1)), name
    assert torch.equal(strided.cpu(), values().view(-1)[::2])
    assert torch.equal(buffer.cpu(), values().to(torch.bfloat16).reshape(-1))
    staging = torch.accelerator.max_memory_allocated(device) - before - buffer.nbytes - strided.nbytes
    assert 0 < staging <= 4 * uploads.NUM_STREAMS * SLOT  # four times where it is cast twice, to a dtype twice as wide
    assert torch.accelerator.max_memory_allocated("sim:0") == 0

    torch.accelerator.reset_peak_memory_stats(device)
    held = torch.accelerator.memory_allocated(device)
    with small_slots() as executor:  # what has the right dtype needs none of the device's memory on its way
        for _ in range(3):
            executor.move(strided.cpu(), strided)
            fill(executor, leaf(path), filled["as it lies"])
    assert torch.accelerator.max_memory_allocated(device) == held


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("device") / "data"
    path.write_bytes(values().numpy().tobytes())
    return str(path)


def test_whatever_a_plan_says_arrives_through_pinned_slots_with_one_synchronisation(file: str) -> None:
    run_ranks(compare_all, file, world_size=1, env=SIMULATED)


def compute_on_the_device(path: str) -> bool:
    """A computed value comes back by copies that are queued on the caller's stream, and take their time."""
    from tests.device.simulated import set_speed

    device = torch.device("sim", 0)
    kept = []

    def compute(inputs: Any) -> torch.Tensor:
        result = torch.zeros(NUMEL, dtype=torch.float32, device=device)
        kept.append((torch.zeros(NUMEL).pin_memory(), inputs[0].reshape(-1).pin_memory()))
        for values_ in (*[kept[0][0]] * 3, kept[0][1]):
            result.copy_(values_, non_blocking=True)
        return result

    node = ex.Computed("compute", compute, (leaf(path),), (NUMEL,), torch.float32)
    destination = torch.empty(NUMEL, dtype=torch.float32, device=device)
    torch.accelerator.synchronize(device)
    set_speed(0.02)
    with Executor() as executor:
        fill(executor, node, destination)
        executor.finish()
    set_speed()
    return torch.equal(destination.cpu(), values().reshape(-1))


def test_what_is_computed_on_a_device_is_waited_for(file: str) -> None:
    assert run_ranks(compute_on_the_device, file, world_size=1, env=SIMULATED) == [True]


# -- order -----------------------------------------------------------------------------------------------------------


def slow_copies(path: str) -> bool:
    """Copies take longer than reads, so slots are waited for."""
    from tests.device.simulated import set_speed

    destination = torch.empty(NUMEL, dtype=torch.float32, device="sim:1")
    set_speed(SLOW_GBPS)
    with small_slots() as executor:
        fill(executor, leaf(path), destination)
        executor.finish()
    set_speed()
    return torch.equal(destination.cpu(), values().reshape(-1))


def reused_memory(path: str) -> bool:
    """The memory was freed by work of the caller's stream that is still to come."""
    from tests.device.simulated import set_speed

    device = torch.device("sim", 1)
    garbage = torch.zeros(NUMEL, dtype=torch.float32, pin_memory=True)
    here, there = torch.empty(1 << 22, dtype=torch.uint8, pin_memory=True), torch.zeros(1 << 22, device=device)
    other, side = torch.Stream(device=device), torch.Stream(device=device)
    torch.accelerator.synchronize(device)
    set_speed(SLOW_GBPS)
    with other:
        here.copy_(there.view(torch.uint8)[: 1 << 22], non_blocking=True)
        slow = torch.Event(device=device)
        slow.record(other)
    set_speed()
    with side:
        side.wait_event(slow)
        freed = torch.empty(NUMEL, dtype=torch.float32, device=device)
        freed.copy_(garbage, non_blocking=True)
        address = freed.data_ptr()
        del freed
        destination = torch.empty(NUMEL, dtype=torch.float32, device=device)
        assert destination.data_ptr() == address
        with small_slots() as executor:
            fill(executor, leaf(path), destination)
            executor.finish()
    torch.accelerator.synchronize(device)
    return torch.equal(destination.cpu(), values().reshape(-1))


def dropped_memory(path: str) -> bool:
    """The memory is freed while it is filled, and somebody else gets it."""
    from tests.device.simulated import set_speed

    numel = 4 * SLOT // 4  # as much as there are slots: no read waits for a copy
    destination = torch.empty(numel, dtype=torch.float32, device="sim:1")
    with small_slots() as executor:
        set_speed(SLOW_GBPS / 20)
        fill(executor, leaf(path), destination)
        executor.tasks.finish()
        executor.tasks.close()  # its threads may still refer to what they have done, and so to the memory
        set_speed()
        del destination
        other = torch.empty(numel, dtype=torch.float32, device="sim:1")
        other.fill_(7)
        executor.finish()
    torch.accelerator.synchronize("sim:1")
    return other.cpu().unique().tolist() == [7]


def keep_the_order(path: str) -> None:
    for case in (slow_copies, reused_memory, dropped_memory):
        assert case(path), case


def test_copies_are_in_order_however_slow_they_are(file: str) -> None:
    run_ranks(keep_the_order, file, world_size=1, env=SIMULATED)
