"""What ranks will write to files is added up by file system, and compared with what is free there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lowmem_load.errors import ConfigError, MemoryShortageError
from lowmem_load.load.room import Use, check_memory, check_room, disk_uses


def use(needed: int, free: int, file_system: str = "node0", folder: str = "/nvme") -> list[Use]:
    return [Use(folder, file_system, needed, free)]


def check(*uses: list[Use]) -> None:
    check_room("model", uses)


def test_a_rank_s_use_is_that_of_its_folder(tmp_path: Path) -> None:
    assert disk_uses({}) == []
    (use,) = disk_uses({str(tmp_path): 5})
    assert (use.place, use.needed_bytes) == (str(tmp_path), 5)
    assert use.pool.endswith(f" {os.stat(tmp_path).st_dev}")
    assert 0 < use.free_bytes <= shutil.disk_usage(tmp_path).total


def test_ranks_that_share_a_file_system_add_up() -> None:
    with pytest.raises(ConfigError) as caught:
        check(use(6, 11), use(8, 10, "node1"), use(6, 12, folder="/nvme/2"), [], use(4, 3, "node2", "/other"))
    assert str(caught.value) == (
        "model: offload_param.nvme_path: /nvme: rank(s) 0, 2 will write 12 B to its file system, and 11 B are free "
        "there; /other: rank(s) 4 will write 4 B to its file system, and 3 B are free there. Free space, or name "
        "another folder; nothing has been read yet"
    )


def test_host_memory_is_added_up_by_what_bounds_it() -> None:
    def uses(needed: int, own: int, node: str = "0") -> list[Use]:
        return [
            Use("node0: MemAvailable", f"memory {node}", needed, 11 << 20),
            Use("ulimit", f"{own}", needed, 7 << 20),
        ]

    check_memory("model", [uses(5 << 20, 0), uses(6 << 20, 1), uses(7 << 20, 2, "1")])
    with pytest.raises(MemoryShortageError) as caught:
        check_memory("model", [uses(5 << 20, 0), uses(8 << 20, 1), []])
    assert str(caught.value) == (
        "model: does not fit into host memory: rank(s) 0-1 need 13.0 MiB, and 11.0 MiB are free (node0: MemAvailable); "
        "rank(s) 1 need 8.00 MiB, and 7.00 MiB are free (ulimit). Use more nodes or fewer ranks on each, offload_param "
        "to nvme (there already: a smaller buffer_size), end other processes, or raise the limit; nothing has been "
        "allocated or read yet"
    )
    assert isinstance(caught.value, MemoryError)
