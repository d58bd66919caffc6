"""`lowmem-load verify`: are the files of a checkpoint what they should be."""

from __future__ import annotations

from dataclasses import asdict

import typer

from lowmem_load.cli import options
from lowmem_load.cli.output import NO, print_all, print_json, working
from lowmem_load.quantities import size
from lowmem_load.tables import table


def verify(
    name: options.Name,
    subfolder: options.Subfolder = "",
    revision: options.Revision = None,
    as_json: options.Json = False,
) -> None:
    """Compare the files of a checkpoint with their checksums.

    Nothing is fetched.

    Known are those that the Hub gave with a download, and those of SHA256SUMS or *.sha256 beside the files. Exits with
    1 if there are files of weights of which nothing is known, with 3 if one differs.

    \b
    lowmem-load verify /models/Llama-3.1-8B
    lowmem-load verify meta-llama/Llama-3.1-8B      (what is in the cache of the Hub)
    """
    with working():
        from lowmem_load.integrity.files import verify_checkpoint

        checks = verify_checkpoint(name, subfolder=subfolder, revision=revision)
    if as_json:
        print_json([{**asdict(check), "is_proven": check.is_proven} for check in checks])
    else:
        rows = [
            (
                check.path.rpartition("/")[2],
                size(check.nbytes),
                check.algorithm,
                check.found[:16],
                "as expected" if check.is_proven else "nothing to compare with",
                check.origin or "",
            )
            for check in checks
        ]
        columns = ("file", "size", "algorithm", "digest", "result", "known from")
        print_all([table(name, columns, rows, right=("size",))])
    if not all(check.is_proven for check in checks):
        raise typer.Exit(NO)
