"""What ranks will write to files is added up by file system, and compared with what is free there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lowmem_load.errors import ConfigError
from lowmem_load.pipeline.checks import DiskUse, check_room, disk_uses


def use(needed: int, free: int, file_system: str = "node0", folder: str = "/nvme") -> list[DiskUse]:
    return [DiskUse(folder, file_system, needed, free)]


def check(*uses: list[DiskUse]) -> None:
    check_room("model", uses)


def test_a_rank_s_use_is_that_of_its_folder(tmp_path: Path) -> None:
    assert disk_uses({}) == []
    (use,) = disk_uses({str(tmp_path): 5})
    assert (use.folder, use.needed_bytes) == (str(tmp_path), 5)
    assert use.file_system.endswith(f" {os.stat(tmp_path).st_dev}")
    assert 0 < use.free_bytes <= shutil.disk_usage(tmp_path).total


def test_what_fits_passes() -> None:
    check(use(5, 10), use(5, 10))
    check(use(8, 10, "node0"), use(8, 10, "node1"))
    check([], use(10, 10))
    check([])


def test_ranks_that_share_a_file_system_add_up() -> None:
    with pytest.raises(ConfigError) as caught:
        check(use(6, 11), use(8, 10, "node1"), use(6, 12, folder="/nvme/2"), [], use(4, 3, "node2", "/other"))
    assert str(caught.value) == (
        "model: offload_param.nvme_path: /nvme: rank(s) 0, 2 will write 12 bytes to its file system, and 11 are free "
        "there; /other: rank(s) 4 will write 4 bytes to its file system, and 3 are free there. Free space, or name "
        "another folder; nothing has been read yet"
    )
