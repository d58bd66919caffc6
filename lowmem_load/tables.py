"""Tables for a terminal. rich is imported when one is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> Table:
    """Return a table.

    Args:
        title: above it.
        columns: their headings.
        rows: cells as text.
        right: headings of columns that are flush right.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def facts(title: str, values: Mapping[str, str]) -> Table:
    """Return a table of names and values, without headings."""
    from rich.table import Table
    from rich.text import Text

    made = Table(
        title=Text(title), title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False
    )
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in values.items():
        if value:
            made.add_row(name, Text(value))
    return made
