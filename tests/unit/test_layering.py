"""Who may import and touch what in lowmem_load, read off the source: nothing of it is imported.

The tables are the rules; the code below only looks them up.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "lowmem_load"
FOLDER = Path(__file__).resolve().parents[2] / PACKAGE

# Arrows point upwards only: a module may import those on the lines above its own, and none beside it.
LAYERS: list[set[str]] = [
    {"errors"},
    {"coverage", "expression", "header", "precision"},
    {"checkpoint", "config", "inert_pickle", "operations", "partial", "partial_checkpoint", "plan"},
    {"hf_active", "pretrained", "rank_group", "reader", "report", "scratch", "torch_zip", "whole", "zero3"},
    {"distributed", "symbolic", "zero3_engine"},
    {"hf", "placement"},
    {"arguments", "partial_engine", "targets"},
    {"stream"},
    {"load"},
    {"engine", "install", "partial_initialize"},
    {"partial_trainer"},
    {"__init__"},
]

# Third-party name, with all below it -> the modules that may import it or reach it as an attribute.
OWNERS: dict[str, set[str]] = {
    "transformers": {"hf", "hf_active", "pretrained"},
    "torch.distributed": {"distributed", "rank_group"},
    "deepspeed": {"zero3", "zero3_engine"},
}

# Exceptions to OWNERS: public names that every module but the pure ones may use. Longer names win over shorter ones.
ANYONE: set[str] = {
    "deepspeed.__version__",
    "deepspeed.accelerator",
    "deepspeed.comm",
    "deepspeed.init_distributed",
    "deepspeed.initialize",
}
# `import deepspeed` by itself; what is reached through it is judged by name.
BARE_IMPORT_BY_ANYONE: set[str] = {"deepspeed"}

# Attributes that DeepSpeed puts on parameters, also as strings in getattr, hasattr, setattr and delattr.
DEEPSPEED_PREFIX = "ds_"
DEEPSPEED_MODULES: set[str] = {"zero3", "zero3_engine"}
OUR_DS_NAMES: set[str] = {"ds_config"}

# Opening, reading and writing files: calls by plain name, by module and name, and by method name of a pathlib.Path.
IO_MODULES: set[str] = {"arguments", "checkpoint", "config", "partial_checkpoint", "reader", "report", "torch_zip"}
ANONYMOUS_MEMORY: set[str] = {"scratch"}  # calls mmap.mmap, but maps no file
IO_CALLS: set[str] = {
    "open",
    "io.open",
    "mmap.mmap",
    "os.fdopen",
    "os.open",
    "os.pread",
    "os.preadv",
    "os.pwrite",
    "os.pwritev",
    "os.read",
    "os.write",
}
IO_METHODS: set[str] = {"read_bytes", "read_text", "write_bytes", "write_text"}

# Modules that compute and nothing else, and what they may not import. (Nor do any I/O: they are not in IO_MODULES.)
PURE_MODULES: set[str] = {
    "coverage",
    "errors",
    "expression",
    "header",
    "inert_pickle",
    "operations",
    "plan",
    "precision",
}
NOT_IN_PURE: set[str] = {
    "accelerate",
    "deepspeed",
    "huggingface_hub",
    "io",
    "mmap",
    "os",
    "safetensors",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "torch.distributed",
    "transformers",
}


def _within(name: str, table: set[str]) -> bool:
    """Whether the dotted name, or a package it lies in, is in the table."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in table for end in range(1, len(parts) + 1))


def _dotted(node: ast.expr) -> str | None:
    """Returns "a.b.c" for such an expression, None for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = _dotted(node.value)
        return f"{head}.{node.attr}" if head else None
    return None


def _package_path(node: ast.ImportFrom) -> str:
    """Returns the absolute name that `from ... import` names; modules of the package lie flat."""
    return ".".join(part for part in (PACKAGE if node.level else "", node.module or "") if part)


def _imports(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Yields line, absolute name and whether it is a bare `import name`, for each name imported anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, True
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, f"{_package_path(node)}.{alias.name}", False


def _aliases(tree: ast.AST) -> dict[str, str]:
    """Returns the absolute name behind each local name that an import makes."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    aliases[alias.asname] = alias.name
                else:
                    top = alias.name.split(".")[0]
                    aliases[top] = top
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{_package_path(node)}.{alias.name}"
    return aliases


