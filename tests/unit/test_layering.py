"""Who may import and touch what in lowmem_load, read off the source: nothing of it is imported.

The tables are the rules; the code below only looks them up. A unit is a folder of the package, or a module that lies
in none. "read.source" is a module, "read" all modules of that folder.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "lowmem_load"
FOLDER = Path(__file__).resolve().parents[2] / PACKAGE

# The modules of each unit, low to high. What imports a unit stands below it here.
MODULES: dict[str, set[str]] = {
    "errors": set(),
    "fingerprint": set(),
    "contract": set(),
    "differences": set(),
    "phases": set(),
    "plots": set(),
    "quantities": set(),
    "tables": set(),
    "walk": set(),
    "planning": {
        "alike",
        "cooperative",
        "copies",
        "exchange",
        "expression",
        "load_plan",
        "planner",
        "proof",
        "ranges",
        "reads",
        "sample",
    },
    "settings": {"auto", "ds_config", "kinds", "precision", "settings"},
    "read": {
        "cooperative",
        "batches",
        "exchange",
        "executor",
        "gds",
        "hashing",
        "mounts",
        "open_sources",
        "rate",
        "sample",
        "scatter",
        "source",
        "stats",
        "tasks",
        "temporaries",
        "together",
        "uploads",
        "whole",
    },
    "formats": {
        "format",
        "header_json",
        "index",
        "inert_objects",
        "inert_pickle",
        "kept",
        "pickled_tensor",
        "packed",
        "safetensors",
        "templates",
        "torch_zip",
    },
    "describe": {
        *("arguments", "collector", "context", "initialise", "missing", "operations", "patterns"),
        "pointwise",
        *("quantized", "tensor", "twins"),
    },
    "quantize": {"check", "four_bit"},
    "ds": {
        *(
            "arena",
            "comm",
            "consolidation",
            "engine",
            "estimates",
            "extensions",
            "initialize_hook",
            "ops",
            "parameters",
            "partition",
            "pinning",
            "releases",
            "resume",
        ),
        *("schedulers", "shell", "swapping", "zero_init"),
    },
    "targets": {"choice", "make", "partial", "target", "whole", "zero3"},
    "hf": {
        *("accelerate_saves", "active", "collecting", "first_load", "fp8", "hub", "intercept", "loader", "merging"),
        *("meta_init", "mxfp4", "names", "of_config", "outcome", "outcome_key", "plain_saves", "plan_cache"),
        *("quantizers", "releases", "replaced", "saver", "symbolic_file", "trainer_saves"),
    },
    "ranks": {
        "board",
        "connections",
        "device",
        "environment",
        "exchanges",
        "group",
        "life",
        "line",
        "nodes",
        "process_group",
        "shared_memory",
    },
    "integrity": {"checksums", "files", "model", "sums"},
    "progress": set(),
    "report": set(),
    "reports": {"file", "join", "timeline", "trace"},
    "stages": {
        *("checksums", "defaults", "describe", "digest", "execute", "load", "plan", "plan_only", "read_cost", "room"),
        *("plan_cache", "same_bytes", "sharing", "streamable", "turns"),
    },
    "saving": {"folder", "holdings", "layout", "merged", "plan", "report", "save", "torch_layout", "writer"},
    "load": {"digest", "instead", "model", "plan", "request", "streaming"},
    "remote": {"checkpoint", "source"},
    "inspection": {"checkpoint", "conversions", "files"},
    "forecast": {"job", "load", "picture", "stock", "together", "training", "verdict"},
    "bench": {"compare", "floor", "launch", "memory", "page_cache", "picture", "worker"},
    "doctor": {"checks", "devices", "finding", "host", "launcher", "storage", "versions"},
    "partial": {"checkpoint", "engine", "initialize", "optimizer", "outside", "replicated", "trainer"},
    "resume": {
        *("checkpoint", "consolidate", "copying", "files", "layout", "load", "opening", "optimizer_states", "plan"),
        "swapped",
    },
    "pipelines": {"additions", "arguments", "install", "model_engine", "resumes", "saves"},
    "startup": {"environment", "hook", "on_pythonpath.sitecustomize", "switch_on"},
    "cli": {
        "bench",
        "consolidate",
        "digest",
        "doctor",
        "inspect",
        "main",
        "options",
        "output",
        "plan",
        "report",
        "run",
        "start",
        "verify",
    },
    "__main__": set(),
    "testing": {"format", "memory", "raises", "source", "target"},
    "__init__": set(),
}

# What the modules of a unit may import besides each other: units and modules on the lines above.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "fingerprint": set(),
    "contract": {"errors"},
    "differences": set(),
    "phases": set(),
    "plots": {"errors"},
    "quantities": {"errors"},
    "tables": set(),
    "walk": set(),
    "planning": {"errors", "fingerprint"},
    "settings": {"errors", "fingerprint"},
    "read": {"errors", "phases", "planning"},
    "formats": {"errors", "planning", "read.source"},
    "describe": {"errors", "planning"},
    "quantize": {"contract", "describe", "errors", "planning", "settings"},
    "ds": {"contract", "errors", "planning", "walk"},
    "targets": {"errors", "planning", "settings"},
    "hf": {"contract", "describe", "errors", "formats", "planning.expression", "quantize", "walk"},
    "ranks": {"errors"},
    "integrity": {"errors", "hf.names", "planning.ranges", "ranks.group", "read"},
    "progress": set(),
    "report": {"differences", "phases", "planning", "quantities", "tables"},
    "reports": {"errors", "plots", "report"},
    "stages": {
        *("describe", "ds.zero_init", "errors", "fingerprint", "hf", "integrity", "planning", "quantize", "ranks"),
        *("phases", "progress", "quantities", "read", "report", "reports.file"),
        *("settings", "targets", "walk"),
    },
    "saving": {
        *("errors", "fingerprint", "formats.safetensors", "formats.torch_zip", "hf", "integrity.model", "phases"),
        *("planning", "progress", "quantities", "ranks", "read.scatter", "read.source"),
    },
    "load": {
        *("errors", "hf", "integrity", "planning", "ranks", "read.gds", "read.source", "report", "settings", "stages"),
        "targets",
    },
    "remote": {"errors", "read.source"},
    "inspection": {"errors", "formats", "hf", "load", "planning", "read.source", "remote"},
    "forecast": {
        *(
            "ds.estimates",
            "errors",
            "hf",
            "inspection",
            "load",
            "planning",
            "plots",
            "phases",
            "quantities",
            "read",
            "remote",
            "settings",
        ),
    },
    "bench": {
        *(
            "ds.partition",
            "errors",
            "hf",
            "inspection.files",
            "integrity.model",
            "load",
            "phases",
            "ranks",
            "read.source",
        ),
        *("plots", "report"),
    },
    "doctor": {"errors", "quantities", "ranks.environment", "read.mounts", "read.rate"},
    "partial": {"ds", "errors", "fingerprint", "ranks", "settings", "targets.choice"},
    "resume": {
        *("errors", "fingerprint", "formats", "hf", "partial.checkpoint", "planning", "progress"),
        *("quantities", "ranks", "read", "report", "saving"),
    },
    "pipelines": {
        *(
            "ds",
            "errors",
            "hf",
            "integrity.model",
            "load",
            "planning.expression",
            "ranks",
            "report",
            "resume",
            "saving",
        ),
        "settings",
    },
    "startup": {"errors"},
    "cli": {"errors", "quantities", "startup.environment", "tables"},
    "__main__": {"cli"},
    "testing": {"errors", "formats", "planning", "read", "targets"},
    "__init__": set(),
}

# Modules that may import more than their unit does, and what.
ALSO: dict[str, set[str]] = {
    "describe.context": {
        "formats.format",
        "formats.packed",
        "read.source",
    },  # names the types of what it carries from formats to hf
    "forecast.job": {"stages.read_cost"},  # what the environment says of reading together
}

# What a module may import inside functions and under TYPE_CHECKING only, so that it is not there before it is needed.
LAZILY: dict[str, set[str]] = {
    "cli.bench": {"bench", "plots", "settings.ds_config"},
    "cli.consolidate": {"resume.consolidate"},
    "cli.digest": {"hf.quantizers", "load"},
    "cli.doctor": {"doctor"},
    "doctor.devices": {"ds.ops"},
    "cli.inspect": {"inspection.checkpoint", "remote.checkpoint"},
    "cli.plan": {"forecast", "plots", "remote.checkpoint"},
    "cli.report": {"plots", "reports"},
    "cli.verify": {"integrity.files"},
    "integrity.model": {"ds.parameters"},
    "ranks.process_group": {"ds.comm"},
    "resume.load": {"ds.resume", "partial.engine"},
    "resume.plan": {"ds.resume"},
    "saving.holdings": {"ds.parameters"},
    "saving.merged": {"ds.parameters"},
    "startup.hook": {"hf.first_load"},
    "startup.switch_on": {"pipelines.install", "report"},
    "targets.zero3": {"ds.parameters", "ds.partition"},
    "__init__": {
        "errors",
        "integrity",
        "load",
        "partial",
        "pipelines",
        "planning.load_plan",
        "ranks.process_group",
        "report",
        "resume",
        "saving",
    },
}

# Third-party name, with all below it -> the units that may import it or reach it as an attribute.
OWNERS: dict[str, set[str]] = {
    "bitsandbytes": {"quantize"},
    "kvikio": {"read"},
    "transformers": {"hf"},
    "torch.distributed": {"ranks"},
    "deepspeed": {"ds"},
}
# Modules that may use public names of somebody else's, and which.
GUESTS: dict[str, set[str]] = {
    "partial.replicated": {"deepspeed.comm"},
    "ranks.device": {"deepspeed.accelerator"},
}

# Attributes that DeepSpeed puts on parameters, also as strings in getattr, hasattr, setattr and delattr.
DEEPSPEED_PREFIX = "ds_"
DEEPSPEED_UNITS: set[str] = {"ds"}
OUR_DS_NAMES: set[str] = {"ds_config"}

# Opening, reading and writing files: calls by plain name, by module and name, and by method name of a pathlib.Path.
MAY_DO_IO: set[str] = {
    *(
        "bench",
        "ds.arena",
        "doctor",
        "ds.extensions",
        "formats",
        "hf.saver",
        "partial.checkpoint",
        "pipelines.arguments",
        "ranks.board",
        "ranks.life",
        "ranks.shared_memory",
    ),
    *(
        "hf.of_config",
        "resume.checkpoint",
        "read.mounts",
        "read.source",
        "phases",
        "reports.file",
        "saving.folder",
        "saving.writer",
        "settings.ds_config",
    ),
}
ANONYMOUS_MEMORY: set[str] = {
    "describe.initialise",
    "ds.arena",
    "ds.pinning",
    "read.temporaries",
}  # calls mmap.mmap, but maps no file
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

# What computes and nothing else, and what it may not import.
PURE: set[str] = {
    "describe.operations",
    "errors",
    "fingerprint",
    "formats.inert_objects",
    "formats.inert_pickle",
    "formats.pickled_tensor",
    "integrity.sums",
    "planning",
    "resume.layout",
    "saving.layout",
    "saving.plan",
    "settings.auto",
    "settings.precision",
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


@dataclass(frozen=True)
class Import:
    """One imported name."""

    line: int
    name: str
    """Absolute, such as "lowmem_load.errors.ConfigError"."""
    lazy: bool
    """Whether it is imported inside a function or under TYPE_CHECKING, not when the module is."""


def _module_of(path: Path) -> str:
    """Returns "planning.copies" for lowmem_load/planning/copies.py and "planning.__init__" for its __init__.py."""
    return ".".join(path.relative_to(FOLDER).with_suffix("").parts)


def _unit_of(module: str) -> str:
    return module.partition(".")[0]


def _known(module: str) -> bool:
    unit, _, name = module.partition(".")
    return unit in MODULES and (name in MODULES[unit] or name == ("__init__" if MODULES[unit] else ""))


def _within(name: str, table: Iterable[str]) -> bool:
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


def _imports(node: ast.AST, lazy: bool = False) -> Iterator[Import]:
    """Yields what is imported anywhere below the node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(child.lineno, alias.name, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (Import(child.lineno, f"{child.module}.{alias.name}", lazy) for alias in child.names)
        elif isinstance(child, ast.If) and _dotted(child.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            yield from _imports(ast.Module(child.body, []), lazy=True)
            yield from _imports(ast.Module(child.orelse, []), lazy)
        else:
            yield from _imports(child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def _target(name: str) -> str:
    """Returns the module of the package that an import of the absolute name runs."""
    parts = name.split(".")[1:]
    if not parts or parts[0] not in MODULES:
        return "__init__"
    if not MODULES[parts[0]]:
        return parts[0]
    return f"{parts[0]}.{parts[1] if parts[1:] and parts[1] in MODULES[parts[0]] else '__init__'}"


def _own_imports(tree: ast.AST) -> Iterator[tuple[Import, str]]:
    """Yields each import of the package itself, with the module that it names."""
    for found in _imports(tree):
        if _within(found.name, {PACKAGE}):
            yield found, _target(found.name)


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
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
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


def _names(tree: ast.AST) -> list[tuple[int, str]]:
    return [(found.line, found.name) for found in _imports(tree)] + list(_reached(tree))


def _check_known(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    if not _known(module):
        yield 1, "is in no row of MODULES: add it there, in a unit as low as its imports allow"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "imports relatively; write the whole name"


def _check_arrows(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    unit = _unit_of(module)
    allowed = MAY_IMPORT.get(unit, set()) | ALSO.get(module, set())
    for found, other in _own_imports(tree):
        lazily = found.lazy and _within(other, LAZILY.get(module, set()))
        if not (_unit_of(other) == unit or _within(other, allowed) or lazily):
            later = ", or import it in a function" if _within(other, LAZILY.get(module, set())) else ""
            yield found.line, f"imports {other}, which MAY_IMPORT does not give to {unit}{later}"


def _check_private(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for line, name in _names(tree):
        parts = name.split(".")
        private = [part for part in parts[1:] if part.startswith("_") and not part.endswith("__")]
        if parts[0] == PACKAGE and private:
            yield line, f"uses {name}, which is private to its module"


def _check_owners(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    for line, name in _names(tree):
        for owned, units in OWNERS.items():
            mine = _within(module, units) or _within(name, GUESTS.get(module, set()))
            if _within(name, {owned}) and not mine:
                yield line, f"uses {name}; only {', '.join(sorted(units))} may"


def _check_deepspeed_attributes(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    if _within(module, DEEPSPEED_UNITS):
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
            yield node.lineno, f"touches .{name}; only {', '.join(sorted(DEEPSPEED_UNITS))} may"


def _check_io(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    if _within(module, MAY_DO_IO):
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
    if not _within(module, PURE):
        return
    for line, name in _names(tree):
        if _within(name, NOT_IN_PURE):
            yield line, f"uses {name}; {module} is pure"


def _violations(module: str, source: str) -> list[str]:
    tree = ast.parse(source)
    found = [
        *_check_known(module, tree),
        *_check_arrows(module, tree),
        *_check_private(tree),
        *_check_owners(module, tree),
        *_check_deepspeed_attributes(module, tree),
        *_check_io(module, tree),
        *_check_pure(module, tree),
    ]
    return [f"{module}:{line}: {what}" for line, what in sorted(set(found))]


def _cycle(arrows: Mapping[str, Iterable[str]]) -> list[str]:
    """Returns the nodes of a cycle, in order; none if there is no cycle."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _arrows() -> dict[str, set[tuple[str, bool]]]:
    """Returns, for each module, the other modules of the package that it imports, and whether lazily."""
    return {
        module: {(other, found.lazy) for found, other in _own_imports(tree) if other != module}
        for module, tree in ((_module_of(path), ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES)
    }


SOURCES = sorted(FOLDER.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=_module_of)
def test_module_keeps_the_rules(path: Path) -> None:
    problems = _violations(_module_of(path), path.read_text(encoding="utf-8"))
    assert not problems, "\n" + "\n".join(problems)


def test_every_module_in_the_tables_exists() -> None:
    modules = {_module_of(path) for path in SOURCES}
    named = {f"{unit}.{name}" if name else unit for unit, names in MODULES.items() for name in names or {""}}
    assert named - modules == set(), "these are gone or have moved: follow in the tables"
    others = {*ALSO, *LAZILY, *GUESTS, *MAY_DO_IO, *ANONYMOUS_MEMORY, *PURE}
    others |= {name for table in (MAY_IMPORT, ALSO, LAZILY, OWNERS) for names in table.values() for name in names}
    assert {name for name in others if name not in MODULES and name not in modules} == set()


def test_the_tables_give_a_unit_only_what_stands_above_it() -> None:
    ladder = list(MODULES)
    assert list(MAY_IMPORT) == ladder
    allowed = {(unit, name) for unit, names in MAY_IMPORT.items() for name in names}
    allowed |= {(_unit_of(module), name) for module, names in ALSO.items() for name in names}
    upwards = [(unit, name) for unit, name in allowed if ladder.index(_unit_of(name)) >= ladder.index(unit)]
    assert upwards == []


def test_imports_make_no_cycle() -> None:
    arrows = _arrows()
    assert _cycle({module: {other for other, _ in others} for module, others in arrows.items()}) == []
    units: dict[str, set[str]] = {}
    for module, others in arrows.items():
        met = {_unit_of(other) for other, lazy in others if not lazy}
        units.setdefault(_unit_of(module), set()).update(met - {_unit_of(module)})
    assert _cycle(units) == []


def test_a_cycle_is_found() -> None:
    assert set(_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("module", "source", "what"),
    [
        ("planning.copies", "from lowmem_load.read.executor import Executor", "imports read.executor"),
        ("planning.copies", "import lowmem_load.read.executor", "imports read.executor"),
        ("planning.copies", "from lowmem_load import read", "imports read.__init__"),
        ("planning.copies", "from lowmem_load import load_model", "imports __init__"),
        ("planning.copies", "def f():\n    from lowmem_load.settings.ds_config import x", "imports settings.ds_config"),
        ("formats.index", "from lowmem_load.read.executor import Executor", "imports read.executor"),
        ("describe.tensor", "from lowmem_load.read.source import Opener", "imports read.source"),
        ("targets.zero3", "from lowmem_load.ds.partition import x", "imports ds.partition"),
        ("targets.zero3", "def f():\n    from lowmem_load.ds.engine import x", "imports ds.engine"),
        ("targets.whole", "def f():\n    from lowmem_load.ds.partition import x", "imports ds.partition"),
        ("load.model", "from .errors import ConfigError", "imports relatively"),
        ("nowhere", "", "in no row of MODULES"),
        ("planning.nowhere", "", "in no row of MODULES"),
        ("stages.plan", "from lowmem_load.planning.copies import _walk", "private"),
        ("stages.plan", "from lowmem_load.planning import copies\ncopies._walk()", "private"),
        ("load.model", "import transformers", "transformers"),
        ("load.model", "from transformers.modeling_utils import x", "transformers"),
        ("load.model", "import torch\ntorch.distributed.barrier()", "torch.distributed.barrier"),
        ("load.model", "from torch import distributed", "torch.distributed"),
        ("load.model", "import torch.distributed as dist", "torch.distributed"),
        ("load.model", "import deepspeed", "uses deepspeed"),
        ("load.model", "def f():\n    import deepspeed\n    deepspeed.zero.Init()", "deepspeed.zero.Init"),
        ("load.model", "from deepspeed import zero", "deepspeed.zero"),
        ("load.model", "from deepspeed.runtime.zero import x", "deepspeed.runtime"),
        ("partial.replicated", "import deepspeed", "uses deepspeed"),
        ("report", "from deepspeed.accelerator import get_accelerator", "deepspeed.accelerator"),
        ("load.model", "p.ds_id", ".ds_id"),
        ("load.model", "hasattr(p, 'ds_tensor')", ".ds_tensor"),
        ("load.model", "open('x')", "open()"),
        ("load.model", "import os as o\no.pread(0, 1, 2)", "o.pread()"),
        ("read.executor", "from os import open as o\no('x', 0)", "o()"),
        ("load.model", "Path('x').read_text()", ".read_text()"),
        ("planning.copies", "import os", "is pure"),
        ("planning.copies", "import deepspeed", "is pure"),
        ("settings.precision", "import torch.distributed", "is pure"),
    ],
)
def test_a_breach_is_found(module: str, source: str, what: str) -> None:
    problems = _violations(module, source)
    assert any(what in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("load.model", "from lowmem_load.planning.load_plan import LoadPlan\nfrom lowmem_load.hf import loader"),
        ("formats.safetensors", "from lowmem_load.read.source import ByteSource"),
        ("describe.context", "from lowmem_load.read.source import Opener"),
        ("targets.zero3", "def f():\n    from lowmem_load.ds.partition import x"),
        ("targets.zero3", "if TYPE_CHECKING:\n    from lowmem_load.ds.partition import x"),
        ("partial.replicated", "from deepspeed import comm\ncomm.all_reduce"),
        ("load.model", "self.ds_config, os.path.join('a'), self.open()"),
        ("hf.loader", "from transformers import AutoModel"),
        ("ds.partition", "from deepspeed.runtime.zero.utils import is_zero_param\np.ds_id"),
        ("ranks.process_group", "import torch.distributed as dist\ndist.barrier()"),
        ("read.source", "import os\nos.preadv(0, [], 0)"),
        ("pipelines.arguments", "open('x')"),
        ("__init__", "def __getattr__(name):\n    from lowmem_load.pipelines.model_engine import ModelEngine"),
    ],
)
def test_what_is_allowed_is_not_flagged(module: str, source: str) -> None:
    assert _violations(module, source) == []
