"""Where checkpoints lie and how they are stored: folders, variants, surplus files, remote code, block scales."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from lowmem_load import UnsupportedError, load_model
from tests import builders
from tests.conversions.checkpoints import write_fp8
from tests.parity import BF16, FP32, assert_loads_alike
from tests.ranks import run_ranks


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def in_subfolder(checkpoints: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    copied(builders.tiny_llama(checkpoints), tmp_path / "repo" / "nested")
    return tmp_path / "repo", {"subfolder": "nested", "auto_class": "LlamaForCausalLM"}


def with_variant(checkpoints: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    folder = copied(builders.tiny_llama(checkpoints), tmp_path / "variant")
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    return folder, {"variant": "fp16"}


def with_surplus_files(checkpoints: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A second file that the index does not name, and a tensor that the model does not have."""
    folder = copied(builders.tiny_llama(checkpoints, max_shard_size="20KB"), tmp_path / "surplus")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    save_file({"extra.weight": torch.ones(5)}, folder / "extra.safetensors", metadata={"format": "pt"})
    save_file({"unused": torch.ones(5)}, folder / "unused.safetensors", metadata={"format": "pt"})
    index["weight_map"]["extra.weight"] = "extra.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder, {}


def with_mismatch(checkpoints: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    folder = copied(builders.tiny_bert(checkpoints), tmp_path / "mismatch")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "type_vocab_size": 3}))
    return folder, {"ignore_mismatched_sizes": True, "dtype": torch.float32}


def with_fp8(checkpoints: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path / "fp8"
    return folder, {"quantization": {**write_fp8(folder), "dequantize": True}}


def load_format(
    path: str, ds_config: dict[str, Any], options: dict[str, Any], slow: list[str], reads_are_exact: bool
) -> None:
    options = {key: value for key, value in options.items() if key != "dtype"}
    auto_class = options.pop("auto_class", None)
    quantization = options.pop("quantization", None)
    if quantization is not None:
        fields = {key: value for key, value in quantization.items() if key != "quant_method"}
        options["quantization_config"] = transformers.FineGrainedFP8Config(**fields)
    dtype = torch.bfloat16 if "bf16" in ds_config else torch.float32
    report = assert_loads_alike(path, ds_config, auto_class, dtype, options)
    assert [path.name for path in report.slow_paths] == slow
    if reads_are_exact:
        assert report.read_bytes == report.needed_bytes


def load_formats(cases: list[tuple[str, dict[str, Any], dict[str, Any], list[str], bool]], quantized: str) -> None:
    """Rank function: all cases in one launch, which takes longer than a load; `quantized` is refused."""
    for case in cases:
        load_format(*case)
    with pytest.raises(UnsupportedError, match=r"quantization 'fp8' cannot be partitioned by ZeRO-3.*dequantize=True"):
        load_model(quantized, BF16)


def test_loads_as_an_ordinary_load_does(checkpoints: Path, tmp_path: Path) -> None:
    cases = []
    for build, ds_config, slow in [
        (in_subfolder, BF16, []),
        (with_variant, BF16, []),
        (with_surplus_files, BF16, []),
        (with_mismatch, FP32, ["bert.embeddings.token_type_embeddings.weight"]),
        (with_fp8, BF16, []),
    ]:
        folder, options = build(checkpoints, tmp_path)
        exact = build is not with_fp8  # ranks share the scale of a block that their ranges cut
        cases.append((str(folder), ds_config, options, slow, exact))
    run_ranks(load_formats, cases, str(tmp_path / "fp8"), timeout_s=120)
