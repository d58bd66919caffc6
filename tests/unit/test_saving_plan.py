"""Which rank writes which bytes, against torch, for every rank of many worlds."""

import ctypes
import errno
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save

from lowmem_load.engines.mesh import part_of
from lowmem_load.errors import CheckpointError, UnsupportedError
from lowmem_load.files.safetensors import DTYPES, PACKED
from lowmem_load.models.saver import SavedFile
from lowmem_load.planning.expression import Computed, Expression, Source
from lowmem_load.planning.regions import FlatRange, Region, Split, grid_of, partition_range
from lowmem_load.symbolic.tensor import SymbolicTensor
from lowmem_load.weights_out import weight_files
from lowmem_load.weights_out.weight_files import FileLayout, Write, Writer, lay_out, plan_writes
from tests.storage import PageCache

SHAPES = {"a": (6, 10), "b": (4, 3, 5), "scalar": (), "empty": (0, 3), "row": (7,)}


def layout_of(name: str, tensors: Mapping[str, Expression]) -> FileLayout:
    return lay_out(SavedFile(name, tensors, {"format": "pt"}))


def converted(p: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a save may make of parameters, with torch's operations on real tensors or on symbolic ones."""
    a, b = p["a"], p["b"]
    gate, up = b.chunk(2, 0)
    return {
        "a": a,
        "scalar": p["scalar"],
        "empty": p["empty"],
        "row as bf16": p["row"].to(torch.bfloat16),
        "a as fp16, by way of bf16": a.to(torch.bfloat16).to(torch.float16),
        "a as fp32, by way of bf16": a.to(torch.bfloat16).to(torch.float32),
        "a transposed": a.t().contiguous(),
        "b permuted": b.permute(2, 0, 1).contiguous(),
        "gate transposed": gate.transpose(1, 2).contiguous(),
        "up": up,
        "interleaved": torch.stack([a[:3], a[3:]], 1).reshape(6, 10),
        "every other": a[::2, 1::3],
        "joined": torch.cat([a.reshape(12, 5), b.reshape(12, 5)], 1),
    }


def memory(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def described() -> dict[str, Expression]:
    symbols = {
        name: SymbolicTensor(Source("", name, 0, shape, torch.float32), pytest.fail) for name, shape in SHAPES.items()
    }
    return {name: value.expression for name, value in converted(symbols).items()}


def write_part(
    writer: Writer,
    writes: Mapping[str, list[Write]],
    values: Mapping[str, torch.Tensor],
    rank: int,
    world_size: int,
    dim: int | None = None,
) -> None:
    """Write what one rank writes, from memory that has nothing else: its partition, or its shard along a dim."""
    for name, of_one in writes.items():
        value, span = values[name], partition_range(values[name].numel(), rank, world_size)
        memory, region = value.reshape(-1)[span.start : span.end].clone(), cast("Region", span)
        if dim is not None and value.ndim:
            grid = grid_of(value.shape, [Split(dim % value.ndim, world_size, rank)])
            memory, region = part_of(value, grid).contiguous(), grid
        writer.write_parts(of_one, memory, region)


@pytest.mark.parametrize("dim", [None, 0, -1])
@pytest.mark.parametrize("staging_bytes", [8 << 20, 24, 1])
def test_all_ranks_together_write_each_byte_once(
    staging_bytes: int, dim: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "STAGING_BYTES", max(staging_bytes, 4))
    tensors, path = described(), tmp_path / "f"
    layout = layout_of("f", tensors)
    writes = plan_writes([layout])
    for world_size in (1, 2, 3, 4, 7, 8, 64, 97):
        values = memory(world_size)
        path.write_bytes(layout.header + bytes(layout.nbytes - len(layout.header)))
        written = 0
        for rank in range(world_size):
            with Writer([path], lambda _: None) as writer:
                write_part(writer, writes, values, rank, world_size, dim)
                writer.sync()
            written += writer.written_bytes
        assert written == layout.nbytes - len(layout.header)  # and each is right, so none was written twice
        saved = load_file(path)
        for name, value in converted(values).items():
            assert saved[name].dtype == value.dtype and torch.equal(saved[name], value), (name, world_size)


def test_a_file_system_that_refuses_to_be_written_past_its_cache_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(PageCache):
        def open(self, path: Path, flags: int) -> int:
            raise OSError(errno.EINVAL if flags & os.O_DIRECT else errno.EIO, "refused")

    layout = layout_of("f", {"a": described()["a"]})
    monkeypatch.setattr(weight_files, "os", Refusing())
    for past_cache, text in (
        (True, r"refused\. Its file system refuses O_DIRECT, .*; save to Lustre"),
        (False, "refused$"),
    ):
        with (
            Writer([tmp_path / "f"], lambda _: None, past_cache=past_cache) as writer,
            pytest.raises(CheckpointError, match=text),
        ):
            writer.write_parts(plan_writes([layout])["a"], memory(0)["a"].reshape(-1), FlatRange(0, 60))


def test_a_partition_is_one_write_of_its_own_memory(tmp_path: Path) -> None:
    """No copy: a parameter that is saved as it is goes to the file in one call, straight from where it lies."""
    leaf = Source("", "p", 0, (10, 10), torch.float32)
    layout = layout_of("f", {"p": leaf})
    sizes: list[int] = []
    (tmp_path / "f").write_bytes(bytes(layout.nbytes))
    with Writer([tmp_path / "f"], sizes.append) as writer:
        writer.write_parts(plan_writes([layout])["p"], torch.ones(34), FlatRange(34, 67))
        assert (sizes, writer.written_bytes, writer.staged_bytes) == ([33 * 4], 33 * 4, 0)


@pytest.mark.parametrize("past_cache", [False, True])
def test_the_disk_begins_before_all_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, past_cache: bool
) -> None:
    """After each 100 bytes. With O_DIRECT nothing waits in the page cache. Not every file system knows the call."""
    began: list[tuple[str, int, int, int]] = []
    code = errno.EINVAL

    def sync_file_range(descriptor: int, start: ctypes.c_int64, length: ctypes.c_int64, flags: int) -> int:
        began.append((os.readlink(f"/proc/self/fd/{descriptor}"), start.value, length.value, flags))
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(sync_file_range=sync_file_range))
    monkeypatch.setattr(weight_files, "WRITEBACK_BYTES", 100)
    monkeypatch.setattr(weight_files, "os", PageCache())
    layout = layout_of("f", {name: Source("", name, 0, (15,), torch.float32) for name in "abcde"})
    (tmp_path / "f").write_bytes(bytes(layout.nbytes))
    with Writer([tmp_path / "f"], lambda _: None, past_cache=past_cache) as writer:
        for writes in plan_writes([layout]).values():  # 60 bytes each
            writer.write_parts(writes, torch.ones(15), FlatRange(0, 15))
        writer.sync()
        assert writer.written_bytes == 300
        assert began == ([] if past_cache else [(str(tmp_path / "f"), 0, 0, 2)] * 2)
        code = errno.EIO
        if not past_cache:
            with pytest.raises(CheckpointError, match=r"f: cannot be written: .*Input/output error"):
                writer.write_parts(plan_writes([layout])["b"], torch.ones(15), FlatRange(0, 15))


