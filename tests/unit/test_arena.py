"""Memory of partitions in huge pages: each tensor is alone to those who see it, and its memory goes when it goes."""

from __future__ import annotations

import gc
import io
import itertools
import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lowmem_load.ds import arena
from lowmem_load.ds.arena import ALIGNMENT_BYTES, Arena, arena_for
from lowmem_load.phases import host_memory

MIB = 1 << 20
SIZES = [3 * MIB + 1000, 5000, 700, 9 * MIB, 4096, 64, 2 * MIB]


def resident() -> int:
    gc.collect()
    return host_memory().anonymous_bytes


@pytest.mark.parametrize("max_page_s", [1e9, -1.0], ids=["huge pages", "small pages"])
def test_memory_goes_with_each_tensor(max_page_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second goes first, then the rest but one, then that: what is resident is what is held, and pages around."""
    monkeypatch.setattr(arena, "MAX_PAGE_S", max_page_s)
    sizes = SIZES * 8
    start = resident()
    made = Arena(sum(sizes) + len(sizes) * ALIGNMENT_BYTES)
    tensors: dict[int, torch.Tensor] = {}
    for number, size in enumerate(sizes):
        tensors[number] = made.empty(size, torch.uint8).fill_(number)
    del made
    page = arena.HUGE_PAGE_BYTES
    assert sum(sizes) <= resident() - start < sum(sizes) + page + MIB
    for kept in (range(0, len(sizes), 2), [10]):
        tensors = {number: tensors[number] for number in kept}
        held = sum(sizes[number] for number in kept)
        assert resident() - start < held + 2 * 4096 * len(kept) + page + MIB
        assert all(tensor.min() == tensor.max() == number for number, tensor in tensors.items())
    tensors.clear()
    assert resident() - start < MIB


@pytest.mark.parametrize(("slow_pages", "num_windows"), [((), 0), ((0, 2), 0), ((0, 1), 1)])
def test_two_slow_pages_one_after_the_other_are_needed_for_small_ones(
    slow_pages: tuple[int, ...], num_windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watched(mmap.mmap):
        num_small = 0

        def madvise(self, option: int, *where: int) -> None:
            Watched.num_small += option == mmap.MADV_NOHUGEPAGE
            super().madvise(option, *where)

    def times() -> Iterator[float]:
        for page in itertools.count():
            yield from (0.0, 2 * arena.MAX_PAGE_S if page in slow_pages else 0.0)

    monkeypatch.setattr(arena.mmap, "mmap", Watched)
    monkeypatch.setattr(arena.time, "thread_time", times().__next__)
    made = Arena(2 * arena.WINDOW_BYTES)
    kept = made.empty(2 * arena.WINDOW_BYTES, torch.uint8)
    assert kept.numel() == 2 * arena.WINDOW_BYTES
    assert Watched.num_small == num_windows


def test_small_neighbours_go_together() -> None:
    """Though none of them has a page to itself."""
    count = 16 * MIB // 1024
    [torch.empty(1) for _ in range(count)]  # so that the memory of the objects themselves, 8 MiB, is there before
    start = resident()
    made = Arena(16 * MIB)
    last = [made.empty(500, torch.int16).fill_(7) for _ in range(count)][-1]
    assert resident() - start < 8 * MIB
    assert (last == 7).all()


def test_memory_of_a_cycle_goes_with_it() -> None:
    """Also where the collector finds all that is left of the arena in it."""
    start = resident()
    node: dict[str, object] = {"tensor": Arena(8 * MIB).empty(8 * MIB, torch.uint8).fill_(1)}
    node["itself"] = node
    assert resident() - start > 7 * MIB
    del node
    assert resident() - start < MIB


def test_each_tensor_has_a_storage_of_its_own(tmp_path: Path) -> None:
    made = Arena(4 * MIB)
    first, second = made.empty(10, torch.bfloat16), made.empty(3, torch.float32)
    for tensor in (first, second):
        assert tensor.data_ptr() % ALIGNMENT_BYTES == 0
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert second.data_ptr() == first.data_ptr() + ALIGNMENT_BYTES
    saved = io.BytesIO()
    torch.save({"first": first, "second": second}, saved)
    assert len(saved.getvalue()) < 4096
    save_file({"first": first, "second": second}, tmp_path / "both.safetensors")  # which refuses shared memory


def test_an_arena_ends() -> None:
    made = Arena(arena.HUGE_PAGE_BYTES)
    assert made.has_room(MIB, torch.int16)
    assert not made.has_room(MIB + 1, torch.int16)
    assert not made.has_room(0, torch.int16)  # torch refuses a buffer without elements
    made.empty(MIB, torch.int16)
    assert not made.has_room(1, torch.int16)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("always [madvise] never", True), ("[always] madvise never", True), ("always [never]", False)],
)
def test_huge_pages_are_asked_for_where_there_are_any(
    text: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "enabled").write_text(text)
    monkeypatch.setattr(arena, "SETTING", tmp_path / "enabled")
    assert (arena_for([arena.MIN_CAPACITY]) is not None) is expected
    assert arena_for([arena.MIN_CAPACITY - ALIGNMENT_BYTES]) is None
    assert arena_for([1] * (arena.MIN_CAPACITY // ALIGNMENT_BYTES)) is None or expected  # of 64 bytes each


def test_another_system_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "SETTING", tmp_path / "absent")
    assert arena_for([arena.MIN_CAPACITY]) is None


def test_what_may_not_be_promised_is_no_error() -> None:
    assert arena_for([1 << 60]) is None
