"""Which file systems are on the network, and what a read of them is taken to cost. The mounts are made up."""

import errno
import os
import re
from pathlib import Path

import pytest

from lowmem_load import plan
from lowmem_load.files import mounts
from lowmem_load.files.mounts import Mount, has_caches_apart, mount_of, read_cost
from lowmem_load.planning.reads import ReadCost
from tests import builders
from tests.parity import BF16


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A file in the folder of each mount, by the name of the folder."""
    kinds = {"local": "ext4 /dev/sda rw", "nfs": "nfs4 s:/ rw,rsize=1048576,wsize=1", "fuse": "fuse.sshfs s rw"}
    lines = ["1 0 8:1 / / rw - xfs /dev/root rw"]
    found = {}
    for name, kind in kinds.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x")
        lines.append(f"2 1 0:5 / {tmp_path / name} rw - {kind}")
        found[name] = str(tmp_path / name / "file")
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(mounts, "MOUNTS", mountinfo)
    return found


def test_a_file_is_on_the_nearest_mount_above(files: dict[str, str]) -> None:
    assert mount_of(files["nfs"]) == Mount("nfs4", 1 << 20)
    assert mount_of(files["local"]) == Mount("ext4", 0)
    assert mount_of("/") == Mount("xfs", 0)


@pytest.mark.parametrize(
    ("kind", "is_apart"), [("nfs4", True), ("nfs", True), ("fuse.x", True), ("lustre", False), ("ext4", False)]
)
def test_nodes_of_nfs_cache_what_others_write(kind: str, is_apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "mount_of", lambda _: Mount(kind, 0))
    assert has_caches_apart("/folder") is is_apart


def test_a_read_costs_more_on_the_network(files: dict[str, str], tmp_path: Path) -> None:
    assert read_cost([files["local"]]) == read_cost([]) == ReadCost() == ReadCost(25e-6, 5e9, 1)
    block_bytes = os.stat(files["fuse"]).st_blksize
    assert read_cost([files["fuse"], files["local"]]) == ReadCost(1e-3, 5e8, block_bytes)
    assert read_cost(files.values()) == ReadCost(1e-3, 5e8, 1 << 20)
    link = tmp_path / "link"
    link.symlink_to(files["nfs"])
    assert read_cost([str(link)]).block_bytes == 1 << 20, "as the cache of the Hub has files"
    assert read_cost([str(tmp_path / "nfs" / "gone")]) == ReadCost()


def test_a_plan_goes_by_the_file_system(files: dict[str, str]) -> None:
    """Gaps go by the same cost: half a megabyte is read along where a call takes a millisecond."""
    found = plan(builders.tiny_llama(Path(files["nfs"]).parent), BF16, rank=0, world_size=2)
    assert found.read_cost == ReadCost(1e-3, 5e8, 1 << 20) and found.read_cost.max_gap_bytes == 500_000


def test_without_proc_nothing_is_on_the_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "gone")
    assert not has_caches_apart("/")
    assert (mount_of("/"), read_cost([str(tmp_path / "file")])) == (Mount("", 0), ReadCost())


@pytest.mark.parametrize(
    "name", ["a space", "a\ttab", "a\nnewline", "a\\backslash", "a\rreturn", "a\\040b", os.fsdecode(b"latin-\xe9")]
)
def test_any_name_of_a_folder_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel escapes these four characters, each as a backslash and three octal digits."""
    point = tmp_path / name
    point.mkdir()
    escaped = re.sub(rb"[ \t\n\\\\]", lambda found: b"\\%03o" % found[0][0], os.fsencode(point))
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_bytes(b"1 0 8:1 / / rw - xfs /dev/root rw\n2 1 0:5 / " + escaped + b" rw shared:1 - nfs4 s:/ rw\n")
    monkeypatch.setattr(mounts, "MOUNTS", mountinfo)
    assert mount_of(str(point)) == Mount("nfs4", 0)


def test_a_mount_may_have_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(f"1 0 8:1 / / rw - xfs /dev/root rw\n2 1 0:5 / {tmp_path} rw - tmpfs  rw,size=1k\n")
    monkeypatch.setattr(mounts, "MOUNTS", mountinfo)
    assert mount_of(str(tmp_path)) == Mount("tmpfs", 0)


def test_whether_a_file_is_cached_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 << 20))
    assert mounts.is_cached(str(path))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if mounts.mount_of(str(path)).kind != "tmpfs":  # whose files are always in memory
        for _ in range(2):  # ranks of a node ask one after the other
            assert not mounts.is_cached(str(path))
    (tmp_path / "empty").touch()
    assert mounts.is_cached(str(tmp_path / "empty"))

    def refuse(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "preadv", refuse)
    for kind, expected in (("ext4", True), ("nfs4", False), ("fuse.s3fs", False)):
        monkeypatch.setattr(mounts, "mount_of", lambda _, kind=kind: mounts.Mount(kind, 0))
        assert mounts.is_cached(str(path)) is expected
