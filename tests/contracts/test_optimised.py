"""Under python -O, which drops asserts, another DeepSpeed is refused as well."""

from __future__ import annotations

import subprocess
import sys

from tests.ranks import REPO

PROGRAM = """
assert False, "asserts are kept: this is not python -O"
import deepspeed.runtime.zero.partition_parameters as owner
del owner.ZeroParamStatus
try:
    import lowmem_load.ds.partition
except ImportError as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_a_deepspeed_without_a_name_is_refused() -> None:
    done = subprocess.run([sys.executable, "-O", "-c", PROGRAM], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    message = done.stdout.splitlines()[-1]
    assert message.startswith("IncompatibleVersionError: deepspeed "), message
    assert ".ZeroParamStatus." in message and "; lowmem_load works with deepspeed 0" in message
