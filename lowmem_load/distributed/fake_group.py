"""A process group without other ranks: any rank of any world, in a plain process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from lowmem_load.errors import ConfigError


@contextlib.contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Inside, this process is one rank of a world whose other ranks do not exist. Collectives do nothing.

    Source: torch 2.13 `testing/_internal/distributed/fake_pg.py`.

    Raises:
        ConfigError: this process has a process group.
    """
    if dist.is_initialized():
        raise ConfigError("plan: this process has a process group; plan in a process of its own")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
