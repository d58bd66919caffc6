"""What subcommands share: options, exit codes, and the answer on stdout as JSON or as tables."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowmem_load.errors import CheckpointError, ConfigError, IncompatibleVersionError, LowMemLoadError, UnsupportedError

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

YES, NO, USAGE, CHECKPOINT, UNSUPPORTED, FAILED = 0, 1, 2, 3, 4, 5
"""Exit codes: done, and the answer is yes; the answer is no, or something was found; unusable arguments or ds_config;
an unusable checkpoint; an unsupported combination or release; any other error."""

PIPE_WIDTH = 100
"""Columns of tables that do not go to a terminal."""

Name = Annotated[str, typer.Argument(metavar="NAME", help="A folder, a Hub id or a URL.", show_default=False)]
Subfolder = Annotated[str, typer.Option(help="Subfolder that holds the weights.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")]
AutoClass = Annotated[
    str | None, typer.Option(help="Class of transformers to load with. Default: the one that config.json names.")
]
TrustRemoteCode = Annotated[bool, typer.Option(help="Run code that comes with the checkpoint.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def check_revision(name: str, revision: str | None) -> None:
    """Raise ConfigError if a revision is given of what has none."""
    if revision is not None and ("://" in name or os.path.isdir(name)):
        kind = "URL" if "://" in name else "local folder"
        raise ConfigError(f"--revision {revision}: {name} is a {kind}, which has no revisions; drop the option")


def exit_code(error: LowMemLoadError) -> int:
    """Return the exit code for an error that ends a command."""
    if isinstance(error, ConfigError):
        return USAGE
    if isinstance(error, CheckpointError):
        return CHECKPOINT
    return UNSUPPORTED if isinstance(error, UnsupportedError | IncompatibleVersionError) else FAILED


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Send what libraries print inside the block to stderr, and quieten transformers: stdout is for the answer."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with contextlib.redirect_stdout(sys.stderr):
        yield


def answer(as_json: bool, value: Any, tables: Callable[[], Sequence[RenderableType]]) -> None:
    """Print the answer of a command: `value` as JSON, or the tables and lines one below the other."""
    if as_json:
        sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")
        return
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    console = Console(highlight=False, soft_wrap=False, width=width)
    for part in tables():
        is_line = isinstance(part, str)
        console.print(printable(part) if isinstance(part, str) else part, markup=False, soft_wrap=is_line)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> Group:
    """Return a table below a title; "" for no title. Columns named in `right` are flush right and never wrapped.

    A column without any value is left out.
    """
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    if columns and rows:
        kept = [any(cells) for cells in zip(*rows, strict=True)]
        columns = list(itertools.compress(columns, kept))
        rows = [list(itertools.compress(row, kept)) for row in rows]

    made = Table(box=box.SIMPLE_HEAD if columns else None, pad_edge=False, show_header=bool(columns))
    if not columns:  # names and values
        made.add_column(style="dim", no_wrap=True)
        made.add_column(overflow="fold")
    for column in columns:
        is_right = column in right
        made.add_column(
            column, justify="right" if is_right else "left", no_wrap=is_right or column == "file", overflow="fold"
        )
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    # The title has a line of its own: rich would wrap it to the width of the table.
    return Group(Text(printable(title), style="bold"), made) if title else Group(made)


def facts(title: str, values: Mapping[str, str]) -> Group:
    """Return a table of names and values without headings. Empty values are left out."""
    return table(title, (), [item for item in values.items() if item[1]])


def printable(text: str) -> str:
    """Return text without characters that control a terminal: names in file headers are untrusted."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
