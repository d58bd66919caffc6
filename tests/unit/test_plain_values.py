"""plain_values.py: what a client state may hold without trust, and that hostile ones run nothing and stay small."""

import resource
import struct
import time
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lowmem_load.errors import CheckpointError
from lowmem_load.files.executor import Executor
from lowmem_load.files.inert_pickle import objects
from lowmem_load.files.torch_zip import TorchObjects, describe_objects
from lowmem_load.training_checkpoints.plain_values import NeedsCodeError, PlainValues, read_plain
from tests.pickles import assembled
from tests.unit.conftest import memory_below


def read(value: Any, folder: Path) -> Any:
    """Return what is read of a value that torch.save has saved."""
    path = folder / "saved.pt"
    torch.save(value, path)
    with Executor() as executor:
        source = executor.sources.opened(str(path))
        return PlainValues(describe_objects(source), executor).value(describe_objects(source).tree)


def made_of(body: bytes) -> Any:
    """Return what is made of opcodes."""
    pickled = assembled(body)
    file = TorchObjects("x.pt", len(pickled), "", "", objects(pickled, "x.pt"), {})
    with Executor() as executor:
        return PlainValues(file, executor).value(file.tree)


@pytest.mark.parametrize(
    "value",
    [
        [None, True, 1 << 70, 0.5, "text", b"\x00\xff", b"", bytearray(b"ab"), bytearray(), 1 + 2j, (), ((1,), [2])],
        [{1, "a", b"b", 0.5, None}, set(), Counter("aab"), OrderedDict(b=1, a=2), {"a": {1: [2]}, b"b": 3}],
        [torch.bfloat16, torch.device("cuda", 3), torch.device("cpu"), np.dtype("i2")],
        [np.float64(0.5), np.int64(-3), np.bool_(True), np.float16(2), np.complex64(1j), {np.int64(3): 4}],
    ],
)
def test_plain_values_are_as_they_were(value: Any, tmp_path: Path) -> None:
    found = read(value, tmp_path)
    assert found == value
    assert [type(each) for each in found] == [type(each) for each in value]


@pytest.mark.parametrize(
    "array",
    [
        *(np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), np.zeros((0, 3)), np.array(2.0)),
        *(np.arange(12).reshape(3, 4)[:, ::2], np.array([True, False]), np.random.RandomState(1).get_state()[1]),
    ],
)
def test_arrays_of_numpy(array: Any, tmp_path: Path) -> None:
    (found,) = read([array], tmp_path)
    assert np.array_equal(found, array) and found.dtype == array.dtype and found.flags.writeable
    assert found.flags.f_contiguous == array.flags.f_contiguous or not array.flags.forc


def test_tensors_share_their_storages(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    parameter = nn.Parameter(torch.randn(2))
    state = [base, base.t()[1:], base[0].expand(1000, 4), parameter, torch.randn(2, requires_grad=True), base.half()]
    found = read([*state, state[0], torch.zeros(0), torch.tensor(3)], tmp_path)
    for one, other in zip(found, state, strict=False):
        assert torch.equal(one, other) and (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert (one.requires_grad, type(one)) == (other.requires_grad, type(other))
    assert found[6] is found[0] and found[7].numel() == 0 and found[8] == 3
    found[0][0, 1] = 7
    assert found[1][0, 0] == found[2][999, 1] == 7


def test_a_state_dict_keeps_the_versions_of_its_modules(tmp_path: Path) -> None:
    state = nn.BatchNorm1d(2).state_dict()
    found = read(state, tmp_path)
    assert type(found) is OrderedDict and found.keys() == state.keys()
    assert vars(found) == vars(state) and found._metadata[""]["version"] == 2


def test_elements_may_stay_unread(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.pt")
    torch.save({"a": torch.randn(4, 3).t(), "same": [{1}]}, path)
    read, unread = read_plain(path), read_plain(path, with_elements=False)
    assert unread["same"] == read["same"] == [{1}]
    assert unread["a"].is_meta and (unread["a"].shape, unread["a"].stride()) == (read["a"].shape, read["a"].stride())
    torch.save({(1, 2): 3}, path)
    with pytest.raises(CheckpointError):
        read_plain(path)


class Mine(torch.Tensor):
    """A user's own class."""


def with_attribute(value: Any) -> Any:
    value.mine = 1
    return value


def in_itself() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (frozenset({1}), "frozenset"),
        (defaultdict(int, {1: 2}), "collections.defaultdict"),
        ({(1, 2)}, "a tuple as a key, or in a set"),
        (np.array(["a"]), "numpy._core.multiarray._reconstruct"),
        (np.array([1], dtype=">f8"), "numpy._core.multiarray._reconstruct"),
        (np.array([1], dtype=[("a", "i4")]), "numpy._core.multiarray._reconstruct"),
        (np.ma.array([1]), "numpy.ma"),
        (np.dtype("datetime64[s]"), "numpy.dtype"),
        (torch.zeros(1).as_subclass(Mine), "Mine with attributes, or of a class of its own"),
        (with_attribute(torch.zeros(1)), "torch.Tensor with attributes"),
        (with_attribute(nn.Parameter(torch.zeros(1))), "Parameter with attributes"),
        (with_attribute(OrderedDict()), "an OrderedDict with attributes"),
        (np.float64, "numpy.float64"),
        (in_itself(), "or in themselves"),
    ],
)
def test_other_objects_need_trust(value: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(NeedsCodeError, match=text):
        read([value], tmp_path)


def name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def pair(first: bytes, second: bytes) -> bytes:
    return first + second + b"\x86"


F8 = name("numpy", "dtype") + text("f8") + b"\x85Rq\x01"
OBJECT = name("numpy", "dtype") + text("O") + b"\x85R"
FIELDS = b"}" + text("a") + pair(OBJECT, b"K\x00") + b"s" + text("b") + pair(F8, b"K\x08") + b"s"
STATE = b"(K\x03" + text("<") + b"N" + pair(text("a"), text("b")) + FIELDS + b"J\xff\xff\xff\xff" * 2 + b"K?t"
LONG = b"]q\x00(" + b"N" * 200_000 + b"e"
TEXT = text("a" * 200_000) + b"q\x00" + text("latin1") + b"q\x02"

HOSTILE = {
    # A dtype whose fields are changed once an array has it: the bytes of the array would be taken for pointers.
    "dtype": b"]" + F8 + b"a" + name("numpy", "ndarray") + b"K\x01\x85h\x01\x86Rah\x01" + STATE + b"b",
    "array": name("numpy", "ndarray") + b"J" + struct.pack("<i", 1 << 30) + b"\x85" + text("u1") + b"\x86R",
    "bytearray": name("builtins", "bytearray") + b"J" + struct.pack("<i", 1 << 30) + b"\x85R",
    "deep set": name("builtins", "set") + b"])" + b"\x85" * 4000 + b"a\x85R",
    "deep": b")" + b"\x85" * 4000,
    "sets": b"](" + LONG + name("builtins", "set") + b"q\x01" + b"h\x01h\x00\x85R" * 4000 + b"e",
    "bytes": b"](" + TEXT + name("_codecs", "encode") + b"q\x01" + b"h\x01h\x00h\x02\x86R" * 4000 + b"e",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_pickles_run_nothing_and_stay_small(kind: str) -> None:
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with memory_below(64 * len(HOSTILE[kind]) + (8 << 20)), pytest.raises(NeedsCodeError):
        made_of(HOSTILE[kind])
    assert time.process_time() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10  # KiB
