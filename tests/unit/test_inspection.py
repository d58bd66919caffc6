"""`lowmem-load inspect`: files as safetensors reads them, models as transformers builds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from lowmem_load.api.inspect_checkpoint import Inspection, inspect_checkpoint
from lowmem_load.hf.remote_names import find_checkpoint
from tests import builders
from tests.multi_rank.test_formats import with_fp8


def inspected(folder: Path, auto_class: str | None = None) -> Inspection:
    return inspect_checkpoint(find_checkpoint(str(folder)), auto_class)


def kinds(found: Inspection) -> dict[str, int]:
    return {each.kind: each.num_parameters for each in found.conversions}


@pytest.mark.parametrize("build", [builders.tiny_llama, builders.tiny_mixtral, builders.tiny_qwen2_tied])
def test_files_and_parameters_are_counted(build: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = build(tmp_path)
    found = inspected(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert found.num_elements == sum(each.numel() for each in model.parameters())
    assert sum(each.num_parameters for each in found.conversions) == len(list(model.parameters()))
    assert sum(each.nbytes for each in found.conversions) == sum(each.nbytes for each in model.parameters())
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        assert found.files[path.name] == path.stat().st_size
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    assert set(found.tensors) == names
    header_bytes = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in folder.glob("*.safetensors"))
    assert found.by_dtype == {"bfloat16": (len(names), sum(found.files.values()) - header_bytes)}


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        # Of each of two layers: w1 and w3 of four experts in one, w2 of four in another; and the router.
        (builders.tiny_mixtral, {"made of 8 tensors": 2, "made of 4 tensors": 2, "renamed": 2, "unchanged": 15}),
        (builders.tiny_qwen3_vl_moe, {"rearranged": 4, "unchanged": 48}),  # gate_up and down of two layers, transposed
        (builders.tiny_llava, {"renamed": 64}),
        # seven projections in each of two layers have values and scales
        (lambda root: with_fp8(root, root)[0], {"made of 2 tensors, aten.mul.Tensor on ranges": 14, "unchanged": 7}),
    ],
    ids=["experts", "transposed", "renamed", "fp8"],
)
def test_conversions_are_named(build: Callable[[Path], Path], expected: dict[str, int], tmp_path: Path) -> None:
    assert kinds(inspected(build(tmp_path))) == expected


def test_a_cast_is_named(tmp_path: Path) -> None:
    folder = builders.tiny_llama(tmp_path, torch.float32)
    config = AutoConfig.from_pretrained(folder)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    (found,) = inspected(folder).conversions
    assert (found.kind, found.num_parameters) == ("cast from float32 to bfloat16", 21)


def test_missing_and_tied_parameters_are_named(tmp_path: Path) -> None:
    found = inspected(builders.tiny_llama(tmp_path), "AutoModelForSequenceClassification")
    assert kinds(found) == {"unchanged": 20, "initialised on this rank": 1}
    assert (found.missing_keys, found.unexpected_keys) == (["score.weight"], ["lm_head.weight"])
    (missing,) = (each for each in found.conversions if each.kind == "initialised on this rank")
    assert missing.example == "score.weight <- nothing in the files"
    assert inspected(builders.tiny_qwen2_tied(tmp_path)).tied == [["model.embed_tokens.weight", "lm_head.weight"]]
