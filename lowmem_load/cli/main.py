"""The command `lowmem-load`. What a subcommand needs besides the standard library it imports when it runs."""

from __future__ import annotations

import typer

from lowmem_load.cli.run import run

app = typer.Typer(
    name="lowmem-load",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help as plain text: rich takes longer to import than all else here
)


@app.callback()
def lowmem_load() -> None:
    """Load Hugging Face models straight into DeepSpeed ZeRO-3 partitions."""


# Options after the command's own name are that command's.
app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})(run)


def main() -> None:
    """Run the command line of this process."""
    app(prog_name="lowmem-load")
