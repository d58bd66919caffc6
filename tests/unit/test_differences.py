"""Known differences from stock are what `make compat` saw, no more and no less, and a report names those that apply."""

from __future__ import annotations

import pytest
import torch

from lowmem_load import report
from lowmem_load.report import KNOWN, Difference, known_differences
from tests.compat.results import read_results

COMPARED = [result for result in read_results() if "Llama" in result["comparison"]]

TO_STOCK = "ours to stock"


@pytest.mark.parametrize("difference", KNOWN, ids=lambda difference: difference.topic)
def test_a_known_difference_was_seen_where_it_is_claimed_and_nowhere_else(difference: Difference) -> None:
    seen = {
        result["versions"][difference.package]: [
            model
            for model, ways in result["comparison"].items()
            if any(
                difference.concerns.rpartition(".")[0] in entry for entry in ways[TO_STOCK].get(difference.topic, [])
            )
        ]
        for result in COMPARED
    }
    assert seen == {version: list(difference.models) if difference.applies_to(version) else [] for version in seen}
    assert {difference.first, difference.last} <= seen.keys()


def test_every_difference_from_stock_that_was_seen_is_known() -> None:
    unknown = {
        (result["name"], model, topic)
        for result in COMPARED
        for model, ways in result["comparison"].items()
        for topic in ways[TO_STOCK]
        if topic != "losses"
        and not any(
            difference.applies_to(result["versions"][difference.package])
            and (model in difference.models and topic == difference.topic)
            for difference in KNOWN
        )
    }
    assert unknown == set()


def test_losses_differ_from_stock_only_beside_another_difference() -> None:
    alone = {
        (result["name"], model)
        for result in COMPARED
        for model, ways in result["comparison"].items()
        if list(ways[TO_STOCK]) == ["losses"]
    }
    assert alone == set()


def test_what_applies_to_the_installed_release_and_the_model_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    some = Difference("torch", "1.0", "2.0", ("Llama",), "buffers", "emb.inv_freq", "they differ")
    monkeypatch.setattr(report, "KNOWN", (some,))
    monkeypatch.setattr(torch, "__version__", "1.5+cpu")
    assert known_differences(["a.weight", "rotary_emb.inv_freq"]) == [
        "they differ (torch 1.0 to 2.0; docs/compatibility.md)"
    ]
    assert known_differences(["a.weight"]) == []
    monkeypatch.setattr(torch, "__version__", "2.0.1")
    assert known_differences(["rotary_emb.inv_freq"]) == []
