"""Compiles extensions of DeepSpeed, and a device for tests: `python -m tests.build_extensions shm_comm async_io`.

It may be interrupted or killed at any time: the next run takes up what is missing. Where one cannot be built it says
so, and ends with status 1.
"""

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable

from tests.ranks import set_environment

set_environment()

from deepspeed.ops.op_builder import CPUAdamBuilder  # noqa: E402

from lowmem_load.engines.ops import load_async_io, load_op, load_shm_comm  # noqa: E402
from tests.device.build import build as build_simulated_device  # noqa: E402

LOAD: dict[str, Callable[[], object]] = {
    "shm_comm": load_shm_comm,  # communication of CPU ranks
    "async_io": load_async_io,  # offload to nvme
    "cpu_adam": lambda: load_op(CPUAdamBuilder()),  # offload of the optimizer
    "simulated_device": build_simulated_device,  # an accelerator for tests
}


def build(name: str) -> bool:
    """Returns whether the extension is there now."""
    start = time.perf_counter()
    try:
        LOAD[name]()
    except (ImportError, OSError, RuntimeError) as error:
        print(f"{name} cannot be built: {error}", file=sys.stderr)
        return False
    print(f"{name} is ready, after {time.perf_counter() - start:.0f} s", flush=True)
    return True


def main(names: list[str]) -> bool:
    """Returns whether all are there now."""
    logging.basicConfig(format="%(message)s")
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        print(f"no C++ compiler ({compiler}), so {', '.join(names)} cannot be built", file=sys.stderr)
        return False
    return all([build(name) for name in names])  # noqa: C419  all are tried


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:]) else 1)
