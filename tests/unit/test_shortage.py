"""Allocators' errors name what the memory was for."""

import errno
import mmap
from collections.abc import Callable

import pytest
import torch

from lowmem_load.errors import MemoryShortageError, RankError
from lowmem_load.files.memory import naming_shortage


def of_a_device() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")


@pytest.mark.parametrize("fail", [lambda: torch.empty(1 << 60), lambda: mmap.mmap(-1, 1 << 60), of_a_device])
def test_what_failed_is_named(fail: Callable[[], object]) -> None:
    with (
        pytest.raises(MemoryShortageError, match=r"^parameter x: 3\.00 MiB of memory cannot be allocated: .") as caught,
        naming_shortage("the load", 1),
        naming_shortage("parameter x", 3 << 20),
    ):
        fail()
    assert caught.value.__cause__ is not None
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no kernel"), OSError(errno.EIO, "x"), RankError("reading", {1: "CUDA out of memory"})],
)
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, naming_shortage("parameter x", 1):
        raise error
    assert caught.value is error
