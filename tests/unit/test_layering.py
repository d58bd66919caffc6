"""Which folder of lowmem_load imports which, which alone uses DeepSpeed and the like, and that imports are declared."""

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "lowmem_load"
UNITS = {path.stem if path.is_file() else path.name for path in FOLDER.iterdir() if path.suffix in {"", ".py"}}

# Folders, and modules in none, low to high. Each imports from the lines above its own only, inside functions too.
LADDER = """
errors
text locks renamed
foreign_names
phases
replaced
planning config
files
symbolic training_checkpoints
quantized
models
engines
distributed
weights_out
load
resume
partial
integrations
cli llamafactory
__init__ __main__
"""
FILES = """cli config distributed engines files integrations load models partial phases resume training_checkpoints
weights_out"""
# Who may use a name, and all that is below it. A name on two rows may be used by the folders of both.
# ".name()" is a method of any object, ".ds_" each attribute that DeepSpeed puts on parameters.
ONLY = {
    "bitsandbytes": "quantized",
    "deepspeed": "engines",
    "deepspeed.accelerator": "distributed",
    "deepspeed.comm": "partial",
    "diffusers": "models",
    "peft": "models",
    "pickle": "distributed files",
    "socket": "cli partial distributed",
    "subprocess": "cli",
    "torch.distributed": "distributed engines",
    "transformers": "models",
    ".ds_": "engines",
    "mmap.mmap": f"{FILES} symbolic",  # memory without a file, and its type
    **dict.fromkeys(("open", "io.open", "os.open", "os.fdopen", "os.read", "os.write", "os.sendfile"), FILES),
    **dict.fromkeys(("os.pread", "os.preadv", "os.pwrite", "os.pwritev"), FILES),
    **dict.fromkeys((".read_bytes()", ".read_text()", ".write_bytes()", ".write_text()"), FILES),
}
# Folders that only compute, and what they may not import besides.
PURE = "errors text planning"
IMPURE = {"accelerate", "huggingface_hub", "io", "mmap", "os", "safetensors", "shutil", "tempfile", "threading"}


def _imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yields line, absolute name and local name of each import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{each.name}", each.asname or each.name) for each in node.names)


