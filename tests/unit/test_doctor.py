"""`lowmem-load doctor`: each finding has a cause, and no finding stops the other checks."""

import importlib.metadata
import json
import os
import time
from pathlib import Path

import pytest

from lowmem_load.cli import doctor
from lowmem_load.cli.doctor import NOTE, OK, PROBLEM, Finding
from lowmem_load.cli.start import app
from lowmem_load.errors import ConfigError


def about(findings: list[Finding], text: str) -> list[str]:
    return [finding.level for finding in findings if text in finding.text]


def test_releases_are_compared_with_supported_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {finding.level for finding in doctor.check_versions()} == {OK}

    def version(package: str) -> str:
        if package == "accelerate":
            raise importlib.metadata.PackageNotFoundError(package)
        return {"torch": "2.0.1+cpu", "deepspeed": "99.0"}.get(package, "5.6.0")

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr("lowmem_load.foreign_names.installed_release", version)
    findings = list(doctor.check_versions())
    assert about(findings, "torch 2.0.1") == [PROBLEM] and about(findings, "deepspeed 99.0, tested 0.") == [NOTE]
    assert about(findings, "transformers 5.6.0") == [OK] and about(findings, "accelerate is not installed") == [PROBLEM]


def test_a_machine_of_cpus_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert {finding.level for finding in doctor.check_compiler()} == {OK}
    monkeypatch.setenv("CXX", "'c++")
    assert about(list(doctor.check_compiler()), "does not run (No closing quotation)") == [PROBLEM]
    monkeypatch.setenv("CXX", "false")
    assert about(list(doctor.check_compiler()), "false does not run (Command") == [PROBLEM]
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    findings = list(doctor.check_compiler())
    assert [finding.level for finding in findings] == [PROBLEM, PROBLEM]
    assert about(findings, "ninja does not run") == [PROBLEM]


def test_the_command_ends_with_1_where_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Finding("a", OK, "fine"), Finding("b", PROBLEM, "broken [x]", "fix it")]
    monkeypatch.setattr(doctor, "check_versions", lambda: found)
    monkeypatch.setattr(doctor, "check_compiler", list)
    monkeypatch.setattr(doctor, "check_locks", list)
    assert app(["doctor"], standalone_mode=False) == 1
    told = capsys.readouterr().out
    assert "broken [x]" in told and "fix it" in told and "fine" in told
    found.pop()
    assert not app(["doctor", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out) == [{"area": "a", "level": "ok", "text": "fine", "advice": ""}]


def test_the_steps_of_a_job_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("node1", "node1:", ":29500", "node1:²"):
        with pytest.raises(ConfigError, match="is not HOST:PORT"):
            app(["doctor", "--store", wrong], standalone_mode=False)
    beat = {"who": "pid 7 on node1", "step": "0123/5", "title": "tiny: reading", "seconds": 12.3}
    seen = [{"prefix": "lowmem_load", "rank": 1, "silent": True, "does": "while tiny: reading", **beat}]
    monkeypatch.setattr("lowmem_load.distributed.process_group.look_into", lambda host, port: seen)
    assert not app(["doctor", "--store", "node1:29500"], standalone_mode=False)
    assert "tiny: reading" in capsys.readouterr().out
    assert not app(["doctor", "--store", "node1:29500", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)[0]["title"] == "tiny: reading"


def test_the_lock_of_a_killed_build_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    assert not about(list(doctor.check_locks()), str(lock)), "another process may build there"
    os.utime(lock, (time.time() - 7200,) * 2)
    assert about(list(doctor.check_locks()), f"{lock}: is 120 minutes old") == [PROBLEM]
