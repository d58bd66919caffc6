"""Legacy pytorch_model*.bin: partitions equal the ordinary load, and no rank reads more than its own part."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import builders
from tests.parity import BF16, FP32, compare_load
from tests.ranks import run_ranks

QWEN2_TIES = {"lm_head.weight": "model.embed_tokens.weight"}
BERT_TIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


def _cases(checkpoints: Path) -> dict[str, tuple[str, dict[str, Any], str | None, torch.dtype]]:
    """Arguments of `compare_load` by the name of the case."""
    float32, bfloat16 = torch.float32, torch.bfloat16
    llama = builders.tiny_llama(checkpoints)
    odd = builders.tiny_llama(checkpoints, float32, **builders.ODD_SIZES)
    qwen2 = builders.tiny_qwen2_tied(checkpoints)
    bert = builders.tiny_bert(checkpoints)
    tied_bert = str(builders.as_torch_bin(bert, ties=BERT_TIES))
    return {
        "llama, one file": (str(builders.as_torch_bin(llama)), BF16, None, bfloat16),
        "llama, sharded": (str(builders.as_torch_bin(llama, 3)), BF16, None, bfloat16),
        "llama, odd sizes, sharded, cast": (str(builders.as_torch_bin(odd, 2)), BF16, None, bfloat16),
        "qwen2, tied, one name": (str(builders.as_torch_bin(qwen2)), BF16, None, bfloat16),
        "qwen2, tied, both names": (str(builders.as_torch_bin(qwen2, ties=QWEN2_TIES)), BF16, None, bfloat16),
        "mixtral": (str(builders.as_torch_bin(builders.tiny_mixtral(checkpoints), 2)), BF16, None, bfloat16),
        "bert, tied, both names": (tied_bert, FP32, None, float32),
        "bert without its head": (tied_bert, FP32, "AutoModel", float32),
    }


def compare_all(cases: list[tuple[str, dict[str, Any], str | None, torch.dtype]]) -> list[dict[str, Any]]:
    """Rank function: one load after the other."""
    return [compare_load(*case) for case in cases]


@pytest.mark.parametrize("world_size", [2, 3])
def test_partitions_equal_the_ordinary_load(checkpoints: Path, world_size: int) -> None:
    cases = _cases(checkpoints)
    for results in run_ranks(compare_all, list(cases.values()), world_size=world_size, timeout_s=180):
        for case, result in zip(cases, results, strict=True):
            assert (case, result["differences"]) == (case, [])
            assert (case, result["read_bytes"]) == (case, result["needed_bytes"])
            assert (case, sorted(result["slow_paths"])) == (case, result["missing_keys"])


def test_sharded_bin_is_one_read_per_parameter(checkpoints: Path) -> None:
    path = builders.as_torch_bin(builders.tiny_llama(checkpoints), 3)
    for result in run_ranks(compare_load, str(path), BF16, None, torch.bfloat16, world_size=2):
        assert result["num_reads"] == result["num_parameters"]


def test_tied_weights_that_are_cast_are_read_once(checkpoints: Path) -> None:
    path = builders.as_torch_bin(builders.tiny_qwen2_tied(checkpoints, torch.float32), ties=QWEN2_TIES)
    for result in run_ranks(compare_load, str(path), BF16, None, torch.bfloat16, world_size=2):
        assert result["differences"] == []
        assert result["read_bytes"] == result["needed_bytes"]


def load_without_dtype(path: str) -> dict[str, Any]:
    """Rank function: dtype="auto" of a config that names none reads the dtype off the first file."""
    from transformers import AutoModelForCausalLM

    from lowmem_load import load_report, streaming
    from lowmem_load.hf.loader import modeling_utils

    before = modeling_utils.load_state_dict
    with streaming({"zero_optimization": {"stage": 2}}):
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    return {
        "dtype": str(model.dtype),
        "report": load_report(model).dtype,
        "restored": before is modeling_utils.load_state_dict,
    }


def test_dtype_is_found_in_the_file(checkpoints: Path, tmp_path: Path) -> None:
    path = tmp_path / "no-dtype"
    shutil.copytree(builders.as_torch_bin(builders.tiny_llama(checkpoints), 3), path)
    config = (path / "config.json").read_text()
    assert '"bfloat16"' in config
    (path / "config.json").write_text(config.replace('"bfloat16"', "null"))
    for found in run_ranks(load_without_dtype, str(path), world_size=2):
        assert found == {"dtype": "torch.bfloat16", "report": "torch.bfloat16", "restored": True}


def failures(paths: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Rank function: the error of each load, by class name and text."""
    from lowmem_load import load_model

    found = []
    for path, kwargs in paths.items():
        try:
            load_model(path, BF16, **kwargs)
            found.append(("nothing", ""))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    return found


def test_what_cannot_be_streamed_is_one_clear_error(checkpoints: Path, tmp_path: Path) -> None:
    source = builders.as_torch_bin(builders.tiny_llama(checkpoints))
    state = torch.load(source / "pytorch_model.bin", weights_only=True)
    folders = []
    for name in ("old", "evil", "truncated"):
        shutil.copytree(source, tmp_path / name)
        folders.append(tmp_path / name)
    old, evil, truncated = folders
    torch.save(state, old / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    torch.save({**state, "extra": print}, evil / "pytorch_model.bin")
    data = (source / "pytorch_model.bin").read_bytes()
    (truncated / "pytorch_model.bin").write_bytes(data[:-100])
    cases: dict[str, dict[str, Any]] = {
        str(old): {},
        str(evil): {},
        str(truncated): {},
        str(source): {"gguf_file": "x.gguf"},
    }
    expected = [
        ("CheckpointError", "old torch format"),
        ("CheckpointError", "names __builtin__.print"),
        ("TruncatedFileError", "download it again"),
        ("UnsupportedError", "gguf_file cannot be streamed"),
    ]
    for found in run_ranks(failures, cases, world_size=2):
        for (kind, text), (expected_kind, expected_text) in zip(found, expected, strict=True):
            assert (kind, expected_text) == (expected_kind, expected_text), text
            assert expected_text in text
