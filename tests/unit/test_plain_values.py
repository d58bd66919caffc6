"""inert_pickle.py makes a tree of any pickle; `plain` creates its plain values and names other objects."""

import collections
import os
import random
from typing import Any

import numpy as np
import pytest
import torch

from lowmem_load.errors import CheckpointError
from lowmem_load.files import inert_pickle
from lowmem_load.files.inert_pickle import Foreign, Tensor, member, objects, plain, shown
from tests.pickles import Call, saved


def made(value: Any) -> Any:
    return plain(objects(saved(value), "x.pt"), "state", lambda tensor, where: (tensor.size, where))


class Mine:
    """A user's own class."""

    def __init__(self) -> None:
        self.value = 3


def test_plain_values_come_back() -> None:
    value = {
        "numbers": [1, -2, 3.5, True, None, 1 << 70],
        "tuple": ("a", {"b": ()}),
        "bytes": b"\x00\xffa",
        "sets": [{1, 2}, frozenset({"x"})],
        "counter": collections.Counter([3, 3, 4]),
        "ordered": collections.OrderedDict(a=1),
        "numpy": [np.float64(1.5), np.int32(-4), np.bool_(True)],
        "dtype": torch.bfloat16,
    }
    found = made(value)
    assert found == value
    assert type(found["ordered"]) is collections.OrderedDict and type(found["numpy"][1]) is np.int32


def test_states_of_random_numbers_come_back() -> None:
    state = made([random.getstate(), np.random.get_state()])
    assert state[0] == random.getstate()
    assert np.array_equal(state[1][1], np.random.get_state()[1])
    fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert np.array_equal(made(fortran), fortran)


def test_tensors_are_described_also_with_attributes() -> None:
    tensor = torch.zeros(2, 3)
    tensor.note = "something"
    tree = objects(saved({"t": tensor, "p": torch.nn.Parameter(torch.zeros(4))}), "x.pt")
    assert isinstance(tree["t"], Tensor) and tree["t"].size == (2, 3)
    assert plain(tree, "state", lambda tensor, where: (tensor.size, where))["p"] == ((4,), "state['p']")


def test_objects_are_named_and_nothing_is_run(tmp_path: Any) -> None:
    mark = tmp_path / "was-run"
    value = {"mine": [Mine()], "call": Call(os.system, f"touch {mark}"), "class": Mine, "d": collections.deque([1])}
    tree = objects(saved(value), "x.pt")
    assert isinstance(tree["mine"][0], Foreign) and tree["mine"][0].state == {"value": 3}
    with pytest.raises(CheckpointError) as caught:
        plain(tree, "state", lambda tensor, where: tensor)
    for text in ("state['mine'][0] (", "Mine)", "state['call'] (posix.system)", "collections.deque", "nothing was run"):
        assert text in str(caught.value)
    assert not mark.exists()


def test_nothing_is_read_for_an_object_that_is_not_created() -> None:
    def read(tensor: Tensor, where: str) -> Any:
        raise AssertionError(where)

    with pytest.raises(CheckpointError, match=r"can create: state \(.*Mine\); nothing"):
        plain(objects(saved(Call(Mine, torch.zeros(2), {"x": Mine()})), "x.pt"), "state", read)


def test_enum_members_are_recognised_however_python_pickled_them() -> None:
    names = {"first": 1}
    for value, found in (
        (Call(getattr, Mine, "first"), 1),
        (Call(Mine, 1), 1),
        (3, 3),
        ("first", "first"),
    ):
        assert member(objects(saved(value), "x.pt"), names) == found
    for value in (Call(getattr, Mine, "other"), Call(getattr, Mine, 3), Call(getattr, [], "first"), Call(Mine)):
        tree = objects(saved(value), "x.pt")
        assert member(tree, names) is tree and shown(tree) == "a Foreign"


@pytest.mark.parametrize("kind", ["O8", "V8", "S3", "i8,f8"])
def test_other_numpy_types_are_refused(kind: str) -> None:
    with pytest.raises(CheckpointError, match=r"only their own code can create: state \(numpy.dtype\)"):
        made(Call(np.dtype, kind, False, True))


@pytest.mark.parametrize("items", [{1 << 70}, {(1,)}])
def test_sets_hold_text_and_numbers(items: set[Any]) -> None:
    """Of larger integers any number can have one hash, and a set of them would take for ever."""
    with pytest.raises(CheckpointError, match=r"only their own code can create: state \(__builtin__.set\)"):
        made(items)


def test_a_shared_object_is_created_once() -> None:
    value: Any = [1]
    for _ in range(60):  # 2 ** 60 elements if it were written out
        value = [value, value]
    found = made(value)
    assert found[0] is found[1]


def test_sets_of_one_long_list_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a few bytes of the pickle."""
    monkeypatch.setattr(inert_pickle, "MAX_PLAIN_NBYTES", 1 << 20)
    items = list(range(10_000))
    with pytest.raises(CheckpointError, match=r"state\[\d\]: the sets and arrays up to here take more than 1048576"):
        made([Call(set, items) for _ in range(9)])
    assert made([Call(set, items)]) == [set(items)]


def test_deep_nesting_is_an_error() -> None:
    pickled = b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b"."
    with pytest.raises(CheckpointError, match=r"too deeply|too many objects"):
        plain(objects(pickled, "x.pt"), "state", lambda tensor, where: tensor)
