"""Known differences from stock are what `make compat` saw, no more and no less."""

from __future__ import annotations

import pytest

from tests.compat.known import KNOWN, Difference
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
