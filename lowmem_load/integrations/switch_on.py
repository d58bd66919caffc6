"""What happens in a process before its first load, where the environment has switched lowmem_load on."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from lowmem_load.errors import LowMemLoadError
from lowmem_load.integrations.startup_environment import OFF, ON, STRICT, SWITCH

if TYPE_CHECKING:
    from lowmem_load.report import LoadReport

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables in which launchers give a process its rank, in the order in which they are believed."""


def switch_on() -> None:
    """Call `install`; say so on rank 0, and there at the end of each load what it read and held.

    Raises:
        LowMemLoadError: `install` cannot be called here, or the environment asks for what it does not know. No
            `ImportError`, even where that is the cause: code around a load may take one for an absent extra.
    """
    asked = os.environ.get(SWITCH, ON)
    if asked not in (ON, STRICT):
        raise LowMemLoadError(f"{SWITCH} is {asked!r}; expected {ON}, {STRICT}, or {OFF} to leave lowmem_load off")
    try:
        from lowmem_load.integrations.install import install

        install(strict=asked == STRICT, on_load=_say_done)
    except (ImportError, LowMemLoadError) as error:
        raise LowMemLoadError(
            f"lowmem_load is switched on for this process, and cannot be installed in it: {error}\n"
            f"To go on without it, start the job without `lowmem-load run`, or with {SWITCH}={OFF}"
        ) from error
    if next((os.environ[name] for name in RANKS if os.environ.get(name)), "0") == "0":
        _say("on: models that are loaded while ZeRO-3 is active go straight into its partitions")


def _say_done(report: LoadReport) -> None:
    if report.rank == 0:
        _say(report.summary())


def _say(text: str) -> None:
    sys.stderr.write(f"lowmem_load: {text}\n")
    sys.stderr.flush()
