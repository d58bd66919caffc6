"""Writes docs/development/foreign_names.md: the functions of other packages that lowmem_load replaces."""

from collections.abc import Iterator

from lowmem_load.foreign_names import TABLE, ForeignName
from tests.ranks import REPO

PAGE = REPO / "docs" / "development" / "foreign_names.md"

HEAD = """# Foreign names

lowmem_load replaces these functions and attributes of other packages during a load or save, or from `install()` on, and
then puts them back. Before it replaces anything, it checks that they exist, and that they take the parameters in
parentheses: those before a `*` as the first ones, in this order, and those after it by name. It passes on all others.
If a function was defined or replaced by another package, its parameters are not checked. Where a release lacks a
*required* function, or changes these parameters, lowmem_load raises `IncompatibleVersionError`; for any other it warns,
and the table says what is lost. "Until 5.12": the last release that has it. Written by `python -m
tests.foreign_names_page` from `lowmem_load/foreign_names.py`.
"""


def page() -> str:
    """Return the text of the page."""
    return "\n".join([HEAD, *_tables()])


def _tables() -> Iterator[str]:
    for releases in dict.fromkeys(name.releases for name in TABLE):
        yield f"## {releases.package}\n\nSupported from {releases.oldest}; last checked with {releases.newest}.\n"
        names = [name for name in TABLE if name.releases == releases]
        if required := [f"{name}{_releases(name)}" for name in names if not name.loss]:
            yield "\n".join(["Required:\n", "```text", *required, "```\n"])
        if losses := dict.fromkeys(name.loss for name in names if name.loss):
            yield "| name | without it |\n|---|---|"
            for loss in losses:
                yield f"| {', '.join(f'`{name}`{_releases(name)}' for name in names if name.loss == loss)} | {loss} |"
            yield ""


def _releases(name: ForeignName) -> str:
    """Return which releases have the name, where not all have it."""
    since = f"since {name.since}" if name.since else ""
    until = f"until {name.until.replace('.99', '')}" if name.until else ""
    return f" ({', '.join(filter(None, (since, until)))})" if since or until else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