def _reached(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and absolute name of each attribute chain that starts at an imported name."""
    aliases = _aliases(tree)
    inner: set[int] = set()  # ast.walk goes from outside in: the longest chain comes first
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        inner.add(id(node.value))
        name = _dotted(node)
        if id(node) in inner or name is None:
            continue
        head, _, rest = name.partition(".")
        if head in aliases:
            yield node.lineno, f"{aliases[head]}.{rest}"


def _layer(module: str) -> int | None:
    return next((level for level, modules in enumerate(LAYERS) if module in modules), None)


def _check_arrows(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    ours = _layer(module)
    if ours is None:
        yield 1, f"{module} is not in LAYERS: say what it may import"
        return
    for line, name, _ in _imports(tree):
        if not _within(name, {PACKAGE}):
            continue
        parts = [*name.split("."), ""]
        other = parts[1] if _layer(parts[1]) is not None or (FOLDER / f"{parts[1]}.py").exists() else "__init__"
        theirs = _layer(other)
        if theirs is None or theirs >= ours:
            yield line, f"imports {other}, which does not lie below {module}"


def _check_private(tree: ast.AST) -> Iterator[tuple[int, str]]:
    names = [(line, name) for line, name, _ in _imports(tree)] + list(_reached(tree))
    for line, name in names:
        parts = name.split(".")
        private = [part for part in parts[1:] if part.startswith("_") and not part.endswith("__")]
        if parts[0] == PACKAGE and private:
            yield line, f"uses {name}, which is private to its module"


def _check_owners(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    for line, name, bare in _imports(tree):
        if not (bare and name in BARE_IMPORT_BY_ANYONE):
            yield from _check_owner(module, line, name)
    for line, name in _reached(tree):
        yield from _check_owner(module, line, name)


def _check_owner(module: str, line: int, name: str) -> Iterator[tuple[int, str]]:
    for owned, modules in OWNERS.items():
        if module not in modules and _within(name, {owned}) and not _within(name, ANYONE):
            yield line, f"uses {name}; only {', '.join(sorted(modules))} may"


def _check_deepspeed_attributes(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    if module in DEEPSPEED_MODULES:
        return
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Call) and _dotted(node.func) in {"getattr", "hasattr", "setattr", "delattr"}:
            second = node.args[1] if len(node.args) > 1 else None
            if isinstance(second, ast.Constant) and isinstance(second.value, str):
                name = second.value
        if name and name.startswith(DEEPSPEED_PREFIX) and name not in OUR_DS_NAMES:
            yield node.lineno, f"touches .{name}; only {', '.join(sorted(DEEPSPEED_MODULES))} may"


def _check_io(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    if module in IO_MODULES:
        return
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr in IO_METHODS:
            yield node.lineno, f"calls .{node.func.attr}(); it may do no I/O"
        name = _dotted(node.func)
        if name is None:
            continue
        head, dot, rest = name.partition(".")
        call = aliases.get(head, head) + dot + rest
        if call in IO_CALLS and not (call == "mmap.mmap" and module in ANONYMOUS_MEMORY):
            yield node.lineno, f"calls {name}(); it may do no I/O"


def _check_pure(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    if module not in PURE_MODULES:
        return
    names = [(line, name) for line, name, _ in _imports(tree)] + list(_reached(tree))
    for line, name in names:
        if _within(name, NOT_IN_PURE):
            yield line, f"uses {name}; {module} is pure"


def _violations(module: str, source: str) -> list[str]:
    tree = ast.parse(source)
    found = [
        *_check_arrows(module, tree),
        *_check_private(tree),
        *_check_owners(module, tree),
        *_check_deepspeed_attributes(module, tree),
        *_check_io(module, tree),
        *_check_pure(module, tree),
    ]
    return [f"{module}.py:{line}: {what}" for line, what in sorted(set(found))]


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.stem)
def test_module_keeps_the_rules(path):
    assert path.parent == FOLDER, "modules lie flat in the package"
    problems = _violations(path.stem, path.read_text(encoding="utf-8"))
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize(
    ("module", "source", "what"),
    [
        ("plan", "from .reader import Reader", "imports reader"),
        ("plan", "from . import reader", "imports reader"),
        ("plan", "import lowmem_load.read.executor", "imports reader"),
        ("plan", "def f():\n    from lowmem_load.settings.ds_config import x", "imports config"),
        ("load", "from lowmem_load import load_model", "imports __init__"),
        ("nowhere", "", "not in LAYERS"),
        ("load", "from .plan import _walk", "private"),
        ("load", "from . import plan\nplan._walk()", "private"),
        ("load", "import transformers", "transformers"),
        ("load", "from transformers.modeling_utils import x", "transformers"),
        ("load", "import torch\ntorch.distributed.barrier()", "torch.distributed.barrier"),
        ("load", "from torch import distributed", "torch.distributed"),
        ("load", "import torch.distributed as dist", "torch.distributed"),
        ("load", "import deepspeed\ndeepspeed.zero.Init()", "deepspeed.zero.Init"),
        ("load", "import deepspeed.runtime", "deepspeed.runtime"),
        ("load", "from deepspeed import zero", "deepspeed.zero"),
        ("load", "from deepspeed.runtime.zero import x", "deepspeed.runtime"),
        ("load", "p.ds_id", ".ds_id"),
        ("load", "hasattr(p, 'ds_tensor')", ".ds_tensor"),
        ("load", "open('x')", "open()"),
        ("load", "import os as o\no.pread(0, 1, 2)", "o.pread()"),
        ("load", "from os import open as o\no('x', 0)", "o()"),
        ("load", "Path('x').read_text()", ".read_text()"),
        ("plan", "import os", "is pure"),
        ("plan", "import deepspeed", "is pure"),
        ("header", "import torch.distributed", "is pure"),
    ],
)
def test_a_breach_is_found(module, source, what):
    problems = _violations(module, source)
    assert any(what in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("load", "from .plan import LoadPlan\nfrom . import reader\nfrom lowmem_load.hf import x"),
        ("load", "import deepspeed\ndeepspeed.initialize()\nfrom deepspeed import comm\nprint(deepspeed.__version__)"),
        ("load", "from deepspeed.accelerator import get_accelerator"),
        ("load", "self.ds_config, os.path.join('a'), self.open()"),
        ("hf", "from transformers import AutoModel"),
        ("zero3", "from deepspeed.runtime.zero.utils import is_zero_param\np.ds_id"),
        ("distributed", "import torch.distributed as dist\ndist.barrier()"),
        ("reader", "import os\nos.preadv(0, [], 0)"),
        ("arguments", "open('x')"),
        ("__init__", "from .engine import ModelEngine"),
    ],
)
def test_what_is_allowed_is_not_flagged(module, source):
    assert _violations(module, source) == []
