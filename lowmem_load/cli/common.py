"""What subcommands share: arguments and options, exit codes, and the answer on stdout, as JSON or as tables."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowmem_load.errors import CheckpointError, ConfigError, IncompatibleVersionError, LowMemLoadError, UnsupportedError

if TYPE_CHECKING:
    from rich.console import RenderableType

YES, NO, USAGE, CHECKPOINT, UNSUPPORTED, FAILED = 0, 1, 2, 3, 4, 5
"""Exit codes: done, and the answer is yes; the answer is no, or something was found; arguments or ds_config that cannot
be used; a checkpoint that cannot; a combination or release that is not supported; any other error of ours."""

Name = Annotated[str, typer.Argument(metavar="NAME", help="A local folder, or a Hub id.", show_default=False)]
Subfolder = Annotated[str, typer.Option(help="Of the folder or the Hub id, that holds the weights.")]
Revision = Annotated[str | None, typer.Option(help="Of a Hub id: a branch, tag or commit.")]
AutoClass = Annotated[
    str | None, typer.Option(help="A class of transformers; by default the one that the checkpoint's config names.")
]
TrustRemoteCode = Annotated[bool, typer.Option(help="Run code that comes with the checkpoint.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


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
    """Print tables and lines one below the other. What is piped is as wide as it needs to be."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    console = Console(highlight=False, soft_wrap=False, width=wide)
    for part in parts:
        console.print(part, markup=False)
