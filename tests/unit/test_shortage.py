"""Allocators' errors name what the memory was for."""

import errno
import mmap

import pytest
import torch

from lowmem_load.errors import CheckpointError, MemoryShortageError
from lowmem_load.files.memory import naming_shortage


def of_torch() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def of_the_system() -> None:
    mmap.mmap(-1, 1 << 60)


def of_a_device() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")


@pytest.mark.parametrize("fail", [of_torch, of_the_system, of_a_device])
def test_what_failed_is_named(fail: object) -> None:
    assert callable(fail)
    with (
        pytest.raises(MemoryShortageError, match=r"^parameter x: 3\.00 MiB of memory cannot be allocated: .") as caught,
        naming_shortage("the load", 1),
        naming_shortage("parameter x", 3 << 20),
    ):
        fail()
    assert caught.value.__cause__ is not None
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error", [RuntimeError("no kernel"), OSError(errno.EIO, "x"), CheckpointError("out of memory")]
)
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, naming_shortage("parameter x", 1):
        raise error
    assert caught.value is error
