"""`lowmem-load doctor`: each finding has a cause, and no finding stops the other checks."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowmem_load.cli import doctor
from lowmem_load.cli.doctor import NOTE, OK, PROBLEM, Finding
from lowmem_load.cli.start import app
from lowmem_load.io import mounts

ALL = {"accelerate": "1", "safetensors": "1", "huggingface_hub": "1"}
NEW = {"python": "3.12.1", "torch": "2.8.0+cu128", "deepspeed": "0.19.0", "transformers": "5.2.0"}
OLD = {"python": "3.10.2", "torch": "2.6.0", "deepspeed": "0.16.4", "transformers": "4.51.3"}


def about(findings: list[Finding], text: str) -> list[str]:
    return [finding.level for finding in findings if text in finding.text]


def test_releases_are_compared_with_tested_ones() -> None:
    known = [OLD, NEW]
    findings = list(doctor.check_versions({**ALL, **NEW, "python": "3.12.9", "torch": "2.8.0+cpu"}, known))
    assert {finding.level for finding in findings} == {OK}
    findings = list(doctor.check_versions({**ALL, **NEW, "deepspeed": "0.15.9", "transformers": "5.3.0"}, known))
    assert about(findings, "deepspeed 0.15.9, tested 0.16.4 to 0.19.0") == [PROBLEM]
    assert about(findings, "transformers 5.3.0") == [NOTE] and about(findings, "torch") == [OK]
    problems = [finding.advice for finding in doctor.check_versions(NEW, known) if finding.level == PROBLEM]
    assert problems == ["pip install accelerate", "pip install safetensors", "pip install huggingface_hub"]
    assert set(doctor.installed_releases()) >= {"python", "torch"}


def test_limits_of_host_memory_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (1 << 30, 0))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    findings = list(doctor.check_memory())
    assert about(findings, "/dev/shm has 64.0 MiB free") == [NOTE]
    assert about(findings, "addresses are limited to 1.00 GiB") == [PROBLEM]
    assert all(finding.advice for finding in findings)


@pytest.mark.parametrize(
    ("mount", "level", "found", "advice"),
    [
        ("ext4 /dev/sda rw", OK, "my models: ext4", ""),
        ("nfs4 server:/ rw,rsize=32768,wsize=1", NOTE, "nfs4, on the network, in blocks of 32.0 KiB", "rsize=1048576"),
        ("fuse.gcsfuse bucket rw", OK, "fuse.gcsfuse, on the network", ""),
    ],
)
def test_the_file_system_of_a_folder_is_judged(
    mount: str, level: str, found: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my models"
    folder.mkdir()
    point = str(tmp_path).replace(" ", "\\040")
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(
        f"1 0 8:1 / / rw - xfs /dev/root rw\n2 1 0:5 / {point} rw shared:1 - {mount}\n3 1 0:6 / /other rw - nfs x rw\n"
    )
    monkeypatch.setattr(mounts, "MOUNTS", mountinfo)
    finding = doctor.check_storage(str(folder))
    assert (finding.level, found in finding.text, advice in finding.advice) == (level, True, True)
    mountinfo.unlink()
    assert doctor.check_storage(str(folder)).text.endswith("file system not known")
    assert about([doctor.check_storage(str(folder / "gone"))], "no such folder") == [PROBLEM]


def test_memory_that_cannot_be_pinned_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "empty", refuse)
    findings = list(doctor.check_devices())
    assert about(findings, "3 devices of type cuda") == [OK]
    assert about(findings, "cannot be pinned: CUDA error: out of memory") == [PROBLEM]


def test_missing_parts_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lowmem_load.ds.partition", None)
    assert about(list(doctor.check_devices()), "DeepSpeed cannot be imported") == [PROBLEM]
    monkeypatch.setattr(doctor, "installed_releases", dict)
    findings = list(doctor.check_all("/gone"))
    assert about(findings, "torch is not installed") == [PROBLEM] and not about(findings, "DeepSpeed")


def test_a_machine_of_cpus_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("CXX", "false")
    assert about(list(doctor.check_devices()), "false does not run (Command") == [PROBLEM]
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    findings = list(doctor.check_compiler())
    assert [finding.level for finding in findings] == [PROBLEM, PROBLEM]
    assert about(findings, "ninja does not run") == [PROBLEM]


def test_the_command_ends_with_1_where_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Finding("a", OK, "fine"), Finding("b", PROBLEM, "broken [x]", "mend it")]
    monkeypatch.setattr(doctor, "check_all", lambda folder: found)
    assert app(["doctor", "--quiet"], standalone_mode=False) == 1
    told = capsys.readouterr().out
    assert "broken [x]" in told and "mend it" in told and "fine" not in told
    found.pop()
    assert not app(["doctor", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out) == [{"area": "a", "level": "ok", "text": "fine", "advice": ""}]


def test_all_checks_run_here(tmp_path: Path) -> None:
    areas = {finding.area for finding in doctor.check_all(str(tmp_path))}
    assert areas >= {"versions", "memory", "storage", "devices"}


def test_the_lock_of_a_killed_build_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr("lowmem_load.ds.build_locks.version", lambda name: "2.13.0")
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    assert not about(list(doctor.check_devices()), str(lock)), "another process may build there"
    os.utime(lock, (time.time() - 7200,) * 2)
    assert about(list(doctor.check_devices()), f"{lock}: is 120 minutes old") == [PROBLEM]
