"""Clients of the store."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from lowmem_load.distributed.live_group import new_client


class StoreBeforeTorch28:
    """A prefixed TCPStore as torch had it before 2.8: without `clone`."""

    def __init__(self, store: Any) -> None:
        self.underlying_store = self._Server(store)
        self.compare_set = dist.PrefixStore("group", store).compare_set

    class _Server:
        def __init__(self, store: Any) -> None:
            self.host, self.port = store.host, store.port


@pytest.mark.parametrize("has_clone", [True, False])
def test_clients_of_one_store_see_each_others_values(has_clone: bool) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    store = server if has_clone else StoreBeforeTorch28(server)
    first, second = new_client(store, 0), new_client(store, 0)
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert not new_client(store, 1).check(["key"])
