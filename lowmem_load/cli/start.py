"""The command `lowmem-load`: its subcommands, which import heavy modules when they run, and its exit codes."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from importlib.metadata import version as distribution_version
from types import FrameType
from typing import Annotated

import typer

from lowmem_load.cli.commands import consolidate
from lowmem_load.cli.common import FAILED, exit_code, printable
from lowmem_load.cli.doctor import doctor
from lowmem_load.cli.plan import plan
from lowmem_load.errors import LowMemLoadError
from lowmem_load.integrations.startup_hook import switched_on

NOT_FOUND, NOT_EXECUTABLE, INTERRUPTED = 127, 126, 128 + signal.SIGINT
"""Exit codes of `run`, and after Ctrl-C, as in shells."""

app = typer.Typer(
    name="lowmem-load",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help text: rich is slow to import
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"lowmem-load {distribution_version('lowmem-load')}")
        raise typer.Exit


@app.callback()
def lowmem_load(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Load Hugging Face models straight into DeepSpeed ZeRO-3 partitions and FSDP2 shards.

    Exit codes: 0 done, or yes; 1 no (it does not fit, or there is a problem); 2 wrong arguments or ds_config; 3 the
    checkpoint cannot be used; 4 not supported; 5 another error; 130 interrupted. `run` exits with the code of its
    command.
    """


# Options after the command's name belong to that command.
@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="Command to start, with its arguments.", show_default=False),
    ],
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Fail instead of falling back to the default loader, or if a model is loaded too early."
        ),
    ] = False,
    stream: Annotated[
        bool,
        typer.Option("--stream", help="Read models from the Hub by ranges, without downloading them to its cache."),
    ] = False,
) -> None:
    """Start a launcher or a script with lowmem_load switched on, in all processes that it starts.

    It works like `lowmem_load.install()` at the top of the training script. Models load straight into partitions or
    shards while ZeRO-3 or FSDP2 is active. How sharded models are saved, how ZeRO-3 checkpoints of other rank counts
    are resumed, and how TRL sends weights to vLLM change, too. LOWMEM_LOAD_INSTALL=0 turns it off for a process.

    \b
    lowmem-load run -- torchrun --nproc-per-node 8 train.py
    lowmem-load run -- accelerate launch --config_file fsdp2.yaml train.py
    """
    # Replace this process, so that signals and the exit code are the command's own.
    try:
        os.execvpe(command[0], command, switched_on(os.environ, strict=strict, stream=stream))
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        typer.echo(f"lowmem-load run: {command[0]}: {error.strerror}", err=True)
        raise typer.Exit(NOT_FOUND if is_missing else NOT_EXECUTABLE) from None


for command in (plan, doctor, consolidate):
    app.command()(command)


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
        app(prog_name="lowmem-load")
    except BaseException as error:
        # An interrupt may arrive as another error: transformers' imports convert it.
        if interrupts:
            sys.exit(INTERRUPTED)
        if isinstance(error, SystemExit):
            raise
        if not isinstance(error, LowMemLoadError):
            traceback.print_exception(error)
            sys.exit(FAILED)
        print(printable(f"lowmem-load: {error}"), file=sys.stderr)  # noqa: T201
        sys.exit(exit_code(error))
    finally:
        signal.signal(signal.SIGINT, before)