def _uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and name of each import, attribute and builtin."""
    absolute = {local: name for _, name, local in _imports(tree)}
    yield from ((line, name) for line, name, _ in _imports(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, absolute.get(node.id, node.id)
        elif isinstance(node, ast.Attribute):
            head, _, rest = ast.unparse(node).partition(".")
            yield node.lineno, f"{absolute.get(head, head)}.{rest}"
            yield node.lineno, f".{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.lineno, f".{node.func.attr}()"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "hasattr", "setattr", "delattr"}:
            yield node.lineno, f".{ast.unparse(node.args[1])[1:-1]}"


def _is_of(name: str, key: str) -> bool:
    if key == ".ds_":
        return name.startswith(key) and name != ".ds_config"
    return name == key or name.startswith(f"{key}.")


def _breaches(unit: str, source: str) -> Iterator[str]:
    tree = ast.parse(source)
    place = {each: place for place, line in enumerate(LADDER.split("\n")) for each in line.split()}
    for line, name, _ in _imports(tree):
        top, _, rest = name.partition(".")
        other = rest.partition(".")[0] if rest.partition(".")[0] in place else "__init__"
        if top == "lowmem_load" and other != unit and place[other] >= place[unit]:
            yield f"{line}: imports {name}, which does not stand on a line above {unit}"
        if unit in PURE.split() and top in IMPURE:
            yield f"{line}: imports {name}, though {unit} only computes"
    for line, name in _uses(tree):
        users = " ".join(ONLY[key] for key in ONLY if _is_of(name, key))
        if users and unit not in users.split():
            yield f"{line}: uses {name}, which is for {users}"
        if name.startswith("lowmem_load.") and any(part[:1] == "_" != part[-1:] for part in name.split(".")):
            yield f"{line}: uses {name}, which is private to its module"


def test_each_unit_is_on_the_ladder_once() -> None:
    assert sorted(LADDER.split()) == sorted(UNITS - {"__pycache__"})


@pytest.mark.parametrize("unit", LADDER.split())
def test_unit_keeps_the_rules(unit: str) -> None:
    files = [FOLDER / f"{unit}.py", *(FOLDER / unit).rglob("*.py")]
    found = [
        f"{path.relative_to(FOLDER)}:{breach}"
        for path in files
        if path.is_file()
        for breach in _breaches(unit, path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(["", *found])


def test_no_modules_import_each_other() -> None:
    """Not over others, and not inside functions: `TopologicalSorter` raises CycleError."""
    imported: dict[str, set[str]] = {}
    for path in FOLDER.rglob("*.py"):
        if path.parent != FOLDER:  # the package itself imports what is asked of it
            module = ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
            imported[module] = {name for _, name, _ in _imports(ast.parse(path.read_text(encoding="utf-8")))}
    graph = {
        module: {other for name in names for other in (name, name.rpartition(".")[0]) if other in imported}
        for module, names in imported.items()
    }
    assert tuple(graphlib.TopologicalSorter(graph).static_order())


def test_what_is_imported_from_tests_and_benchmarks_exists() -> None:
    """Also in scripts and functions that the ordinary tests do not run."""
    root = FOLDER.parent
    paths = [path for folder in ("tests", "benchmarks") for path in (root / folder).rglob("*.py")]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    imports = {path: list(_imports(tree)) for path, tree in trees.items()}
    named = {
        path: {local for _, _, local in imports[path]}
        | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        | {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        for path, tree in trees.items()
    }
    for path in paths:
        for line, name, _ in imports[path]:
            module, _, member = name.rpartition(".")
            source = root / f"{module.replace('.', '/')}.py"
            assert source not in named or member in named[source], f"{path}:{line} imports {name}"


def test_functions_are_short() -> None:
    """At most 60 lines in addition to the docstring, which says each option of a public function."""
    for path in FOLDER.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
        docs = ((node, (ast.get_docstring(node) or "").count("\n")) for node in functions)
        long = [node.name for node, num_of_doc in docs if (node.end_lineno or 0) - node.lineno - num_of_doc >= 60]
        assert not long, f"{path}: {long}"


@pytest.mark.parametrize(
    ("unit", "source", "what"),
    [
        ("planning", "def f():\n    from lowmem_load.files.executor import Executor", "does not stand"),
        ("planning", "import os", "only computes"),
        ("load", "from lowmem_load.planning import nest\nnest._walk()", "private"),
        ("symbolic", "from torch import distributed as d\nd.barrier()", "uses torch.distributed.barrier"),
        ("symbolic", "def f():\n    import deepspeed.zero", "uses deepspeed.zero"),
        ("symbolic", "hasattr(p, 'ds_tensor')", "uses .ds_tensor"),
        ("symbolic", "import os as o\no.pread(0, 1, 2)", "uses os.pread"),
        ("symbolic", "Path('x').read_text()", "uses .read_text()"),
    ],
)
def test_a_breach_is_found(unit: str, source: str, what: str) -> None:
    assert any(what in breach for breach in _breaches(unit, source))


def test_what_is_allowed_is_no_breach() -> None:
    assert not list(_breaches("partial", "from deepspeed import comm\ncomm.all_reduce(x.ds_config)\nopen('x')"))


ALREADY_THERE = {"peft", "certifi", "diffusers", "vllm"}
"""What is imported only for objects that it has made, or if it is there."""


def test_what_is_imported_is_declared() -> None:
    text = (FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8")
    section = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    declared = {name.lower().replace("_", "-") for name in re.findall(r'^\s*"([\w-]+)', section[1], re.MULTILINE)}
    assert "torch" in declared
    extras = re.search(r"^\[project.optional-dependencies\]\n(.*?)^\[", text, re.MULTILINE | re.DOTALL)
    assert extras is not None and "boto3" in extras[1]
    imported = set()
    for path in FOLDER.rglob("*.py"):
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
