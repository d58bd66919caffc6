"""What reading costs where this process runs: the defaults, or what its environment says."""

from __future__ import annotations

import os

from lowmem_load.errors import ConfigError
from lowmem_load.planning.reads import ReadCost

CALL_US, MB_PER_S = "LOWMEM_LOAD_READ_CALL_US", "LOWMEM_LOAD_READ_MB_PER_S"
"""Variables of the environment: microseconds of a read, and the 10**6 bytes that a thread reads in a second."""


def read_cost() -> ReadCost:
    """Return what reading costs.

    Raises:
        ConfigError: a variable of the environment is no positive number.
    """
    default = ReadCost()
    return ReadCost(_number(CALL_US, default.call_s * 1e6) / 1e6, _number(MB_PER_S, default.bytes_per_s / 1e6) * 1e6)


def _number(name: str, default: float) -> float:
    text = os.environ.get(name) or str(default)
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise ConfigError(f"{name}: the environment has {text!r}, expected a positive number")
    return number
