"""The parts of tests/frameworks that run nothing: its cases, what it compares, and the tables that it writes."""

from __future__ import annotations

import copy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lowmem_load.report import LoadReport
from tests.frameworks import page
from tests.frameworks.cases import FILE, read_cases
from tests.frameworks.compare import (
    STREAMED,
    RankResult,
    Run,
    compare,
    different,
    first_difference,
    is_equal,
    saved_tensors,
)
from tests.frameworks.page import read_results
from tests.frameworks.run import HERE, reason
from tests.venvs import without

EQUAL: dict[str, Any] = {
    "date": "2026-11-22",
    "versions": {"python": "3.11.7", "trl": "1.16.0"},
    "losses": {"stock": [5.5, 5.25], "first difference": ""},
    "saved": {"tensors": 57, "different": []},
    "streamed loads": 1,
    "peaks": {"load": [267.8, 104.3]},
}
CASE = read_cases()[0]


def test_cases_have_names_and_files_of_their_own() -> None:
    cases = read_cases()
    assert len({case.name for case in cases}) == len(cases)
    named = [word for case in cases for word in shlex.split(case.command) if word.startswith(("configs/", "scripts/"))]
    assert named
    assert [name for name in named if not (HERE / name).is_file()] == []


def test_two_cases_of_one_name_are_refused(tmp_path: Path) -> None:
    text = FILE.read_text(encoding="utf-8")
    twice = text + text[text.index("  - <<:") :].split("\n\n")[0].replace("&", "&again_")
    path = tmp_path / "cases.yaml"
    path.write_text(twice, encoding="utf-8")
    with pytest.raises(ValueError, match="several cases are called trl-"):
        read_cases(path)


def test_requirements_without_what_needs_a_gpu() -> None:
    requirements = [
        "torch>=2",
        "xformers>=0.0.33; sys_platform != 'darwin'",
        "deepspeed<0.19; extra == 'deepspeed'",
        "deepspeed-kernels; extra == 'deepspeed'",
        "vllm; extra == 'vllm'",
        "ray[default]==2.55.0",
        "colorama; sys_platform == 'win32'",
    ]
    kept = without(requirements, ["deepspeed"], ["xFormers", "deepspeed_kernels"])
    assert kept == ["torch>=2", "deepspeed<0.19", "ray[default]==2.55.0"]


def test_the_last_exception_of_a_rank_is_the_reason() -> None:
    log = "[rank1]: ValueError: no fp16\nFutureWarning: x\nraise ChildFailedError(\na.b.ChildFailedError: \n====\n"
    assert reason(log) == "[rank1]: ValueError: no fp16"
    assert reason("\nKilled\n") == "Killed"
    assert reason("") == "nothing was printed"


def test_the_first_loss_that_differs_is_named() -> None:
    assert first_difference([[1.5, 2.5], [3.0]], [[1.5, 2.5], [3.0]]) == ""
    assert first_difference([[1.5, 2.5]], [[1.5, 2.25]]) == "rank 0, step 2: 2.25 instead of 2.5"
    assert first_difference([[1.5], [2.5, 3.5]], [[1.5], [2.5]]) == "rank 1: 1 losses instead of 2"
    assert first_difference([[], []], [[], []]) == "no engine went back from a loss"


def test_saved_tensors_are_compared_by_file_name_and_bits(tmp_path: Path) -> None:
    found = []
    for way, value in (("stock", 0.0), ("ours", -0.0)):  # equal as numbers
        folder = tmp_path / way
        (folder / "checkpoint-4").mkdir(parents=True)
        save_file({"a": torch.tensor([value]), "b": torch.ones(2, dtype=torch.bfloat16)}, folder / "model.safetensors")
        torch.save({"c": torch.zeros(3)}, folder / "checkpoint-4" / "adapter_model.bin")
        found.append(saved_tensors(folder))
    stock, ours = found
    assert stock.keys() == {"model.safetensors: a", "model.safetensors: b", "checkpoint-4/adapter_model.bin: c"}
    assert [entry.split(":")[1] for entry in different(stock, ours)] == [" a"]
    del ours["model.safetensors: b"]
    assert "nothing instead of bfloat16 [2]" in different(stock, ours)[1]


def test_a_case_is_equal_only_if_it_was_streamed_and_saved_something() -> None:
    ranks = [RankResult([5.5], 5 * 2**20), RankResult([5.25], 6 * 2**20)]
    stock, ours = Run(ranks, {"a": "x"}, 0), Run(ranks, {"a": "x"}, 1)
    result = compare(stock, ours)
    assert is_equal(result)
    assert result["peaks"] == {"load": [6.0, 6.0]}
    for other in (compare(stock, Run(ranks, {"a": "x"}, 0)), compare(stock, Run(ranks, {"a": "y"}, 1))):
        assert not is_equal(other)
    assert not is_equal(compare(Run(ranks, {}, 0), Run(ranks, {}, 1)))
    assert not is_equal({"error": "stock: killed"})


def test_a_load_is_counted_by_what_the_report_says() -> None:
    title, *_ = str(LoadReport("/tmp/tiny", 0, 2)).splitlines()
    said = f"x\n[default0]:lowmem_load: {title}\n  read: 0.80 MiB of 1.6 MiB in the files\n"
    assert len(STREAMED.findall(said + "lowmem_load: on: models that are loaded\n" + said)) == 2


def test_the_table_stands_between_the_markers() -> None:
    text = "a\n<!-- written by tests/frameworks -->\nold\n<!-- end -->\nb\n"
    written = page.with_table(text, [CASE], {CASE.name: EQUAL})
    assert written.startswith("a\n<!-- written") and written.endswith("<!-- end -->\nb\n") and "old" not in written
    [row] = [line for line in written.splitlines() if line.startswith(f"| {CASE.framework} ")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [CASE.framework, CASE.what, CASE.model, "equal, 57", "268", "104"]
    assert f"- {CASE.framework}: trl 1.16.0; 2026-11-22" in written
    assert page.with_table(written, [CASE], {CASE.name: EQUAL}) == written


def test_the_verdict_says_what_differs_or_failed() -> None:
    assert page.verdict({}) == "not run yet"
    assert page.verdict({"error": "stock: a | b\n c"}) == "failed: stock: a \\| b c"
    assert page.verdict(EQUAL) == "equal, 57"
    other = copy.deepcopy(EQUAL)
    other["losses"]["first difference"] = "rank 0, step 2: 2.25 instead of 2.5"
    other["saved"]["different"] = ["model.safetensors: a: x instead of y"]
    assert page.verdict(other) == "losses: rank 0, step 2: 2.25 instead of 2.5; tensors: 1 of 57 differ"
    assert page.verdict({**EQUAL, "streamed loads": 0}) == "nothing was streamed"


def test_the_page_is_that_of_the_results() -> None:
    text = page.FILE.read_text(encoding="utf-8")
    assert page.MARKED.search(text)
    assert page.with_table(text, read_cases(), read_results()) == text


def test_results_are_as_the_cases_say() -> None:
    """A difference without a reason, or a reason without a difference, is not what the pages may say."""
    results = read_results()
    ran = [(case, results[case.name]) for case in read_cases() if case.name in results]
    assert [case.name for case, result in ran if bool(case.differs) == is_equal(result)] == []
