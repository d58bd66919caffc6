"""Legacy pytorch_model*.bin, beyond test_parity.py: the dtype that a file has, and files that are refused."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import builders
from tests.parity import BF16
from tests.ranks import run_ranks


def find_dtype(path: str) -> None:
    """Rank function: dtype="auto" of a config that names none reads the dtype off the first file."""
    from transformers import AutoModelForCausalLM, modeling_utils

    from lowmem_load import load_report, streaming

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
