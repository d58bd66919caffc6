"""The parts of tests/frameworks that run nothing: its cases, what it compares, and the tables that it writes."""

from __future__ import annotations

import shlex
from pathlib import Path

import torch
from safetensors.torch import save_file

from lowmem_load.load.report import LoadReport
from tests.frameworks import page
from tests.frameworks.cases import read_cases
from tests.frameworks.compare import (
    STREAMED,
    RankResult,
    Run,
    compare,
    different,
    is_equal,
    saved_tensors,
)
from tests.frameworks.page import read_results
from tests.frameworks.run import HERE


def test_cases_have_names_and_files_of_their_own() -> None:
    cases = read_cases()
    assert len({case.name for case in cases}) == len(cases)
    named = [word for case in cases for word in shlex.split(case.command) if word.startswith(("configs/", "scripts/"))]
    assert named
    assert [name for name in named if not (HERE / name).is_file()] == []


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
    late = compare(stock, Run([ranks[0], RankResult([5.5], 0)], {"a": "x"}, 1))
    assert late["losses"]["first difference"] == "rank 1, step 1: 5.5 instead of 5.25"
    longer = compare(stock, Run([RankResult([5.5, 5.5], 0), ranks[1]], {"a": "x"}, 1))
    assert longer["losses"]["first difference"] == "rank 0: 2 losses instead of 1"
    not_streamed, unlike = compare(stock, Run(ranks, {"a": "x"}, 0)), compare(stock, Run(ranks, {"a": "y"}, 1))
    nothing_saved = compare(Run(ranks, {}, 0), Run(ranks, {}, 1))
    assert not any(map(is_equal, (late, longer, not_streamed, unlike, nothing_saved)))
    assert not is_equal({"error": "stock: killed"})


def test_a_load_is_counted_by_what_the_report_says() -> None:
    title, *_ = str(LoadReport("/tmp/tiny", 0, 2)).splitlines()
    said = f"x\n[default0]:lowmem_load: {title}\n  read: 0.80 MiB of 1.6 MiB in the files\n"
    assert len(STREAMED.findall(said + "lowmem_load: on: models that are loaded\n" + said)) == 2


def test_the_page_is_that_of_the_results() -> None:
    text = page.FILE.read_text(encoding="utf-8")
    assert page.MARKED.search(text)
    assert page.with_table(text, read_cases(), read_results()) == text


def test_results_are_as_the_cases_say() -> None:
    """A difference without a reason, or a reason without a difference, is not what the pages may say."""
    results = read_results()
    ran = [(case, results[case.name]) for case in read_cases() if case.name in results]
    assert [case.name for case, result in ran if bool(case.differs) == is_equal(result)] == []
