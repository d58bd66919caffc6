"""A directive for Sphinx that writes out the docstrings of public names: `.. public:: load_model`.

A class that users get but do not import stands there with its folder: `.. public:: saving.SaveReport`.

It reads the source and imports nothing of it, so that the site is built without torch.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util.docutils import SphinxDirective

PACKAGE = Path(__file__).resolve().parents[1] / "lowmem_load"

# Of a function's docstring, beside the sections that everybody has: a line or two, not indented.
FIELDS = "Collective|Local|Memory|Shape|Units|Source"

Definition = ast.FunctionDef | ast.ClassDef


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _defined(file: Path) -> set[str]:
    return {node.name for node in _parsed(file).body if isinstance(node, Definition)}


def module_of(name: str) -> Path:
    """Return the file that defines a name: in the folder that it names, else where the package imports it from."""
    if "." in name:
        folder, _, own = name.partition(".")
        files = sorted((PACKAGE / folder).glob("*.py"))
        return next((file for file in files if own in _defined(file)), PACKAGE / folder)
    for node in ast.walk(_parsed(PACKAGE / "__init__.py")):
        if isinstance(node, ast.ImportFrom) and node.module and name in {alias.name for alias in node.names}:
            return PACKAGE.parent.joinpath(*node.module.split(".")).with_suffix(".py")
    raise LookupError(f"lowmem_load/__init__.py imports no {name}")


def definition_of(name: str) -> Definition:
    """Return the function or class that a public name stands for."""
    for node in _parsed(module_of(name)).body if module_of(name).is_file() else []:
        if isinstance(node, Definition) and node.name == name.rpartition(".")[2]:
            return node
    raise LookupError(f"{module_of(name)} defines no {name}")


def described(name: str) -> Iterator[str]:
    """Yield a public name with its docstring as reStructuredText, of a class with its public methods."""
    node, full = definition_of(name), f"lowmem_load.{name}"
    if "." in name:
        full = ".".join(module_of(name).relative_to(PACKAGE.parent).with_suffix("").parts) + f".{node.name}"
    if isinstance(node, ast.FunctionDef):
        yield from _entry("function", full, _signature(node), node)
        return
    methods = [member for member in node.body if isinstance(member, ast.FunctionDef)]
    made = next((_signature(member, bound=True) for member in methods if member.name == "__init__"), "")
    kind = "exception" if name.endswith(("Error", "Warning")) else "class"
    yield from _entry(kind, full, made.partition(" -> ")[0], node)
    for member in methods:
        if not member.name.startswith("_"):
            yield from ("   " + line for line in _member(member))


def _member(node: ast.FunctionDef) -> Iterator[str]:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    if "property" in decorators:
        yield from _entry("property", node.name, "", node)
        return
    kind = next((kind for kind in ("classmethod", "staticmethod") if kind in decorators), "method")
    yield from _entry(kind, node.name, _signature(node, bound=kind != "staticmethod"), node)


def _entry(kind: str, name: str, signature: str, node: Definition) -> Iterator[str]:
    """Yield one entry of the reference: a directive of Sphinx's Python domain and what the docstring says."""
    yield f".. py:{kind}:: {name}{signature}"
    yield ""
    docstring = _with_fields(ast.get_docstring(node) or "")
    yield from textwrap.indent(str(GoogleDocstring(docstring)), "   ").splitlines()
    yield ""


def _signature(node: ast.FunctionDef, *, bound: bool = False) -> str:
    arguments = node.args
    if bound:
        arguments = ast.arguments(**{**vars(arguments), "args": arguments.args[1:]})
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(arguments)}){returned}"


def _with_fields(docstring: str) -> str:
    """Return a docstring whose lines that begin with one of `FIELDS`, with what follows, are a list of fields."""
    lines: list[str] = []
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        first, *fields = re.split(rf"^(?=(?:{FIELDS}): )", paragraph, flags=re.MULTILINE)
        lines += [first, *(":" + "\n    ".join(map(str.strip, field.splitlines())) for field in fields), ""]
    return "\n".join(lines)


class Public(SphinxDirective):
    """`.. public:: NAME`: the entry of a name of `lowmem_load.__all__`, or of a class in a module of the package."""

    required_arguments: ClassVar[int] = 1

    def run(self) -> list[nodes.Node]:
        """Return the entry."""
        self.env.note_dependency(str(module_of(self.arguments[0])))
        return self.parse_text_to_nodes("\n".join(described(self.arguments[0])))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("public", Public)
    return {"parallel_read_safe": True}
