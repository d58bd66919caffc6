"""`lowmem-load doctor`: whether this machine is ready, and what to do where it is not."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from lowmem_load.cli import options
from lowmem_load.cli.output import NO, print_all, print_json, working
from lowmem_load.tables import table


def doctor(
    folder: Annotated[
        str | None, typer.Argument(help="That checkpoints lie in: its file system is looked at.", show_default=False)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Leave out what is as it should be.")] = False,
    as_json: options.Json = False,
) -> None:
    """Check this machine, and say what to do.

    Exits with 1 if there is a problem.

    Releases beside the tested ones, memory, limits, DeepSpeed's compiled ops, libaio, the file system of
    FOLDER and how fast it reads, the launcher's variables, devices and pinned memory. Run it where the job will run.

    \b
    lowmem-load doctor /models/Llama-3.1-8B
    srun --nodes 2 --ntasks-per-node 1 lowmem-load doctor /models --quiet
    """
    with working():
        from lowmem_load.doctor.checks import check_all
        from lowmem_load.doctor.finding import OK, PROBLEM

        findings = list(check_all(folder))
    problems = [finding for finding in findings if finding.level == PROBLEM]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        shown = [finding for finding in findings if not (quiet and finding.level == OK)]
        rows = [(each.level, each.area, each.found, each.advice) for each in shown]
        said = f"{len(problems)} problem{'s' * (len(problems) > 1)}" if problems else "No problems."
        print_all([table("", ("", "about", "found", "what to do"), rows), said])
    if problems:
        raise typer.Exit(NO)
