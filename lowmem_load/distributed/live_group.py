"""torch's live process group, clients of its store, and a fake group."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist

from lowmem_load.distributed.environment import LAUNCHER_NAMES
from lowmem_load.errors import ConfigError

_NEVER = timedelta(days=7)
"""Timeout of the store's clients: who uses them finds out for itself that the store is silent."""


def has_group() -> bool:
    """Return whether there is a default group."""
    return dist.is_initialized()


class _Fork:
    """What a fork left to this process: a group that cannot be used here, as none of its threads is."""

    inherited: ClassVar[weakref.ref[dist.ProcessGroup] | None] = None

    @classmethod
    def note(cls) -> None:
        """Run in every child of a fork."""
        group = dist.group.WORLD if dist.is_initialized() else None
        cls.inherited = None if group is None else weakref.ref(group)


os.register_at_fork(after_in_child=_Fork.note)


def require_group() -> None:
    """Raise ConfigError if there is no default group."""
    if not dist.is_initialized():
        raise ConfigError(
            "there is no process group: it was destroyed, or not made yet; call torch.distributed.init_process_group "
            "or lowmem_load.DistributedInterface() on every rank before"
        )


def require_live() -> None:
    """Raise ConfigError if there is no default group, or if it was live when this process was forked."""
    require_group()
    inherited = _Fork.inherited and _Fork.inherited()
    if inherited is not None and inherited is dist.group.WORLD and dist.get_backend() != "fake":
        raise ConfigError(
            f"this process was forked from rank {dist.get_rank()} while its process group was live; the threads that "
            "carry its messages stayed behind, so every exchange would wait for ever. Load in the rank itself, or "
            f"start this process by spawn, with none of {', '.join(LAUNCHER_NAMES)} in its environment."
        )


def default_group() -> dist.ProcessGroup:
    """Return the default group, which must be live."""
    group = dist.group.WORLD
    assert group is not None  # as `require_live` has seen
    return group


def is_default(group: weakref.ref[dist.ProcessGroup]) -> bool:
    """Return whether a group is the default group still. Others may hold one that was destroyed."""
    return group() is not None and group() is dist.group.WORLD


def default_store() -> Any:
    """Return the store of the default group.

    Source: torch 2.13 distributed_c10d.py.

    Raises:
        ConfigError: it has none.
    """
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
    if store is None:
        raise ConfigError(f"the process group (backend {dist.get_backend()}) has no store; use gloo or nccl")
    return store


def new_client(store: Any) -> Any:
    """Return another client of a store, for another thread."""
    client = store.clone()
    client.set_timeout(_NEVER)
    return dist.PrefixStore("lowmem_load", client)  # type: ignore[attr-defined]


@contextlib.contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Inside, this process is one rank of a world whose other ranks do not exist. Collectives do nothing.

    Source: torch 2.13 `testing/_internal/distributed/fake_pg.py`.
    """
    if dist.is_initialized():
        raise ConfigError("plan: this process has a process group; plan in a process of its own")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
