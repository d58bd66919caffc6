"""The entry point of `lowmem-load`: gives every outcome its exit code. Imports the rest when it runs."""

from __future__ import annotations

import signal
import sys
import traceback
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, as in shells."""


def main() -> None:
    """Run the command line of this process."""
    interrupts: list[int] = []

    def interrupted(number: int, _: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else a shell has it ignored, for a background job
        signal.signal(signal.SIGINT, interrupted)
    try:
        from lowmem_load.cli.main import app

        app(prog_name="lowmem-load")
    except BaseException as error:  # noqa: BLE001 - Python's own exit code 1 means "no" here
        # An interrupt may arrive as another error: transformers' imports convert it, and it ends the ranks of bench.
        sys.exit(INTERRUPTED if interrupts else _exit_code(error))
    finally:
        signal.signal(signal.SIGINT, before)


def _exit_code(error: BaseException) -> str | int | None:
    if isinstance(error, SystemExit):
        return error.code
    from lowmem_load.cli.common import FAILED, exit_code
    from lowmem_load.errors import LowMemLoadError

    if isinstance(error, LowMemLoadError):
        print(f"lowmem-load: {error}", file=sys.stderr)  # noqa: T201
        return exit_code(error)
    traceback.print_exception(error)
    return FAILED
