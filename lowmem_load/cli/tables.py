"""Tables for a terminal. rich is imported when one is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.text import Text


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> Group:
    """Return a table.

    The title is above it, on a line of its own; "" for none. `right` are headings of columns of figures: flush right,
    and not wrapped.
    """
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        is_right = column in right
        made.add_column(column, justify="right" if is_right else "left", no_wrap=is_right, overflow="fold")
    for row in rows:
        made.add_row(*map(_text, row))
    return _titled(title, made)


def facts(title: str, values: Mapping[str, str]) -> Group:
    """Return a table of names and values, without headings; empty values are left out."""
    from rich.table import Table

    made = Table(box=None, show_header=False, pad_edge=False)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in values.items():
        if value:
            made.add_row(_text(name), _text(value))
    return _titled(title, made)


def _titled(title: str, made: RenderableType) -> Group:
    """Return a renderable with its title on a line of its own: rich would fold that to the width of the table."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(_printable(title), style="bold"), made) if title else Group(made)


def _text(cell: str) -> Text:
    from rich.text import Text

    return Text(_printable(cell))


def _printable(text: str) -> str:
    """Return a text with what steers a terminal escaped: names in headers are untrusted."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)
