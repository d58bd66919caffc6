"""Describes the machine and the releases that a figure was measured on."""

from __future__ import annotations

import datetime as dt
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "transformers", "deepspeed", "safetensors")


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str
    num_cores: int
    ram_bytes: int
    gpu: str | None
    system: str
    python: str
    versions: dict[str, str]
    date: str

    def lines(self) -> list[str]:
        ram_gib = self.ram_bytes / 2**30
        return [
            f"machine: {self.cpu}, {self.num_cores} cores, {ram_gib:.1f} GiB RAM, GPU: {self.gpu or 'none'}",
            f"versions: python {self.python}, {self.versions_text()}; {self.system}; {self.date}",
        ]

    def versions_text(self) -> str:
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())


def describe_machine() -> Machine:
    import torch

    gpu = None
    if torch.cuda.is_available():
        gpu = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return Machine(
        cpu=_cpu_model(),
        num_cores=len(os.sched_getaffinity(0)),
        ram_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        gpu=gpu,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        versions={name: metadata.version(name) for name in PACKAGES},
        date=dt.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z"),
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
