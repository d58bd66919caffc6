"""Clients of the store."""

from __future__ import annotations

import torch.distributed as dist

from lowmem_load.distributed.live_group import new_client


def test_clients_of_one_store_see_each_others_values() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    first, second = new_client(store), new_client(store)
    first.set("key", "value")
    assert second.get("key") == b"value"
