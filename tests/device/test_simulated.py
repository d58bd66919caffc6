"""The simulated device is what it claims to be: without this, what passes on it would prove nothing."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

import pytest
import torch

from tests.ranks import SIMULATED, RankFailure, run_ranks

MIB = 1 << 20
SLOW_GBPS = 0.005
"""A copy of 1 MiB takes 0.2 s: long beside what the host does meanwhile."""


def _computes_as_the_host() -> None:
    host = torch.arange(12, dtype=torch.float32).view(3, 4)
    there = host.to("sim:1")
    assert there.device == torch.device("sim", 1) and torch.sim.current_device() == 0
    assert torch.equal((there @ there.T + 1).cpu(), host @ host.T + 1)
    assert torch.equal(there.t().contiguous().cpu(), host.t())
    assert torch.equal(there[1:, ::2].to(torch.bfloat16).cpu(), host[1:, ::2].to(torch.bfloat16))
    with pytest.raises(RuntimeError, match="on the same device"):
        there + host
    with pytest.raises(RuntimeError, match="invalid device ordinal 2 of 2"):
        torch.empty(1, device="sim:2")


def _is_out_of_the_host_s_reach() -> None:
    there = torch.ones(4, device="sim")
    with pytest.raises(TypeError):
        there.numpy()
    with open(__file__, "rb") as file:
        pread = ctypes.CDLL(None, use_errno=True).pread
        assert pread(file.fileno(), ctypes.c_void_p(there.data_ptr()), 16, 0) == -1
        assert os.strerror(ctypes.get_errno()) == "Bad address"


def _copies_later_from_pinned_memory_alone() -> None:
    from tests.device.simulated import counters, reset, set_speed, timeline

    pinned, pageable = torch.ones(MIB, dtype=torch.uint8, pin_memory=True), torch.ones(MIB, dtype=torch.uint8)
    assert pinned.is_pinned() and pinned[5:].is_pinned() and not pageable.is_pinned()
    there, stream = torch.zeros(MIB, dtype=torch.uint8, device="sim"), torch.Stream(device="sim")
    torch.accelerator.synchronize()
    reset()
    set_speed(SLOW_GBPS, SLOW_GBPS)
    start = time.perf_counter()
    with stream:
        there.copy_(pinned, non_blocking=True)
        event = torch.Event(device="sim")
        event.record(stream)
    assert not event.query() and time.perf_counter() - start < 0.1
    event.synchronize()
    assert time.perf_counter() - start > 0.2
    there.copy_(pageable, non_blocking=True)
    assert time.perf_counter() - start > 0.4
    set_speed()
    kinds = ["to device, pinned", "to device, pageable"]
    assert [(copy.kind, copy.bytes) for copy in timeline()] == [(kind, MIB) for kind in kinds]
    assert {kind: counters()[kind] for kind in kinds} == dict.fromkeys(kinds, (1, MIB))
    assert timeline()[0].stream != timeline()[1].stream == 0
    assert counters()["event synchronised"] == (1, 0)


def _orders_work_by_stream_and_event() -> None:
    from tests.device.simulated import set_speed

    ones, there = torch.ones(MIB, dtype=torch.uint8, pin_memory=True), torch.zeros(MIB, dtype=torch.uint8, device="sim")
    torch.accelerator.synchronize()
    first, second = torch.Stream(device="sim"), torch.Stream(device="sim")
    for waits in (False, True):
        set_speed(SLOW_GBPS)
        with first:
            there.copy_(ones, non_blocking=True)
            event = torch.Event(device="sim")
            event.record(first)
        with second:
            if waits:
                second.wait_event(event)
            there.fill_(2)
        torch.accelerator.synchronize()
        set_speed()
        assert there.cpu().unique().tolist() == [2 if waits else 1]


def _hands_freed_memory_to_its_stream_at_once() -> None:
    from tests.device.simulated import set_speed

    ones, side = torch.ones(MIB, dtype=torch.uint8, pin_memory=True), torch.Stream(device="sim")
    for records in (False, True):
        block = torch.empty(MIB, dtype=torch.uint8, device="sim")
        address = block.data_ptr()
        set_speed(SLOW_GBPS)
        with side:
            block.copy_(ones, non_blocking=True)
        if records:
            block.record_stream(side)
        del block
        fresh = torch.empty(MIB, dtype=torch.uint8, device="sim")
        fresh.zero_()
        assert (fresh.data_ptr() == address) is not records
        torch.accelerator.synchronize()
        set_speed()
        assert fresh.cpu().unique().tolist() == [0 if records else 1]
        del fresh


def _has_one_engine_for_each_direction() -> None:
    from tests.device.simulated import reset, set_speed, timeline

    here = [torch.ones(MIB, dtype=torch.uint8, pin_memory=True) for _ in range(3)]
    there = [torch.ones(MIB, dtype=torch.uint8, device="sim") for _ in range(3)]
    torch.accelerator.synchronize()
    reset()
    set_speed(SLOW_GBPS)
    for number in range(3):
        with torch.Stream(device="sim"):
            if number < 2:
                there[number].copy_(here[number], non_blocking=True)
            else:
                here[number].copy_(there[number], non_blocking=True)
    torch.accelerator.synchronize()
    set_speed()
    to_device = sorted(copy[2:4] for copy in timeline() if copy.kind.startswith("to device"))
    (to_host,) = [copy[2:4] for copy in timeline() if copy.kind.startswith("to host")]
    assert to_device[0][1] <= to_device[1][0]  # one after the other
    assert to_host[0] < to_device[0][1] and to_device[0][0] < to_host[1]  # meanwhile


def _counts_memory_and_runs_out_of_it() -> None:
    from tests.device.simulated import set_capacity

    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    torch.empty(MIB, dtype=torch.uint8, device="sim")
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() == before + MIB
    set_capacity(4 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 8388608 bytes"):
        torch.empty(8 * MIB, dtype=torch.uint8, device="sim")
    held = [torch.empty(MIB, dtype=torch.uint8, device="sim") for _ in range(3)]
    del held  # three free blocks of 1 MiB, which have to go
    torch.empty(3 * MIB, dtype=torch.uint8, device="sim")
    set_capacity(1 << 40)


def _starts_each_thread_on_the_first_device() -> None:
    torch.sim.set_device(1)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.accelerator.current_device_index()))
    thread.start()
    thread.join()
    assert (torch.accelerator.current_device_index(), found) == (1, [0])
    torch.sim.set_device(0)


def _pins_blocks_of_a_power_of_two() -> None:
    from tests.device.simulated import counters, reset

    reset()
    torch.empty(5 * MIB, dtype=torch.uint8, pin_memory=True)
    torch.empty(5 * MIB, dtype=torch.uint8, pin_memory=True)  # the same block again
    assert counters()["pinned memory made"] == (1, 8 * MIB)
    assert counters()["pinned memory asked for"] == (2, 10 * MIB)


CHECKS: list[Callable[[], None]] = [
    _computes_as_the_host,
    _is_out_of_the_host_s_reach,
    _copies_later_from_pinned_memory_alone,
    _orders_work_by_stream_and_event,
    _hands_freed_memory_to_its_stream_at_once,
    _has_one_engine_for_each_direction,
    _counts_memory_and_runs_out_of_it,
    _starts_each_thread_on_the_first_device,
    _pins_blocks_of_a_power_of_two,
]


def check_all() -> None:
    """Rank function: one process for all."""
    for check in CHECKS:
        check()


def test_the_device_is_what_it_claims_to_be() -> None:
    run_ranks(check_all, world_size=1, env={**SIMULATED, "SIM_DEVICES": "2"})


def touch_device_memory() -> None:
    """Rank function."""
    ctypes.string_at(torch.ones(4, device="sim").data_ptr(), 4)


def test_the_host_cannot_touch_its_memory() -> None:
    with pytest.raises(RankFailure, match="died with exit code -11"):
        run_ranks(touch_device_memory, world_size=1, env=SIMULATED)


def see_some_devices() -> tuple[str, int]:
    """Rank function."""
    torch.empty(1, device=f"sim:{torch.accelerator.device_count() - 1}")
    return str(torch.accelerator.current_accelerator()), torch.accelerator.device_count()


def test_some_devices_can_be_hidden() -> None:
    env = {**SIMULATED, "SIM_DEVICES": "8", "SIM_VISIBLE_DEVICES": "2,5,6"}
    assert run_ranks(see_some_devices, world_size=1, env=env) == [("sim", 3)]
