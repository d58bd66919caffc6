"""What a release lacks, or has too much of, is found."""

from __future__ import annotations

import re
from pathlib import Path

from tests.release import COMMANDS, ROOT, problems_of_description, problems_of_sdist, problems_of_wheel, tracked

METADATA = {f"lowmem_load-1.dist-info/{name}" for name in ("METADATA", "entry_points.txt", "licenses/LICENSE")}


def test_what_is_tracked_is_the_package_and_the_file_for_site_packages() -> None:
    assert {"lowmem_load/py.typed", "lowmem_load_startup.pth"} <= tracked()
    assert not any("__pycache__" in name for name in tracked())


def test_a_whole_wheel_has_the_package_and_nothing_else() -> None:
    assert list(problems_of_wheel(tracked() | METADATA, tracked())) == []
    lacking = tracked() - {"lowmem_load/py.typed"} | METADATA - {"lowmem_load-1.dist-info/licenses/LICENSE"}
    assert list(problems_of_wheel(lacking | {"tests/__init__.py"}, tracked())) == [
        "the wheel lacks lowmem_load/py.typed",
        "the wheel has tests/__init__.py",
        "the wheel lacks its licenses/LICENSE",
    ]


def test_an_sdist_builds_and_has_no_tests() -> None:
    whole = tracked() | {"LICENSE", "README.md", "pyproject.toml", "setup.py", "PKG-INFO"}
    assert list(problems_of_sdist(whole, tracked())) == []
    assert list(problems_of_sdist(whole - {"setup.py"} | {"tests/test_examples.py"}, tracked())) == [
        "the sdist lacks setup.py",
        "the sdist has tests/test_examples.py",
    ]


def test_a_description_refers_to_nothing_that_an_index_lacks() -> None:
    head = "Metadata-Version: 2.4\nName: lowmem-load\n\n"
    assert list(problems_of_description(f"{head}[a](https://b.org), [c](#d), `e`")) == []
    assert list(problems_of_description(head)) == ["the wheel has no description"]
    assert list(problems_of_description(f"{head}![one\npicture](a.svg)\n[a page](docs/b.md)")) == [
        "the description refers to a.svg, which an index does not have",
        "the description refers to docs/b.md, which an index does not have",
    ]


def test_every_example_is_run_from_the_wheel() -> None:
    paths = (ROOT / "examples").rglob("*.py")
    scripts = {path.name for path in paths if "__main__" in path.read_text(encoding="utf-8")} | {"first_load.py"}
    run = {Path(command.split()[0]).name for command in COMMANDS.values()}
    assert run == scripts - {"make_model.py"}  # which is run first


def test_the_version_is_the_same_everywhere() -> None:
    found = {
        name: re.findall(rf"^version{sign}(\S+)$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        for name, sign in (("pyproject.toml", ' = "'), ("CITATION.cff", ": "))
    }
    assert [version.strip('"') for version in found["pyproject.toml"]] == found["CITATION.cff"] != []
    assert f"\n## [{found['CITATION.cff'][0]}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
