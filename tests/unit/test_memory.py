"""Memory of one thread is lent out in frames, and used again."""

from __future__ import annotations

import torch

from lowmem_load.io.memory import Temporaries


def test_memory_is_used_again_and_grows_to_what_is_asked_for() -> None:
    temporaries = Temporaries()
    with temporaries.frame() as take:
        first = take(1000, torch.float32)
        assert (first.shape, first.dtype, first.device.type) == ((1000,), torch.float32, "cpu")
        address = first.data_ptr()
    with temporaries.frame() as take:
        assert take(1500, torch.bfloat16).data_ptr() == address
        larger = take(5000, torch.uint8)
        assert larger.data_ptr() != address
    with temporaries.frame() as take:
        assert take(100_000, torch.float64).fill_(1).sum() == 100_000
        assert take(5000, torch.uint8).data_ptr() == larger.data_ptr()


def test_a_frame_within_a_frame_takes_other_memory() -> None:
    temporaries = Temporaries()
    with temporaries.frame() as take:
        outer = take(10, torch.int64).fill_(1)
        for _ in range(2):
            with temporaries.frame() as take_inner:
                inner = take_inner(10, torch.int64).fill_(2)
                assert inner.data_ptr() != outer.data_ptr()
        assert take(10, torch.int64).data_ptr() == inner.data_ptr()
        assert outer.sum() == 10


def test_nothing_may_be_taken_too() -> None:
    with Temporaries().frame() as take:
        assert take(0, torch.float32).shape == (0,)
