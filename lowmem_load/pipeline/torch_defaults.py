"""What of torch's a load sets for itself, and puts back: the default device and the random state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Make tensors that name no device in host memory, whatever default device the caller has set.

    What is described, and read to decide, is in host memory; where parameters and buffers go, the target says.
    """
    try:
        default = torch.get_default_device().type
    except AttributeError:  # torch 2.6 after `set_default_device(None)`
        default = "cpu"
    if default == "cpu":  # a context of torch's costs each of its calls some time
        yield
        return
    with torch.device("cpu"):
        yield


@contextlib.contextmanager
def random_state_of(common: bytes | None) -> Iterator[None]:
    """Give every rank the random state of rank 0, so that missing keys are initialised equally on all ranks."""
    before = torch.get_rng_state()
    if common is None or before.numpy().tobytes() == common:
        yield
        return
    torch.set_rng_state(torch.frombuffer(bytearray(common), dtype=torch.uint8))
    try:
        yield
    finally:
        torch.set_rng_state(before)
