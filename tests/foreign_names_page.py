"""Writes docs/reference/foreign_names.md: the functions of other packages that lowmem_load replaces."""

from __future__ import annotations

from collections.abc import Iterator

from lowmem_load.foreign_names import TABLE, ForeignName
from tests.ranks import REPO

PAGE = REPO / "docs" / "reference" / "foreign_names.md"

HEAD = """# Foreign names

Functions and attributes of other packages that lowmem_load replaces during a load or save, or from `install()` until
`uninstall()`; then they are back in their places. Before a load, a save or `install()` replaces anything, it checks its
names. Where a release lacks a *required* name, it raises `IncompatibleVersionError`. Where it lacks another, it warns,
and the user loses what the table says. "Until 4.57": the last release that has the name. Written by `python -m
tests.foreign_names_page`; the table itself is `lowmem_load/foreign_names.py`.
"""


def page() -> str:
    """Return the text of the page."""
    return "\n".join([HEAD, *_tables()])


def _tables() -> Iterator[str]:
    for releases in dict.fromkeys(name.releases for name in TABLE):
        yield f"## {releases.package}\n\nSupported from {releases.oldest}; last checked with {releases.newest}.\n"
        yield "| name | replaced by | missing, the user loses |\n|---|---|---|"
        yield from (_row(name) for name in TABLE if name.releases == releases)
        yield ""


def _row(name: ForeignName) -> str:
    since = f", since {name.since}" if name.since else ""
    until = f", until {name.until.replace('.99', '')}" if name.until else ""
    handlers = ", ".join(f"`{handler}`" for handler in name.handlers.split(", "))
    return f"| `{name}`{since}{until} | {handlers} | {name.loss or '*required*'} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
