"""How Sphinx makes the documentation site: `make docs`.

The sources are the Markdown files of the repository as they are, so that every link works on GitHub as well.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

project = "lowmem_load"
author = "The lowmem_load developers"
copyright = f"2026, {author}"  # noqa: A001  the name is Sphinx's
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

extensions = ["myst_parser"]

# The source folder is the repository. What is a page:
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "*/RESULTS.md", "tests/README.md", "tests/*/README.md", "tests/*/RESULTS.md"]
exclude_patterns = [".*", "build", "dist", "lowmem_load", "examples"]

myst_heading_anchors = 4  # as GitHub makes them, so that links to headings are checked
myst_links_external_new_tab = False
suppress_warnings = ["myst.header"]  # a page may begin below its first level

smartquotes = False  # "auto" is what one types

html_theme = "furo"
html_title = f"lowmem_load {release}"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
html_extra_path = ["site/index.html"]  # the root of the site leads to its first page
html_copy_source = False
html_show_sphinx = False
