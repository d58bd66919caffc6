"""Every combination of ds_config and training arguments, and docs/reference/configuration.md against the code."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lowmem_load.config.ds_config import precision_of
from lowmem_load.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"

DS_VALUES = (None, "auto", True, False)

# By (TrainingArguments.bf16, .fp16): one row per ds_config bf16, one letter per fp16, both in the order of DS_VALUES.
# b bf16, h fp16 (half), s fp32 (single), B both on, C contradiction.
EXPECTED = {
    (None, None): ("shhs", "bbhb", "bbBb", "shhs"),
    (None, True): ("hhhC", "hhhC", "BBBC", "hhhC"),
    (None, False): ("ssCs", "bbCb", "bbCb", "ssCs"),
    (True, None): ("bbBb", "bbBb", "bbBb", "CCCC"),
    (True, True): ("BBBC", "BBBC", "BBBC", "CCCC"),
    (True, False): ("bbCb", "bbCb", "bbCb", "CCCC"),
    (False, None): ("shhs", "shhs", "CCCC", "shhs"),
    (False, True): ("hhhC", "hhhC", "CCCC", "hhhC"),
    (False, False): ("ssCs", "ssCs", "CCCC", "ssCs"),
}
MEANING = {"b": "bf16", "h": "fp16", "s": "fp32", "B": "error: both on", "C": "error: contradiction"}


def outcome(config: dict[str, Any], **trainer: Any) -> str:
    """Returns the precision, or the kind of error, in the words of the tables."""
    try:
        precision = precision_of(config, **trainer)
    except ConfigError as error:
        kinds = {"both enabled": "error: both on", "contradict each other": "error: contradiction"}
        return next((kind for text, kind in kinds.items() if text in str(error)), str(error))
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[precision]


def config_with(ds_bf16: Any, ds_fp16: Any) -> dict[str, Any]:
    return {name: {"enabled": value} for name, value in (("bf16", ds_bf16), ("fp16", ds_fp16)) if value is not None}


def table_of_docs() -> dict[tuple[Any, Any], str]:
    """Returns every cell of the page's table, for `load_model` without training arguments, by (ds bf16, ds fp16)."""
    words = {"absent": None, '"auto"': "auto", "true": True, "false": False}
    cells: dict[tuple[Any, Any], str] = {}
    columns: list[Any] = []
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        if line.startswith(r"| bf16 \ fp16 |"):
            columns = [words[word.removeprefix("fp16 ")] for word in split_row(line)[1:]]
        elif line.startswith("| **bf16"):
            first, *row = split_row(line)
            ds_bf16 = words[first.strip("*").removeprefix("bf16 ")]
            for ds_fp16, cell in zip(columns, row, strict=True):
                assert (ds_bf16, ds_fp16) not in cells, "the page has this cell twice"
                cells[ds_bf16, ds_fp16] = cell
    return cells


def split_row(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


# ---- the tables


def test_every_cell() -> None:
    assert EXPECTED.keys() == set(itertools.product((None, True, False), repeat=2))
    for (trainer_bf16, trainer_fp16), rows in EXPECTED.items():
        cells = zip(itertools.product(DS_VALUES, repeat=2), "".join(rows), strict=True)
        for (ds_bf16, ds_fp16), expected in cells:
            trainer = {"trainer_bf16": trainer_bf16, "trainer_fp16": trainer_fp16}
            found = outcome(config_with(ds_bf16, ds_fp16), **trainer)
            assert found == MEANING[expected], (ds_bf16, ds_fp16, trainer)


def test_the_table_of_the_docs_agrees_with_the_code() -> None:
    cells = table_of_docs()

    assert cells.keys() == set(itertools.product(DS_VALUES, repeat=2))
    for (ds_bf16, ds_fp16), cell in cells.items():
        assert outcome(config_with(ds_bf16, ds_fp16)) == cell, (ds_bf16, ds_fp16)


# ---- messages


def test_a_contradiction_names_both_keys_and_values() -> None:
    message = r"ds_config bf16\.enabled=False and TrainingArguments\.bf16=True contradict.*make them equal"
    with pytest.raises(ConfigError, match=message):
        precision_of(config_with(False, None), trainer_bf16=True)


@pytest.mark.parametrize("value", ["AUTO", 1, [], {}])
def test_other_values_are_refused(value: Any) -> None:
    message = re.escape(f'fp16.enabled: expected true, false or "auto", got {value!r}')
    with pytest.raises(ConfigError, match=message):
        precision_of(config_with(None, value))
    with pytest.raises(ConfigError, match=re.escape(f"TrainingArguments.bf16: expected True or False, got {value!r}")):
        precision_of(config_with(None, None), trainer_bf16=value)


@pytest.mark.parametrize("config", [{"fp16": True}, {"fp16": None}, {"bf16": []}, {"bf16": None}])
def test_a_section_that_is_not_an_object_is_refused(config: dict[str, Any]) -> None:
    name = next(iter(config))
    message = rf"ds_config {name}: expected an object such as \{{\"enabled\": true\}}, got "
    with pytest.raises(ConfigError, match=message):
        precision_of(config)


# ---- sections


def test_a_section_without_enabled_counts_as_absent() -> None:
    config = {"fp16": {"loss_scale": 0}, "bf16": {}}

    assert precision_of(config) is torch.float32
    assert precision_of(config, trainer_bf16=True) is torch.bfloat16


def test_the_old_section_name_is_refused() -> None:
    with pytest.raises(ConfigError, match='bfloat16: rename this section to "bf16"'):
        precision_of({"bfloat16": {"enabled": True}})


def test_what_is_absent_is_read_as_deepspeed_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config

    sections = (None, {}, {"enabled": True}, {"enabled": False})
    for bf16, fp16 in itertools.product(sections, repeat=2):
        named = {"bf16": bf16, "fp16": fp16}
        config = {name: section for name, section in named.items() if section is not None}
        enabled = get_bfloat16_config(config).enabled, get_float16_config(config).enabled
        expected = {(True, False): "b", (False, True): "h", (False, False): "s", (True, True): "B"}
        assert outcome(config) == MEANING[expected[enabled]], config
