"""What `make compat` computes: requirements that pins break, counts, and the page that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from lowmem_load import contract
from tests.compat import page
from tests.compat.environments import MOST, Environment, read_environments
from tests.compat.groups import GROUPS, counted
from tests.compat.pins import broken
from tests.compat.results import read_results, write_results
from tests.ranks import REPO


def test_the_page_says_what_the_results_say() -> None:
    text = page.FILE.read_text(encoding="utf-8")
    assert page.with_tables(text, read_results()) == text, "run python -m tests.compat.page"


def test_a_result_is_of_the_present_pins_of_its_environment() -> None:
    environments = {environment.name: environment for environment in read_environments()}
    assert len(environments) <= MOST
    assert read_results()
    for result in read_results():
        environment = environments[result["name"]]
        for name, pin in {"python": environment.python, **environment.pins}.items():
            digits = Version(pin).release
            assert Version(result["versions"][name]).release[: len(digits)] == digits, (environment.name, name)


@pytest.mark.parametrize("supported", [contract.DEEPSPEED, contract.TRANSFORMERS, contract.TORCH], ids=str)
def test_the_supported_range_is_what_was_tested(supported: Any) -> None:
    tested = [Version(Version(result["versions"][supported.package]).base_version) for result in read_results()]
    assert Version(supported.newest) == max(tested)
    assert Version(supported.oldest).release[:2] == min(tested).release[:2]
    assert Version(supported.oldest) <= min(tested)


def test_requirements_that_pins_break_are_named() -> None:
    requirements = [
        "Torch<2.8,>=2.6",
        "deep-speed<=0.16.9; extra == 'zero'",
        "peft<1; extra == 'other'",
        "numpy<2; python_version < '3'",
        "absent==1",
        "trl!=0.9",
    ]
    pins = {"torch": "2.8.0", "deep_speed": "0.18.4", "peft": "1.0", "numpy": "2.1", "trl": "0.10"}
    assert broken(requirements, pins, {"zero"}) == [
        "Torch<2.8,>=2.6, and Torch is 2.8.0",
        "deep-speed<=0.16.9; extra == 'zero', and deep-speed is 0.18.4",
    ]
    assert broken(requirements, pins, set()) == ["Torch<2.8,>=2.6, and Torch is 2.8.0"]


def test_groups_name_tests_that_exist() -> None:
    """pytest runs nothing at all, and ends with status 4, when one of its arguments is gone."""
    assert [name for names in GROUPS.values() for name in names if not (REPO / name).exists()] == []


def test_what_came_of_tests_is_counted_by_group() -> None:
    parity, loader, kits = (
        "tests/multi_rank/test_parity.py",
        "tests/unit/test_loader.py",
        "tests/contracts/test_kits.py",
    )
    entries = [
        {"file": parity, "name": "test_one", "outcome": "passed", "why": ""},
        {"file": parity, "name": "test_two[1]", "outcome": "failed", "why": "assert 1 == 2"},
        {"file": loader, "name": "test_three", "outcome": "skipped", "why": "no GPU"},
        {"file": kits, "name": "import", "outcome": "failed", "why": "no module"},
    ]
    nothing: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": {}, "skips": {}}
    assert counted(entries) == {
        "parity": {**nothing, "passed": 1, "failed": 1, "failures": {"test_parity::test_two[1]": "assert 1 == 2"}},
        "seams": {
            "passed": 0,
            "failed": 1,
            "skipped": 1,
            "failures": {"test_kits::import": "no module"},
            "skips": {"test_loader::test_three": "no GPU"},
        },
    }


def test_results_replace_those_of_the_same_environment(tmp_path: Path) -> None:
    first, second = read_environments()[:2]
    path = tmp_path / "tested.json"
    found = {"date": "2026-11-22", "versions": {"torch": "1"}, "pins": {}, "groups": {}, "comparison": {}}
    write_results([(second, found)], path)
    write_results([(first, found), (second, {**found, "date": "2026-11-23"})], path)
    assert [(entry["name"], entry["date"]) for entry in read_results(path)] == [
        (first.name, "2026-11-22"),
        (second.name, "2026-11-23"),
    ]


def test_a_page_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="the page has the markers"):
        page.with_tables("<!-- written by tests/compat: groups -->\n<!-- end -->\n", read_results())


def test_what_failed_and_what_was_skipped_is_on_the_page() -> None:
    groups = {
        "modes": {
            "passed": 3,
            "failed": 1,
            "skipped": 2,
            "failures": {"test_modes::test_a": "assert 1 == 2"},
            "skips": {"x": "no GPU", "y": "no GPU"},
        }
    }
    results: list[Any] = [{"name": "here", "groups": groups}]
    header, _, row = page.groups_table(results).splitlines()
    assert (header, row) == ("| environment | modes |", "| here | 3, 1 failed, 2 skipped |")
    assert page.exceptions_list(results).splitlines() == [
        "- here, failed: `test_modes::test_a`: assert 1 == 2",
        "- skipped, no GPU: 2 in here",
    ]


def test_pipelines_run_where_their_packages_are() -> None:
    base = {"name": "x", "why": "", "python": "3.11", "torch": "2", "deepspeed": "1", "transformers": "5"}
    assert not Environment(**base, accelerate="1", extra={"peft": "1"}).has_pipelines
    assert Environment(**base, accelerate="1", extra={"peft": "1", "trl": "1", "datasets": "1"}).has_pipelines
