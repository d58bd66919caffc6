"""What subcommands share: exit codes, JSON or tables on stdout, and everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lowmem_load.errors import CheckpointError, ConfigError, IncompatibleVersionError, LowMemLoadError, UnsupportedError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

YES, NO, USAGE, CHECKPOINT, UNSUPPORTED, FAILED = 0, 1, 2, 3, 4, 5
"""Exit codes: done, and the answer is yes; the answer is no, or something was found; arguments or ds_config that cannot
be used; a checkpoint that cannot; a combination or release that is not supported; any other error of ours."""


def exit_code(error: LowMemLoadError) -> int:
    """Return the exit code that an error ends a command with."""
    if isinstance(error, ConfigError):
        return USAGE
    if isinstance(error, CheckpointError):
        return CHECKPOINT
    return UNSUPPORTED if isinstance(error, UnsupportedError | IncompatibleVersionError) else FAILED


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Inside, what libraries print goes to stderr, and transformers says little: stdout is for the answer."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with contextlib.redirect_stdout(sys.stderr):
        yield


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def print_all(parts: Sequence[RenderableType]) -> None:
    """Print tables and lines one below the other."""
    shown = console()
    for part in parts:
        shown.print(part, markup=False)


def console() -> Console:
    """Return the console of stdout. What is piped is as wide as it needs to be."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    return Console(highlight=False, soft_wrap=False, width=wide)
