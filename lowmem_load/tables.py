"""Tables for a terminal, of whatever width. rich is imported when one is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderableType

MIN_TEXT = 20
"""Characters of a column of text at least: longer words may be cut up, shorter ones may not."""


@dataclass(frozen=True, slots=True)
class _Fitting:
    """Rows as a table where the terminal is as wide as that needs, else below each other."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        least, most = zip(*map(self._widths, range(len(self.columns))), strict=True)
        room = options.max_width - 3 * len(self.columns)  # edges, and what stands between columns
        if sum(least) > room:
            yield _records(self.columns, self.rows)
            return
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column, width in zip(self.columns, _shared(least, most, room), strict=True):
            made.add_column(column, justify="right" if column in self.right else "left", overflow="fold", width=width)
        for row in self.rows:
            made.add_row(*(Text(_printable(cell)) for cell in row))
        yield made

    def _widths(self, place: int) -> tuple[int, int]:
        """Return how wide a column is at least, and at most."""
        column = self.columns[place]
        cells = [column, *(_printable(row[place]) for row in self.rows)]
        most = max(map(len, cells))
        return most if column in self.right else max(_longest_word([column]), min(MIN_TEXT, _longest_word(cells))), most


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> Group:
    """Return a table; where it does not fit the terminal, its rows, each cell on a line with its heading.

    Args:
        title: above it, on a line of its own; "" for none.
        columns: their headings.
        rows: cells as text.
        right: headings of columns that are flush right, whose cells are not broken.
    """
    return _titled(title, _Fitting(columns, rows, right))


def facts(title: str, values: Mapping[str, str]) -> Group:
    """Return a table of names and values, without headings; empty values are left out.

    Where the terminal is too narrow, each value is on the lines below its name.
    """
    shown = {_printable(name): _printable(value) for name, value in values.items() if value}
    return _titled(title, _Facts(shown))


@dataclass(frozen=True, slots=True)
class _Facts:
    """Names and values beside each other where the terminal is as wide as that needs, else below each other."""

    values: Mapping[str, str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        if max(map(len, self.values), default=0) + 1 + MIN_TEXT > options.max_width:
            for name, value in self.values.items():
                yield Text(name, style="dim", overflow="fold")
                yield Padding(Text(value, overflow="fold"), (0, 0, 0, 2))
            return
        made = Table(box=None, show_header=False, pad_edge=False)
        made.add_column(style="dim", no_wrap=True)
        made.add_column(overflow="fold")
        for name, value in self.values.items():
            made.add_row(Text(name), Text(value))
        yield made


def _shared(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """Return widths of columns that fill the room, as far as there is something to put there."""
    widths = list(least)
    while sum(widths) < min(room, sum(most)):
        lacking = [wanted - width for wanted, width in zip(most, widths, strict=True)]
        widths[lacking.index(max(lacking))] += 1
    return widths


def _records(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Group:
    """Return rows below each other: the cells without a heading first, each other one with its heading."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = []
    for row in rows:
        named = dict(zip(columns, row, strict=True))
        unnamed = " ".join(filter(None, (cell for column, cell in zip(columns, row, strict=True) if not column)))
        parts += ["", Text(_printable(unnamed), style="bold")] if unnamed else [""]
        of_row = facts("", {column: cell for column, cell in named.items() if column})
        parts.append(Padding(of_row, (0, 0, 0, 2 if unnamed else 0)))
    return Group(*parts, "")


def _longest_word(texts: Sequence[str]) -> int:
    return max((len(word) for text in texts for word in text.split()), default=0)


def _printable(text: str) -> str:
    """Return a text with what steers a terminal escaped: names in headers are untrusted."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def _titled(title: str, made: RenderableType) -> Group:
    """Return a renderable with its title on a line of its own: rich would fold that to the width of the table."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(_printable(title), style="bold"), made) if title else Group(made)
