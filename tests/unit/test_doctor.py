"""The doctor: each finding where there is cause for it, and nothing that stops the other checks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowmem_load.cli.main import app
from lowmem_load.doctor import devices, host, launcher, storage
from lowmem_load.doctor.finding import NOTE, OK, PROBLEM, Finding
from lowmem_load.doctor.versions import check_versions, installed, of_environments
from lowmem_load.ranks.environment import LAUNCHER_NAMES
from lowmem_load.read import mounts

ALL = {"accelerate": "1", "safetensors": "1", "huggingface_hub": "1"}
NEW = {"python": "3.12.1", "torch": "2.8.0+cu128", "deepspeed": "0.19.0", "transformers": "5.2.0"}
OLD = {"python": "3.10.2", "torch": "2.6.0", "deepspeed": "0.16.4", "transformers": "4.51.3"}
KNOWN = {"old": OLD, "new": NEW}


def about(findings: list[Finding], text: str) -> list[str]:
    return [finding.level for finding in findings if text in finding.found]


def test_releases_are_compared_with_tested_ones() -> None:
    findings = list(check_versions({**ALL, **NEW, "python": "3.12.9", "torch": "2.8.0+cpu"}, KNOWN))
    assert about(findings, "tested set new") == [OK] and {finding.level for finding in findings} == {OK}
    findings = list(check_versions({**ALL, **NEW, "deepspeed": "0.15.9", "transformers": "5.3.0"}, KNOWN))
    assert about(findings, "tested set") == []
    assert about(findings, "deepspeed 0.15.9, tested 0.16.4 to 0.19.0") == [PROBLEM]
    assert about(findings, "transformers 5.3.0") == [NOTE] and about(findings, "torch") == [OK]
    assert [finding.advice for finding in check_versions(NEW, KNOWN) if finding.level == PROBLEM] == [
        *("pip install accelerate", "pip install huggingface_hub", "pip install safetensors"),
    ]
    assert set(installed()) >= {"python", "torch"} and "newest" in of_environments()


def test_a_poor_host_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, text in (
        ("proc/meminfo", "MemTotal: 2097152 kB\nMemAvailable: 1048576 kB\nCached: 1024 kB\n"),
        ("sys/fs/cgroup/memory.max", f"{100 << 20}\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(host, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host, "SYS", tmp_path / "sys")
    limits = {host.resource.RLIMIT_NOFILE: 256, host.resource.RLIMIT_MEMLOCK: 65536, host.resource.RLIMIT_AS: 1 << 30}
    monkeypatch.setattr(host.resource, "getrlimit", lambda kind: (limits[kind], 0))
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    monkeypatch.setattr(host.shutil, "which", lambda _: None)
    monkeypatch.setattr(host.ctypes.util, "find_library", lambda _: None)
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    findings = list(host.check_host())
    assert about(findings, "1.00 GiB of 2.00 GiB are free; 1.00 MiB cache files") == [OK]
    for text in ("this container may use 100.0 MiB", "open 256 files", "lock 64.0 KiB", "64.0 MiB free"):
        assert about(findings, text) == [NOTE]
    assert about(findings, "addresses are limited") == [PROBLEM]
    assert about(findings, "g++ and ninja cannot be found") == [NOTE]
    assert all(finding.advice for finding in findings if finding.level != OK)
    monkeypatch.setattr(host, "PROC", tmp_path / "nothing")
    monkeypatch.setattr(host, "SYS", tmp_path / "nothing")
    assert about(list(host.check_host()), "GiB") == [PROBLEM]  # what cannot be found out is left out


@pytest.mark.parametrize(
    ("mount", "level", "advice"),
    [
        ("ext4 /dev/sda rw", OK, ""),
        ("nfs4 server:/ rw,rsize=32768,wsize=1", NOTE, "rsize=1048576"),
        ("fuse.gcsfuse bucket rw", OK, ""),
    ],
)
def test_a_folder_is_on_its_file_system(
    mount: str, level: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my models"
    folder.mkdir()
    point = str(tmp_path).replace(" ", "\\040")
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(
        f"1 0 8:1 / / rw - xfs /dev/root rw\n2 1 0:5 / {point} rw shared:1 - {mount}\n3 1 0:6 / /other rw - nfs x rw\n"
    )
    monkeypatch.setattr(mounts, "MOUNTS", mountinfo)
    findings = list(storage.check_storage(str(folder)))
    (found,) = [finding for finding in findings if "reads in blocks" in finding.found]
    assert (found.level, mount.split(maxsplit=1)[0] in found.found, advice in found.advice) == (level, True, True)
    assert ("blocks of 32.0 KiB" in found.found) is ("nfs4" in mount)
    assert ("on the network" in found.found) is ("ext4" not in mount)
    assert about(list(storage.check_storage(str(folder / "gone"))), "no such folder") == [PROBLEM]
    assert about(list(storage.check_storage(None)), "no folder of checkpoints") == [NOTE]


def test_the_speed_of_a_folder_is_measured(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(9 << 20))
    assert about(list(storage.check_storage(str(tmp_path))), "GB/s with four reads at a time") == [OK]
    (tmp_path / "b.safetensors").mkdir()
    assert about(list(storage.check_storage(str(tmp_path))), "is not a regular file") == [PROBLEM]


def test_a_launcher_is_complete_or_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOWMEM_LOAD_INSTALL", "1")
    findings = list(launcher.check_launcher())
    assert about(findings, "process of its own") == [OK] and about(findings, "LOWMEM_LOAD_INSTALL=1") == [NOTE]
    monkeypatch.setenv("RANK", "3")
    assert about(list(launcher.check_launcher()), "WORLD_SIZE, LOCAL_RANK") == [PROBLEM]
    for name in LAUNCHER_NAMES:
        monkeypatch.setenv(name, "5")
    assert about(list(launcher.check_launcher()), "this is rank 5 of 5") == [OK]


def test_missing_parts_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", None)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert about(list(devices.check_devices()), "DeepSpeed cannot be imported") == [PROBLEM]
    monkeypatch.setitem(sys.modules, "torch", None)
    assert list(devices.check_devices()) == []


def test_the_command_ends_with_1_where_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Finding("a", OK, "fine"), Finding("b", PROBLEM, "broken [x]", "mend it")]
    monkeypatch.setattr("lowmem_load.doctor.checks.check_all", lambda folder: found)
    assert app(["doctor", "--quiet"], standalone_mode=False) == 1
    told = capsys.readouterr().out
    assert "broken [x]" in told and "mend it" in told and "fine" not in told
    found.pop()
    assert not app(["doctor", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out) == [{"area": "a", "level": "ok", "found": "fine", "advice": ""}]
