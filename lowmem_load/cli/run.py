"""`lowmem-load run`: start any launcher with lowmem_load switched on."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from lowmem_load.startup.environment import switched_on

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes that shells use for the same."""


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="What to run, with its arguments.", show_default=False)
    ],
    strict: Annotated[
        bool, typer.Option("--strict", help="A load that cannot be streamed is an error, not left to stock ZeRO-3.")
    ] = False,
) -> None:
    """Run a launcher or a script with lowmem_load switched on.

    In it, and in every process that it starts.

    As `lowmem_load.install()` at the top of the training script would: models load straight into partitions while
    ZeRO-3 is active in transformers. Nothing else changes.

    lowmem-load run -- llamafactory-cli train config.yaml
    """
    # The launcher takes the place of this process, so that signals and the exit code are its own.
    try:
        os.execvpe(command[0], command, switched_on(os.environ, strict=strict))
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        typer.echo(f"lowmem-load run: {command[0]}: {error.strerror}", err=True)
        raise typer.Exit(NOT_FOUND if is_missing else NOT_EXECUTABLE) from None
