"""Write docs/reference/api.md from the docstrings of public names: `python docs/write_api.py`.

It reads the source and imports nothing of it. `tests/unit/test_docs.py` checks that the page is what this writes.

Left out are methods that are not for users (the first paragraph of their docstring ends with "Internal."), and the
constructors of classes whose docstring names the function that they are "Made by".
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lowmem_load"
PAGE = ROOT / "docs" / "reference" / "api.md"
HEAD = """\
# Python API

Generated from the docstrings by `docs/write_api.py`. `help(lowmem_load.load_model)` shows the same. *Collective* means
that all ranks have to make the call. *Memory* is what it needs in addition to what is there before.
"""
CHAPTERS = {
    "Load": ("load_model", "load_into", "lazy", "local_folder", "get_load_report", "LoadReport"),
    "Plan": ("plan", "planning.load_plan.LoadPlan"),
    "Existing scripts": ("install",),
    "Save": ("save_model", "weights_out.save.SaveReport"),
    "Weights for an inference engine": ("iter_weights", "push_weights", "Change", "apply_changes", "WeightSource"),
    "Training checkpoints": ("load_checkpoint", "consolidate"),
    "ZeRO-3 on part of a model": ("initialize_partial", "partial_zero3", "partial.partial_engine.PartialEngine"),
    "Pipelines in LLaMA-Factory's style: `lowmem_load.llamafactory`": (
        "integrations.llamafactory.ModelEngine",
        "integrations.llamafactory.ModelArguments",
        "integrations.llamafactory.DistConfig",
        "distributed.process_group.DistributedInterface",
    ),
    "Errors and warnings": (
        *("LowMemLoadError", "ConfigError", "CheckpointError", "errors.HeaderError", "errors.TruncatedFileError"),
        *("errors.ModelBuildError", "UnsupportedError", "errors.MemoryShortageError", "errors.PlanError"),
        *("errors.IncompatibleVersionError", "RankError", "LoadOrderWarning", "FallbackWarning"),
    ),
}
"""What the page has, in its order: public names, and classes that users get but do not import, with their modules."""

SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Attributes|Example):$")
LONGEST_SIGNATURE = 100
Definition = ast.FunctionDef | ast.ClassDef


def definition_of(name: str) -> Definition:
    """Return the function or class of a public name, or of a name with its module.

    Raises:
        LookupError: there is none.
    """
    module, _, own = name.rpartition(".")
    for node in ast.walk(_parsed(PACKAGE / "__init__.py")):
        if not module and isinstance(node, ast.ImportFrom) and own in {alias.name for alias in node.names}:
            module = (node.module or "").partition(".")[2]
    for node in _parsed(PACKAGE.joinpath(*module.split(".")).with_suffix(".py")).body:
        if isinstance(node, Definition) and node.name == own:
            return node
    raise LookupError(f"lowmem_load/{module.replace('.', '/')}.py does not define {own}")


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def entry(name: str) -> Iterator[str]:
    """Yield the lines of one entry; a class has its public methods and properties in it."""
    node = definition_of(name)
    yield from (f"### {node.name}", "")
    if isinstance(node, ast.FunctionDef):
        yield from (*_signature(node, node.name), *docstring(node))
        return
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    if name.startswith("errors."):
        yield from (f"Import it from `lowmem_load.errors`. Base: `{ast.unparse(node.bases[0])}`.", "")
    for made in (each for each in methods if each.name == "__init__"):
        if "Made by `" not in (ast.get_docstring(node) or ""):
            yield from _signature(made, node.name, is_bound=True)
    yield from docstring(node)
    for method in methods:
        if not method.name.startswith("_") and not _is_internal(method):
            is_property = any("property" in ast.unparse(each) for each in method.decorator_list)
            yield from (f"#### {node.name}.{method.name}", "")
            yield from [] if is_property else _signature(method, method.name, is_bound=True)
            yield from docstring(method)


def _is_internal(method: ast.FunctionDef) -> bool:
    return (ast.get_docstring(method) or "").partition("\n\n")[0].endswith("Internal.")


def _signature(node: ast.FunctionDef, name: str, *, is_bound: bool = False) -> Iterator[str]:
    arguments = node.args
    is_static = any(ast.unparse(each) == "staticmethod" for each in node.decorator_list)
    if is_bound and not is_static:
        arguments = ast.arguments(**{**vars(arguments), "args": arguments.args[1:]})
    returned = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    text = f"{name}({ast.unparse(arguments)}){returned}"
    if len(text) > LONGEST_SIGNATURE:
        text = "\n".join([f"{name}(", *(f"    {each}," for each in _split(ast.unparse(arguments))), f"){returned}"])
    yield from ("```python", *text.splitlines(), "```", "")


def _split(arguments: str) -> list[str]:
    """Split at the commas that are in no bracket."""
    parts, depth = [""], 0
    for character in arguments:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def docstring(node: Definition) -> Iterator[str]:
    """Yield the lines of a docstring as Markdown: its sections as lists, its example as code."""
    section, is_open = "", False
    for line in inspect.cleandoc(ast.get_docstring(node) or "").splitlines():
        if match := SECTION.match(line):
            section = match[1]
            yield f"**{section}:**"
            yield ""
            if section == "Example":
                yield "```python"
                is_open = True
            continue
        if section and line and not line.startswith(" "):
            section = ""
            if is_open:
                yield from ("```", "")
                is_open = False
        yield _line(section, line)
    if is_open:
        yield "```"
    yield ""


def _line(section: str, line: str) -> str:
    if not section or not line.strip():
        return line
    inside = line[4:]
    if section == "Example":
        return inside
    if inside.startswith(" "):
        return f"  {inside.strip()}"
    item = re.match(r"([\w*][\w*, .]*): (.*)", inside)
    return f"- `{item[1]}`: {item[2]}" if item and section not in ("Returns", "Yields") else inside


def page() -> str:
    """Return the text of the page."""
    lines = [HEAD]
    for chapter, names in CHAPTERS.items():
        lines += [f"## {chapter}", ""]
        for name in names:
            lines += entry(name)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
