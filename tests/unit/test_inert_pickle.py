"""inert_pickle.py: a pickle describes tensors; anything else is refused by name and never run."""

import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lowmem_load.errors import CheckpointError
from lowmem_load.files.inert_pickle import Storage, Tensor
from lowmem_load.files.torch_zip import TorchZip
from tests.pickles import FIRST, NAMED, STORAGE, Call, assembled, saved, with_tensor
from tests.unit.conftest import memory_below


def test_tensors_are_described_with_their_views() -> None:
    base = torch.arange(12.0).view(3, 4)
    found = TorchZip().read(saved({"a": base.t(), "b": base[1:], "c": torch.zeros(2, dtype=torch.uint16)}), "x.bin")
    storage = Storage("0", torch.float32, 12)
    assert found == {
        "a": Tensor(storage, torch.float32, 0, (4, 3), (1, 4)),
        "b": Tensor(storage, torch.float32, 4, (2, 4), (4, 1)),
        "c": Tensor(Storage("1", torch.uint8, 4), torch.uint16, 0, (2,), (1,)),
    }


def test_the_handmade_pickle_is_right() -> None:
    found = TorchZip().read(with_tensor(b"K\x01K\x02\x85K\x01\x85"), "x.bin")
    assert found == {"a": Tensor(Storage("0", torch.float32, 3), torch.float32, 1, (2,), (1,))}


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, f"{os.name}.system"),
        (eval, "__builtin__.eval"),
        (getattr, "__builtin__.getattr"),
        (torch.load, "torch.serialization.load"),
    ],
)
@pytest.mark.parametrize(
    "wrap", [lambda evil: evil, lambda evil: {"a": evil}, lambda evil: {"a": torch.ones(2), "b": [evil]}]
)
def test_code_is_refused_by_name_and_not_run(tmp_path: Path, function: Any, name: str, wrap: Any) -> None:
    mark = tmp_path / "was-run"
    code = f"touch {mark}" if function is os.system else f"open({str(mark)!r}, 'w')"
    pickled = saved(wrap(Call(function, code)))
    with pytest.raises(CheckpointError, match=rf"pytorch_model.bin: its pickle names {name}.*nothing was run"):
        TorchZip().read(pickled, "pytorch_model.bin")
    assert not mark.exists()


LONG = b"X\xd0\x07\x00\x00" + b"0" * 2000  # a short pickle can join it, or have it digested, many times


@pytest.mark.parametrize(
    ("pickled", "text"),
    [
        (pickle.dumps(Call(os.system, "true"), 4), "names posix.system"),
        (assembled(b"\x8b\x01\x00\x00\x00\x00"), "uses LONG4"),
        (assembled(b"(S'true'\nios\nsystem\n"), "uses STRING"),
        (assembled(b"(ios\nsystem\n"), "uses INST"),
        (assembled(b"\x82\x01"), "uses EXT1"),
        (assembled(b"ctorch\nload\n)\x81"), "names torch.load"),
        (assembled(b"ctorch\nfloat32\n)R"), "malformed"),  # calls a dtype
        (assembled(b"ctorch\nload\n"), "names torch.load"),
        (assembled(b"ctorch\nload.__globals__\n"), "names torch.load.__globals__"),
        (assembled(b"]"), "contains a list"),
        (assembled(b"ccollections\nOrderedDict\n)RK\x01b"), "BUILD changes a OrderedNames"),
        (assembled(NAMED + b"K\x01s"), "entry 'a' is a int"),
        (assembled(b"}K\x01K\x01s"), "entry 1 is a int"),
        (assembled(NAMED + STORAGE + b"s"), "entry 'a' is a Storage"),
        (with_tensor(b"K\x00K\x01\x85)"), "1 sizes and 0 strides"),
        (assembled(LONG + b"q\x00h\x00\x93"), "a global whose name has 4000 characters"),
        (with_tensor(FIRST, STORAGE.replace(b"X\x01\x00\x00\x000", LONG)), "a persistent id that is not a storage"),
    ],
)  # fmt: skip
def test_malformed_pickles(pickled: bytes, text: str) -> None:
    with pytest.raises(CheckpointError, match=f"x.bin: .*{text}"):
        TorchZip().read(pickled, "x.bin")


def test_lazy_negation_is_refused() -> None:
    with pytest.raises(CheckpointError, match="resolve_conj"):
        TorchZip().read(saved({"a": torch.ones(2, dtype=torch.complex64).conj()}), "x.bin")


ORDERED = b"ccollections\nOrderedDict\nq\x00)q\x01"
DEVICE = b"ctorch\ndevice\nq\x01"


@pytest.mark.parametrize(
    "body",
    [
        b"}" * 500_000,
        b"(" * 500_000,
        b"](e" * 200_000,
        b")" + b"\x85" * 500_000,
        b"".join(b"r" + place.to_bytes(4, "little") for place in range(100_000)),
        b"}" + b"".join(b"r" + place.to_bytes(4, "little") for place in range(100_000)),
        ORDERED + b"h\x00h\x01R" * 200_000,
        b"}" + b")" + (b"\x85" + b"\x80\x02" * 3) * 100_000 + b"Ns",  # a key that overflows the stack if it is hashed
        b"(" + b"N" * 300_000 + b"tq\x00" + DEVICE + b"h\x01h\x00R" * 50_000,  # a long tuple as arguments, many times
        b")q\x00" + b"h\x00h\x00\x86q\x00" * 30_000 + b"N\x85R",  # a tuple of 2 ** 30 000 elements
        b"\x8b\xff\xff\xff\x7f",  # an integer of 2 GiB
        b"\x8b" + (1 << 20).to_bytes(4, "little") + b"\x7f" * (1 << 20),
        b"L" + b"9" * 100_000 + b"L\n",
        b"X\xff\xff\xff\x7f",
        b"c" + b"x" * 1_000_000 + b"\nx\n",
        NAMED[:1] + b"X\x40\x42\x0f\x00" + b"x" * 1_000_000 + b"Ns",
    ],
    ids=lambda body: f"{body[:6]!r}-{len(body)}",
)
def test_time_and_memory_are_bounded_by_the_bytes_of_a_hostile_pickle(body: bytes) -> None:
    pickled = assembled(body)
    start = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        TorchZip().read(pickled, "x.bin")
    assert time.process_time() - start < 5
    assert len(str(caught.value)) < 1000
    with memory_below(64 * len(pickled) + (1 << 20)), pytest.raises(CheckpointError):
        TorchZip().read(pickled, "x.bin")


@pytest.mark.parametrize("make", [torch.zeros, lambda size: torch.nn.Parameter(torch.zeros(size))])
def test_many_small_tensors_stay_within_the_bound(make: Any) -> None:
    """Thousands of the smallest: one element, short names."""
    state = {str(number): make(1) for number in range(2000)}
    pickled = saved(state)
    with memory_below(30 * len(pickled)):
        assert list(TorchZip().read(pickled, "x.bin")) == list(state)
