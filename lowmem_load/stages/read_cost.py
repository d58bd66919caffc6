"""What reading costs where this process runs: the defaults, or what its environment says."""

from __future__ import annotations

import os
from collections.abc import Iterable

from lowmem_load.errors import ConfigError
from lowmem_load.planning.cooperative import Sharing
from lowmem_load.planning.reads import LOCAL, ReadCost
from lowmem_load.ranks.environment import positive_number
from lowmem_load.read.mounts import NETWORK_BYTES_PER_S, NETWORK_CALL_S, network_of

CALL_US, MB_PER_S = "LOWMEM_LOAD_READ_CALL_US", "LOWMEM_LOAD_READ_MB_PER_S"
"""Variables of the environment: microseconds of a read, and the 10**6 bytes that a thread reads in a second."""

BLOCK_BYTES = "LOWMEM_LOAD_BLOCK_BYTES"
"""Variable of the environment: bytes of the blocks that the file system reads whole."""


def read_cost(paths: Iterable[str] = ()) -> ReadCost:
    """Return what reading files costs: as the environment says, else as their file systems are known to.

    Args:
        paths: of the files.

    Raises:
        ConfigError: a variable of the environment is no positive number.
    """
    network = network_of(paths)
    default = ReadCost(NETWORK_CALL_S, NETWORK_BYTES_PER_S) if network.kind else ReadCost()
    call_us = positive_number(CALL_US, default.call_s * 1e6, "microseconds")
    mb_per_s = positive_number(MB_PER_S, default.bytes_per_s / 1e6, "MB/s")
    block_bytes = stated_block_bytes() or network.block_bytes
    stated = [name for name in (CALL_US, MB_PER_S, BLOCK_BYTES) if os.environ.get(name)]
    return ReadCost(call_us / 1e6, mb_per_s * 1e6, block_bytes, ", ".join([network.kind or LOCAL, *stated]))


def stated_block_bytes() -> int:
    """Return the bytes of a block that the environment states; 0 if it does not.

    Raises:
        ConfigError: the variable of the environment is no positive whole number.
    """
    return _positive_integer(BLOCK_BYTES, "bytes")


SHARE_READS = "LOWMEM_LOAD_SHARE_READS"
"""Variable of the environment: whether ranks read together, "auto", "off" or "on"; see `Sharing`."""


DROP_BEHIND = "LOWMEM_LOAD_DROP_BEHIND"
"""Variable of the environment: "1" lets go of the page cache of what was read."""


def drops_behind() -> bool:
    """Return whether the page cache of what was read is let go of.

    Raises:
        ConfigError: the variable of the environment holds something else than 0 or 1.
    """
    text = os.environ.get(DROP_BEHIND) or "0"
    if text not in ("0", "1"):
        raise ConfigError(f"{DROP_BEHIND}: the environment has {text!r}, expected 0 or 1")
    return text == "1"


def sharing() -> Sharing:
    """Return which reads ranks do together.

    Raises:
        ConfigError: the variable of the environment holds something else.
    """
    text = os.environ.get(SHARE_READS) or Sharing.AUTO.value
    try:
        return Sharing(text)
    except ValueError:
        raise ConfigError(f"{SHARE_READS}: the environment has {text!r}, expected auto, off or on") from None


def _positive_integer(name: str, unit: str) -> int:
    text = os.environ.get(name)
    if not text:
        return 0
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if number < 1:
        raise ConfigError(f"{name}: the environment has {text!r}, expected a positive whole number of {unit}")
    return number
