"""`lowmem-load doctor`: what this machine lacks for a load, and what to do."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from lowmem_load.engines.ops import old_locks
from lowmem_load.foreign_names import ACCELERATE, DEEPSPEED, TORCH, TRANSFORMERS, is_release_between

OK, NOTE, PROBLEM = "ok", "note", "problem"
"""Levels of findings. A problem makes a run fail or go wrong unless it is fixed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: its subject, such as "versions", its level, the finding in words, and what to do; "" for nothing."""

    area: str
    level: str
    text: str
    advice: str = ""


def check_versions() -> Iterator[Finding]:
    """Compare the installed releases with the supported ones, without importing them."""
    for package, oldest, newest in (TORCH, TRANSFORMERS, DEEPSPEED, ACCELERATE):
        try:
            text = f"{package} {importlib.metadata.version(package)}, tested {oldest} to {newest}"
        except importlib.metadata.PackageNotFoundError:
            yield Finding("versions", PROBLEM, f"{package} is not installed", f"pip install {package}")
            continue
        if not is_release_between(package, oldest):
            yield Finding("versions", PROBLEM, text, f"install {package} {oldest} or later")
        elif not is_release_between(package, "0", newest):
            advice = "newer than what was tested: watch the first run, or install a tested one"
            yield Finding("versions", NOTE, text, advice)
        else:
            yield Finding("versions", OK, text)


def check_compiler() -> Iterator[Finding]:
    """Check that DeepSpeed can compile what its CPU ranks need, the first time that they start.

    Source: deepspeed 0.19.8 `comm/torch.py`, `build_shm_op`; torch 2.13 `utils/cpp_extension.py`.
    """
    import torch

    if torch.accelerator.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu":
        return
    for tool, package in ((os.environ.get("CXX", "c++"), "g++"), ("ninja", "ninja")):
        try:
            subprocess.run([*shlex.split(tool), "--version"], capture_output=True, check=True, timeout=60)
            yield Finding("compiler", OK, f"{tool} runs")
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            text = f"{tool} does not run ({error}), with which DeepSpeed compiles its deepspeed_shm_comm for CPU ranks"
            yield Finding("compiler", PROBLEM, text, f"install {package}, and have it on PATH")


def check_locks() -> Iterator[Finding]:
    """Look for locks of killed builds, at which DeepSpeed waits silently."""
    for text in old_locks():
        yield Finding("compiler", PROBLEM, text, "delete it if nobody builds there")
