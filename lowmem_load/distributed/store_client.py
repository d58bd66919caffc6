"""Clients of the store of torch.distributed, through which the ranks of a process group exchange small values."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_NEVER = timedelta(days=7)
"""Timeout of the store's clients, whose calls wait for other ranks."""


class StoreClient:
    """A client of the store that reports each answer. `set` has none.

    Args:
        store: a client for one thread.
        answered: called after each answer; may raise.
    """

    def __init__(self, store: Store, answered: Callable[[], None]) -> None:
        self._store, self._answered = store, answered

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)
        return call if name == "set" else partial(self._ask, call)

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        answer = call(*arguments)
        self._answered()
        return answer


def default_store() -> Any:
    """Return the store of the default group; None if it has none. Source: torch 2.13 distributed_c10d.py."""
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001


def new_client(store: Any) -> Any:
    """Return another client of the same store: each serves one call at a time, and some calls wait long.

    Before torch 2.8 stores have no `clone`. There the client connects anew, without the prefixes of the store, which
    tell a group from an earlier one; the ranks agree on a new prefix.
    """
    if hasattr(store, "clone"):
        client = store.clone()
    else:
        prefix = store.compare_set("lowmem_load", "", secrets.token_hex(8)).decode()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        is_file = isinstance(store, dist.FileStore)  # type: ignore[attr-defined]
        client = dist.FileStore(store.path) if is_file else dist.TCPStore(store.host, store.port, is_master=False)  # type: ignore[attr-defined]
        client = dist.PrefixStore(prefix, client)  # type: ignore[attr-defined]
    client.set_timeout(_NEVER)
    return dist.PrefixStore("lowmem_load", client)  # type: ignore[attr-defined]