def test_one_file_is_open_at_a_time(tmp_path: Path) -> None:
    """A model may have more files than a process may open. All reach the disk, also those that were closed before."""
    leaf, number = Source("", "p", 0, (200,), torch.float32), 200
    tensors: list[Mapping[str, Expression]] = [
        {str(at): SymbolicTensor(leaf, pytest.fail)[at : at + 1].expression} for at in range(number)
    ]
    files = [layout_of(f"{at}", part) for at, part in enumerate(tensors)]
    paths, before, most = [tmp_path / layout.name for layout in files], len(os.listdir("/proc/self/fd")), 0
    for layout in files:
        (tmp_path / layout.name).write_bytes(layout.header + bytes(layout.nbytes - len(layout.header)))
    with Writer(paths, lambda _: None) as writer:
        for write in plan_writes(files)["p"]:
            writer.write_parts([write], torch.arange(200.0), FlatRange(0, number))
            most = max(most, len(os.listdir("/proc/self/fd")) - before)
        writer.sync()
        assert most == 1 and writer.num_synced == number
    assert [load_file(path)[path.name].item() for path in paths] == list(range(number))


def test_what_must_be_computed_is_refused() -> None:
    leaf = Source("", "p", 0, (4,), torch.float32)
    product = Computed("aten.mul", lambda values: values[0] * 2, (leaf,), (4,), torch.float32)
    with pytest.raises(UnsupportedError, match=r"f: x: is made by aten\.mul, which needs gathered parameters"):
        plan_writes([layout_of("f", {"x": product})])


# -- headers of files, against safetensors' own and what torch loads ---------------------------------------------------


@pytest.mark.parametrize("metadata", [{"format": "pt"}, {}])
def test_a_file_begins_as_safetensors_begins_it(metadata: dict[str, str]) -> None:
    tensors = {f"b{code}": torch.empty((2, 3), dtype=dtype).zero_() for code, dtype in DTYPES.items() if code != "F4"}
    tensors |= {f"a{code}": torch.zeros((), dtype=dtype) for code, dtype in DTYPES.items() if code not in PACKED}
    if "F4" in DTYPES:  # two values in an element of torch's
        tensors |= {"aF4": torch.zeros(2, 3, dtype=torch.uint8).view(DTYPES["F4"])}
        tensors |= {"bF4": torch.zeros(0, 3, dtype=torch.uint8).view(DTYPES["F4"])}
    tensors |= {"empty": torch.zeros((0, 3)), 'ü"\\\n/': torch.zeros(3)}
    theirs = save(tensors, metadata or None)
    sources = {key: Source("", key, 0, tuple(value.shape), value.dtype) for key, value in tensors.items()}
    ours = lay_out(SavedFile("f", sources, metadata))
    assert ours.header == theirs[: len(ours.header)]
    assert ours.nbytes == len(theirs)
    starts = [start for start, _ in ours.tensors]
    assert starts == sorted(starts)


def test_a_dtype_that_no_file_can_hold_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"f: x is \(1,\) of torch\.complex128"):
        lay_out(SavedFile("f", {"x": Source("", "x", 0, (1,), torch.complex128)}, {}))
