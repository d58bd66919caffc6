"""The command `lowmem-load`. What a subcommand needs besides the standard library it imports when it runs."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from lowmem_load.cli.files_command import consolidate, verify
from lowmem_load.cli.inspect_command import inspect
from lowmem_load.cli.machine_command import bench, doctor
from lowmem_load.cli.plan_command import plan
from lowmem_load.cli.report_command import report
from lowmem_load.integrations.startup_environment import switched_on

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes of `run` that shells use for the same."""

app = typer.Typer(
    name="lowmem-load",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help as plain text: rich takes longer to import than all else here
)


@app.callback()
def lowmem_load() -> None:
    """Load Hugging Face models straight into DeepSpeed ZeRO-3 partitions.

    Exit codes: 0 done, and the answer is yes; 1 the answer is no (does not fit, differs, something was found);
    2 arguments or a ds_config that cannot be used; 3 a checkpoint that cannot be used; 4 not supported; 5 another
    error; 130 interrupted. `run` has that of its command.
    """


# Options behind the name of the command that is run are that command's.
@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
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


for command in (inspect, plan, doctor, bench, verify, consolidate, report):
    app.command()(command)
