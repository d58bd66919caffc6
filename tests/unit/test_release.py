"""What a release lacks, or has too much of, is found."""

import re
from pathlib import Path

from tests.release import COMMANDS, ROOT, tracked


def test_what_is_tracked_is_the_package_and_the_file_for_site_packages() -> None:
    assert {"lowmem_load/py.typed", "lowmem_load_startup.pth"} <= tracked()
    assert not any("__pycache__" in name for name in tracked())


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
