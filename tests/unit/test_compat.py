"""What `make compat` says was tested."""

import json
from typing import Any

import pytest
from packaging.version import Version

from lowmem_load.foreign_names import DEEPSPEED, TORCH, TRANSFORMERS
from tests.compat.__main__ import ENVIRONMENTS, GROUPS, TESTED
from tests.ranks import REPO

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
