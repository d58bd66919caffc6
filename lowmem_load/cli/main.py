"""The command `lowmem-load`. What a subcommand needs besides the standard library it imports when it runs."""

from __future__ import annotations

import typer

from lowmem_load.cli.bench import bench
from lowmem_load.cli.consolidate import consolidate
from lowmem_load.cli.doctor import doctor
from lowmem_load.cli.inspect import inspect
from lowmem_load.cli.plan import plan
from lowmem_load.cli.report import report
from lowmem_load.cli.run import run
from lowmem_load.cli.verify import verify

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


for command in (inspect, plan, doctor, bench, verify, consolidate, report):
    app.command()(command)
# Options after the command's own name are that command's.
app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})(run)
