"""Compiles the simulated device: in about a minute, once, until its sources change."""

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

SOURCES = Path(__file__).with_name("native")
NAME = "simulated_device"


def build() -> Path:
    """Returns the compiled extension; compiled first if there is none of these sources and this torch.

    Raises:
        RuntimeError: it cannot be compiled.
    """
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"], NAME)
    folder.mkdir(parents=True, exist_ok=True)
    compiled = folder / f"{NAME}-{_digest()}.so"
    with (folder / "build.lock").open("w") as lock:  # the system drops it with a process that is killed
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not compiled.exists():
            fresh = folder / f"{NAME}.new"
            run = subprocess.run(_command(fresh), capture_output=True, text=True, check=False)
            if run.returncode != 0:
                raise RuntimeError(f"{SOURCES}: cannot be compiled:\n{run.stderr}")
            fresh.replace(compiled)
    return compiled


def _digest() -> str:
    found = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for source in sorted(SOURCES.iterdir()):
        found.update(source.read_bytes())
    return found.hexdigest()[:16]


def _command(output: Path) -> list[str]:
    from torch.utils import cpp_extension

    libraries = cpp_extension.library_paths()
    return [
        os.environ.get("CXX", "c++"),
        *("-O1", "-std=c++20", "-fPIC", "-shared", "-Wall", "-Wno-unknown-pragmas", f"-DTORCH_EXTENSION_NAME={NAME}"),
        *(f"-isystem{path}" for path in [*cpp_extension.include_paths(), sysconfig.get_path("include")]),
        *(str(SOURCES / "module.cpp"), "-o", str(output)),
        *(f"-L{path}" for path in libraries),
        *("-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"),
    ]


if __name__ == "__main__":
    sys.exit(0 if build() else 1)
