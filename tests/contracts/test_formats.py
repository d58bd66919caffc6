"""What every checkpoint format must do: a new one gets a line of `KINDS`."""

import io
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch

from lowmem_load.errors import CheckpointError
from lowmem_load.files import inert_pickle
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import read_whole
from lowmem_load.files.format import CheckpointFile, CheckpointFormat
from lowmem_load.files.safetensors import DTYPES, Safetensors
from lowmem_load.files.torch_zip import TorchZip
from lowmem_load.planning.expression import Source, leaves, numel
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.regions import partition_range
from tests.memory_source import MemorySource

PATH = "file"

SHAPES = ((3, 5), (7,), (), (2, 3, 4), (1, 1), (0,), (4, 0, 2))

MAX_PROBED_NBYTES = 1024
"""Bytes of tensors that may be read on the way: the first and last bytes of a file say what it is."""

NUM_CUTS = 200


def torch_zip(tensors: Mapping[str, torch.Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save(dict(tensors), file)
    return file.getvalue()


class Kind(NamedTuple):
    """A format, the dtypes that it has, and what writes a file of it that holds some tensors by name."""

    format: CheckpointFormat
    dtypes: Collection[torch.dtype]
    encode: Callable[[Any], bytes]


KINDS = [
    Kind(Safetensors(), DTYPES.values(), safetensors.torch.save),
    Kind(TorchZip(), inert_pickle.DTYPES.values(), torch_zip),
]

pytestmark = pytest.mark.parametrize("kind", KINDS, ids=["safetensors", "torch zip"])


def describe(kind: Kind, data: bytes) -> CheckpointFile:
    return kind.format.describe(MemorySource(PATH, data))


def sources(file: CheckpointFile, name: str) -> list[Source]:
    return [leaf for leaf in leaves(file.expression(name)) if isinstance(leaf, Source)]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    numel = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_names_are_those_of_the_file_in_its_order(kind: Kind) -> None:
    """So are size and path; a file without tensors is none the worse."""
    for names in (["z", "a", "m.weight"], []):
        data = kind.encode({name: torch.ones(2) for name in names})
        file = describe(kind, data)
        assert (sorted(file.names), file.nbytes, file.path) == (sorted(names), len(data), PATH)
        starts = [sources(file, name)[0].start for name in file.names]
        assert starts == sorted(starts)


def test_every_tensor_comes_back_bit_by_bit(kind: Kind) -> None:
    """Of any dtype and shape, but for a scalar of half a byte."""
    pairs = [(dtype, shape) for dtype in kind.dtypes for shape in SHAPES if shape or dtype is not DTYPES.get("F4")]
    tensors = {f"{dtype} {shape}": random_tensor(dtype, shape, seed) for seed, (dtype, shape) in enumerate(pairs)}
    data = kind.encode(tensors)
    file = describe(kind, data)
    assert set(file.names) == set(tensors)
    with Executor(open_source=lambda path: MemorySource(path, data)) as executor:
        for name, tensor in tensors.items():
            found = read_whole(executor, file.expression(name))
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(bytes_of(found), bytes_of(tensor)), name


def test_a_rank_reads_its_part_of_a_tensor_and_no_more(kind: Kind) -> None:
    """What a rank of several holds of a contiguous tensor is one read."""
    tensor = random_tensor(torch.float32, (37, 11), seed=1)
    data = kind.encode({"other": torch.ones(5), "weight": tensor})
    expression = describe(kind, data).expression("weight")
    for rank in range(4):
        span, planner = partition_range(numel(expression), rank, 4), Planner()
        fill, memory = planner.plan_fill("weight", expression, span), torch.empty(span.numel)
        with Executor(open_source=lambda path: MemorySource(path, data)) as executor:
            executor.fill(fill, memory, planner.values, planner.constants)
            executor.finish()
            assert (executor.stats.read_bytes, executor.stats.num_reads) == (span.numel * 4, 1)
        assert torch.equal(bytes_of(memory), bytes_of(tensor.reshape(-1)[span.start : span.end]))


def test_nothing_but_headers_is_read(kind: Kind) -> None:
    """Neither when a file is described nor when an expression is asked for."""
    data = kind.encode({name: random_tensor(torch.float32, (256, 256), seed) for seed, name in enumerate("abcd")})
    source = MemorySource(PATH, data)
    file = kind.format.describe(source)
    tensors = [source for name in file.names for source in sources(file, name)]
    held = [(leaf.start, leaf.start + numel(leaf) * leaf.dtype.itemsize) for leaf in tensors]
    assert sum(end - start for start, end in held) == 4 * 256 * 256 * 4
    probed = sum(max(0, min(end, last) - max(start, first)) for start, end in source.reads for first, last in held)
    assert probed <= MAX_PROBED_NBYTES
    assert sum(end - start for start, end in source.reads) < len(data) // 16


def test_the_digest_is_that_of_what_lies_where(kind: Kind) -> None:
    """Equal for other values in the same places; another for other names, dtypes, shapes or places."""
    ones = {"a": torch.ones(4, 6), "b": torch.ones(8)}
    digest = describe(kind, kind.encode(ones)).digest
    assert describe(kind, kind.encode(ones)).digest == digest
    assert describe(kind, kind.encode({name: 2 * tensor for name, tensor in ones.items()})).digest == digest
    others: dict[str, dict[str, torch.Tensor]] = {
        "name": {"a": ones["a"], "c": ones["b"]},
        "dtype": {"a": ones["a"].int(), "b": ones["b"]},
        "shape": {"a": ones["a"].reshape(6, 4), "b": ones["b"]},
        "size": {"a": ones["a"], "b": torch.ones(9)},
        "names exchanged": {"b": ones["a"], "a": ones["b"]},
        "one more": {**ones, "c": torch.ones(1)},
        "one less": {"a": ones["a"]},
    }
    for what, tensors in others.items():
        assert describe(kind, kind.encode(tensors)).digest != digest, what


def test_a_file_that_is_cut_off_is_refused(kind: Kind) -> None:
    """Wherever: within the header, within the data, before the last byte."""
    data = kind.encode({"a": random_tensor(torch.float32, (20, 30), seed=2), "b": torch.ones(3)})
    describe(kind, data)
    for nbytes in {*range(0, len(data), max(1, len(data) // NUM_CUTS)), len(data) - 1}:
        with pytest.raises(CheckpointError, match=re.escape(PATH)):
            describe(kind, data[:nbytes])


def test_another_kind_of_file_is_refused(kind: Kind) -> None:
    """Whatever its bytes are."""
    for data in (bytes(1000), b"version https://git-lfs.github.com/spec/v1\n", b"<!DOCTYPE html>", b"\xff" * 5000):
        with pytest.raises(CheckpointError, match=re.escape(PATH)):
            describe(kind, data)
