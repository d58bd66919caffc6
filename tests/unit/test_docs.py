"""What the documents name is there: paths, links, public names."""

import inspect
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import lowmem_load
from lowmem_load import errors
from lowmem_load.cli.start import app
from lowmem_load.errors import LowMemLoadError
from tests.unit.test_layering import LADDER

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lowmem_load"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
OF_TODAY = [document for document in DOCUMENTS if document.name != "CHANGELOG.md"]  # which names what is gone, too
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "development" / "architecture.md"
REFERENCE = ROOT / "docs" / "reference"

# A path ends in a slash or in the name of a file of ours; it may lie in the package or in the repository.
PATH = re.compile(r"(?<![\w/.*:-])[\w.-]+(?:/[\w.-]+)*(?:/(?![\w*])|\.(?:py|md|toml|ya?ml)\b)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```", re.DOTALL)
MODULE_NAME = re.compile(r"(?<![\w./-])lowmem_load((?:\.\w+)+)")
IMPORTED = re.compile(r"^\s*(?:>>> )?from lowmem_load import ([\w, ]+)$", re.MULTILINE)


def _text(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def blocks(document: Path, language: str) -> list[str]:
    """Return the code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", _text(document), re.MULTILINE | re.DOTALL)


def _paths(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the paths that a text names, and whether each exists: in the repository, the package or a folder of a row.

    Left out are links, and what begins at the root of a machine.
    """
    for line in re.sub(r"\]\([^)]*\)|https?://\S+", "]", text).splitlines():
        paths = PATH.findall(line)
        bases = [ROOT, PACKAGE, *(PACKAGE / path for path in paths if path.endswith("/"))]  # a table's row
        yield from ((path, any((base / path).exists() for base in bases)) for path in paths)


def _commands(document: Path) -> list[str]:
    """Return the arguments of each `lowmem-load` in blocks of a document."""
    code = "\n".join(blocks(document, "(?:bash|text)"))
    return re.findall(r"\blowmem-load (.*)$", code, re.MULTILINE)


def _missing_paths(text: str) -> list[str]:
    return sorted({path for path, exists in _paths(text) if not exists})


def _layout() -> str:
    return _text(ARCHITECTURE).split("\n## Folders\n")[1].split("\n## ")[0]


def _anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", _text(document)), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _dead_links(document: Path) -> list[str]:
    dead = []
    for link in LINK.findall(CODE.sub("", _text(document))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        found = (document.parent / path).resolve() if path else document
        if not found.exists() or (anchor and anchor not in _anchors(found)):
            dead.append(link)
    return dead


def _names(text: str) -> set[str]:
    """Return what a text calls `lowmem_load.x`, or imports from there."""
    imported = {name for line in IMPORTED.findall(text) for name in re.split(r"\s*,\s*", line.strip())}
    return imported | {name[1:] for name in MODULE_NAME.findall(text)}


def _private_names(text: str) -> set[str]:
    """Return the names whose first part is not public."""
    return {name for name in _names(text) if name.split(".")[0] not in lowmem_load.__all__}


def _is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def _errors() -> set[str]:
    classes = inspect.getmembers(errors, inspect.isclass)
    found = {name for name, cls in classes if cls.__module__ == errors.__name__}
    return found - {LowMemLoadError.__name__}  # the base of the others


def _variables(text: str) -> set[str]:
    return set(re.findall(r"\bLOWMEM_LOAD_\w+", text))


def test_every_public_name_is_in_the_reference_once() -> None:
    write_api = runpy.run_path(str(ROOT / "docs" / "write_api.py"))
    named = [name for names in write_api["CHAPTERS"].values() for name in names if "." not in name]
    assert sorted(named) == sorted(lowmem_load.__all__)
    assert _text(REFERENCE / "api.md") == write_api["page"](), "run python docs/write_api.py"


def test_every_page_is_in_the_contents_once() -> None:
    contents = "\n".join(
        re.findall(r"^```\{toctree\}\n(.*?)^```$", _text(ROOT / "docs" / "index.md"), re.MULTILINE | re.DOTALL)
    )
    listed = re.findall(r"^(?:.* <)?([\w./]+)>?$", contents, re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages - {"index"} - set(listed) == set()
    assert len(listed) == len(set(listed))


def test_every_error_has_a_remedy() -> None:
    section = _text(ROOT / "docs" / "howto" / "troubleshooting.md").split("\n## By error class\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`\w+`[^(|]*).*\|\s*\S[^|]*\|$", section, re.MULTILINE)  # what stands before its bases
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == _errors()


def test_every_variable_of_the_environment_is_in_the_table() -> None:
    read = {name for path in PACKAGE.rglob("*.py") for name in _variables(_text(path))}
    table = re.findall(r"^\| `(LOWMEM_LOAD_\w+)` \|", _text(REFERENCE / "configuration.md"), re.MULTILINE)
    assert "LOWMEM_LOAD_SILENCE_S" in read
    assert sorted(table) == sorted(read)


def test_the_first_script_is_the_example() -> None:
    assert _text(ROOT / "examples" / "first_load.py") in blocks(ROOT / "docs" / "quickstart.md", "python")


@pytest.mark.parametrize("document", [ROOT / "CONTRIBUTING.md", ARCHITECTURE], ids=lambda path: path.name)
def test_paths_exist(document: Path) -> None:
    assert len(list(_paths(_text(document)))) > 10
    assert _missing_paths(_text(document)) == []


def test_the_layout_names_every_folder_and_nothing_else() -> None:
    assert _missing_paths(_layout()) == []
    folders = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert folders - {path for path, _ in _paths(_layout())} == set()


def test_the_ladder_is_that_of_the_layering_test() -> None:
    rows = re.findall(r"^\| (\d+) \|([^|]+)\|", _layout(), re.MULTILINE)
    shown = {name: int(row) for row, names in rows for name in re.findall(r"`(\w+)(?:/|\.py)`", names)}
    lines = [line.split() for line in LADDER.strip().splitlines()]
    assert shown == {name: row for row, names in enumerate(lines) for name in names if not name.startswith("__")}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(document: Path) -> None:
    assert _dead_links(document) == []


@pytest.mark.parametrize("document", OF_TODAY, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_are_public_or_modules(document: Path) -> None:
    assert {name for name in _private_names(_text(document)) if not _is_module(name)} == set()


@pytest.mark.parametrize("arguments", [line for page in OF_TODAY for line in _commands(page)])
def test_commands_are_understood(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples")  # ds_z3.json is there
    group = typer.main.get_command(app)
    context = group.make_context("lowmem-load", shlex.split(arguments, comments=True))
    name, subcommand, rest = group.resolve_command(context, [*context._protected_args, *context.args])
    subcommand.make_context(name, rest, parent=context)


@pytest.mark.parametrize("document", OF_TODAY, ids=lambda path: str(path.relative_to(ROOT)))
def test_targets_of_make_and_scripts_exist(document: Path) -> None:
    text = _text(document)
    targets = set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", text, re.MULTILINE))
    assert targets <= set(re.findall(r"^([\w-]+)(?= |:)", _text(ROOT / "Makefile"), re.MULTILINE))
    scripts = set(re.findall(r"(?<![\w/])(?:benchmarks|docs|examples|tests)/[\w./-]+\w", text))
    assert [script for script in scripts if not (ROOT / script).exists()] == []


@pytest.mark.parametrize("document", OF_TODAY, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_have_the_options_that_pages_pass(document: Path) -> None:
    common = _text(ROOT / "examples" / "common.py")
    for script, arguments in re.findall(r"\b(examples/\w+\.py) ([^#\n]*)", "\n".join(blocks(document, "bash"))):
        known = re.findall(r'"(--[\w-]+)"', common + _text(ROOT / script))
        assert set(re.findall(r"--[\w-]+", arguments)) <= set(known), script


def test_the_readme_uses_public_names_alone() -> None:
    assert _names(_text(README))
    assert _private_names(_text(README)) == set()
