"""Arguments and options that several subcommands take, each alike in all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Name = Annotated[str, typer.Argument(metavar="NAME", help="A local folder, or a Hub id.", show_default=False)]
Subfolder = Annotated[str, typer.Option(help="Of the folder or the Hub id, that holds the weights.")]
Revision = Annotated[str | None, typer.Option(help="Of a Hub id: a branch, tag or commit.")]
AutoClass = Annotated[
    str | None, typer.Option(help="A class of transformers; by default the one that the checkpoint's config names.")
]
TrustRemoteCode = Annotated[bool, typer.Option(help="Run code that comes with the checkpoint.")]
Dequantize = Annotated[bool, typer.Option(help="Load a checkpoint in fp8 or mxfp4 dequantized.")]
Png = Annotated[Path | None, typer.Option(help="Draw it to this file (needs matplotlib).", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
