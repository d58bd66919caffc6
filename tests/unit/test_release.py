"""What a release lacks, or has too much of, is found, and what `make compat` says was tested."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from lowmem_load.foreign_names import DEEPSPEED, TORCH, TRANSFORMERS
from tests.compat.__main__ import ENVIRONMENTS, GROUPS, TESTED
from tests.ranks import REPO
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


# -- supported releases ------------------------------------------------------------------------------------------------


RESULTS = json.loads(TESTED.read_text(encoding="utf-8"))


def test_a_result_is_of_the_present_pins_of_its_environment() -> None:
    assert len(ENVIRONMENTS.keys() - {"next"}) <= 6
    assert RESULTS
    for name, result in RESULTS.items():
        for package, pin in ENVIRONMENTS[name]["pins"].items():
            digits = Version(pin).release
            assert Version(result["versions"][package]).release[: len(digits)] == digits, (name, package)


@pytest.mark.parametrize("supported", [DEEPSPEED, TRANSFORMERS, TORCH], ids=str)
def test_the_supported_range_is_what_was_tested(supported: Any) -> None:
    tested = [Version(Version(result["versions"][supported.package]).base_version) for result in RESULTS.values()]
    assert Version(supported.newest) == max(tested)
    assert Version(supported.oldest).release[:2] == min(tested).release[:2]
    assert Version(supported.oldest) <= min(tested)


def test_groups_name_tests_that_exist() -> None:
    """pytest runs nothing at all, and ends with status 4, when one of its arguments is gone."""
    assert [name for names in GROUPS.values() for name in names if "/" in name and not (REPO / name).exists()] == []
