"""Whatever the package imports is declared."""

import ast
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

ALREADY_THERE = {"peft", "certifi", "diffusers", "vllm"}
"""What is imported only for objects that it has made, or if it is there."""


def test_what_is_imported_is_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    declared = {name.lower().replace("_", "-") for name in re.findall(r'^\s*"([\w-]+)', section[1], re.MULTILINE)}
    assert "torch" in declared
    extras = re.search(r"^\[project.optional-dependencies\]\n(.*?)^\[", text, re.MULTILINE | re.DOTALL)
    assert extras is not None and "boto3" in extras[1]
    imported = set()
    for path in (ROOT / "lowmem_load").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).split(".")[0])
    distributions = packages_distributions()
    undeclared = {
        name
        for name in imported - sys.stdlib_module_names - {"lowmem_load", "boto3", *ALREADY_THERE}
        if declared.isdisjoint(each.lower().replace("_", "-") for each in distributions.get(name, [name]))
    }
    assert undeclared == set()
