"""Check a built site offline: `python docs/check_site.py build/site`.

Every link to a page, a heading or a file leads somewhere, and nothing is fetched from elsewhere when a page is looked
at: no font, script, style or picture.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {"img": "src", "script": "src", "iframe": "src", "link": "href", "source": "src"}
# Links of <link> that name a page and fetch nothing.
NAMED = {"next", "prev", "index", "search", "canonical"}


class Page(HTMLParser):
    """The links, anchors and fetched resources of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.fetched: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what one tag says."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        if tag in FETCHED and FETCHED[tag] in values:
            is_page = tag == "link" and values.get("rel") in NAMED
            (self.links if is_page else self.fetched).add(values[FETCHED[tag]])


def problems(site: Path) -> list[str]:
    """Return a line for each dead link and each resource from elsewhere."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    lines = [] if pages else [f"{site}: no pages"]
    for path, page in pages.items():
        where = path.relative_to(site.resolve())
        lines += [f"{where}: fetches {url}" for url in sorted(page.fetched) if urlsplit(url).netloc]
        for url in sorted(page.links | page.fetched):
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                lines.append(f"{where}: {url} leads nowhere")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                lines.append(f"{where}: {url} has no such heading")
    return lines


if __name__ == "__main__":
    found = problems(Path(sys.argv[1]))
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(list(Path(sys.argv[1]).rglob('*.html')))} pages, {len(found)} problem(s)")
    sys.exit(bool(found))
