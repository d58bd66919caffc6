"""Legacy pytorch_model*.bin: partitions equal the ordinary load, and no rank reads more than its own part."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import builders
from tests.parity import BF16, FP32, assert_loads_alike
from tests.ranks import run_ranks

QWEN2_TIES = {"lm_head.weight": "model.embed_tokens.weight"}
BERT_TIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


def _cases(checkpoints: Path) -> dict[str, tuple[str, dict[str, Any], str | None, torch.dtype]]:
    """Arguments of `assert_loads_alike` by the name of the case."""
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


def load_all(cases: dict[str, tuple[str, dict[str, Any], str | None, torch.dtype]]) -> None:
    """Rank function: one load after the other."""
    for name, case in cases.items():
        report = assert_loads_alike(*case)
        assert report.read_bytes == report.needed_bytes, name
        assert sorted(path.name for path in report.slow_paths) == report.loading_info["missing_keys"], name


def test_partitions_equal_the_ordinary_load(checkpoints: Path) -> None:
    run_ranks(load_all, _cases(checkpoints), world_size=3, timeout_s=180)


def find_dtype(path: str) -> None:
    """Rank function: dtype="auto" of a config that names none reads the dtype off the first file."""
    from transformers import AutoModelForCausalLM

    from lowmem_load import load_report, streaming
    from lowmem_load.models.loader import modeling_utils

    with streaming({"zero_optimization": {"stage": 2}}):
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert load_report(model).contents.endswith(", bfloat16")
    state = modeling_utils.load_state_dict(next(map(str, Path(path).glob("*.bin"))))
    assert all(type(value) is torch.Tensor for value in state.values())


def test_dtype_is_found_in_the_file(checkpoints: Path, tmp_path: Path) -> None:
    path = tmp_path / "no-dtype"
    shutil.copytree(builders.as_torch_bin(builders.tiny_llama(checkpoints), 3), path)
    config = (path / "config.json").read_text()
    assert '"bfloat16"' in config
    (path / "config.json").write_text(config.replace('"bfloat16"', "null"))
    run_ranks(find_dtype, str(path))


def refuse(cases: list[tuple[str, dict[str, Any], str, str]]) -> None:
    """Rank function: the error of each load has the class name and a part of the text that are given."""
    from lowmem_load import load_model

    for path, kwargs, kind, text in cases:
        with pytest.raises(Exception, match=re.escape(text)) as caught:
            load_model(path, BF16, **kwargs)
        assert caught.typename == kind


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
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        (str(old), {}, "CheckpointError", "old torch format"),
        (str(evil), {}, "CheckpointError", "names __builtin__.print"),
        (str(truncated), {}, "TruncatedFileError", "download it again"),
        (str(source), {"gguf_file": "x.gguf"}, "UnsupportedError", "gguf_file cannot be streamed"),
    ]
    run_ranks(refuse, cases)
