"""Every partition is bit-identical to the ordinary load, for every kind of checkpoint and every world size."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import builders
from tests.parity import BF16, FP32, assert_loads_alike
from tests.ranks import run_ranks
from tests.storage import on_network

QWEN2_TIES = {"lm_head.weight": "model.embed_tokens.weight"}
BERT_TIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
TINY = {"hidden_size": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "vocab_size": 7}
"""Norm weights of 2 elements: fewer than 3 ranks."""


def cases(checkpoints: Path, minilm: Path) -> dict[str, tuple[str, dict[str, Any], str | None, torch.dtype]]:
    """Arguments of `assert_loads_alike` by the name of the case."""
    float32, bfloat16 = torch.float32, torch.bfloat16
    odd = builders.tiny_llama(checkpoints, float32, "20KB", **builders.ODD_SIZES)
    few = builders.tiny_llama(checkpoints, **TINY)
    bert, qwen2, mixtral = (
        make(checkpoints) for make in (builders.tiny_bert, builders.tiny_qwen2_tied, builders.tiny_mixtral)
    )
    llama = builders.tiny_llama(checkpoints)
    tied_bert = str(builders.as_torch_bin(bert, ties=BERT_TIES))
    return {
        "llama": (str(llama), BF16, None, bfloat16),
        "llama, sharded": (str(builders.tiny_llama(checkpoints, max_shard_size="20KB")), BF16, None, bfloat16),
        "llama, odd sizes, sharded, cast": (str(odd), BF16, "AutoModelForCausalLM", bfloat16),
        "llama, fewer elements than ranks, cast": (str(few), FP32, None, float32),
        "qwen2, tied": (str(qwen2), BF16, None, bfloat16),
        "mixtral, experts fused on load": (str(mixtral), BF16, None, bfloat16),
        "bert, tied decoder": (str(bert), FP32, None, float32),
        "bert without its head, pooler missing": (str(bert), FP32, "AutoModel", float32),
        "minilm": (str(minilm), FP32, "AutoModel", float32),
        "minilm, classifier missing": (str(minilm), FP32, "AutoModelForSequenceClassification", float32),
        ".bin": (str(builders.as_torch_bin(llama)), BF16, None, bfloat16),
        ".bin, odd sizes, sharded, cast": (str(builders.as_torch_bin(odd, 2)), BF16, None, bfloat16),
        ".bin, tied, one name": (str(builders.as_torch_bin(qwen2)), BF16, None, bfloat16),
        ".bin, tied, both names": (str(builders.as_torch_bin(qwen2, ties=QWEN2_TIES)), BF16, None, bfloat16),
        ".bin, mixtral": (str(builders.as_torch_bin(mixtral, 2)), BF16, None, bfloat16),
        ".bin, bert, tied, both names": (tied_bert, FP32, None, float32),
        ".bin, bert without its head": (tied_bert, FP32, "AutoModel", float32),
    }


def load_all(cases: dict[str, tuple[str, dict[str, Any], str | None, torch.dtype]]) -> None:
    """Rank function: one load after the other in one process, so a leak from one into the next shows, too."""
    for name, case in cases.items():
        report = assert_loads_alike(*case)
        assert report.read_bytes == report.needed_bytes, name
        assert sorted(path.name for path in report.slow_paths) == report.loading_info["missing_keys"], name
        if name == "llama, sharded":  # nothing is converted or cast
            assert report.contents.startswith(f"{report.num_reads} tensors, ")
        if name == "minilm, classifier missing":
            assert report.loading_info["missing_keys"] == ["classifier.bias", "classifier.weight"]


def load_from_disk_and_network(cases: dict[str, Any], others: list[str]) -> None:
    load_all(cases)
    with on_network():
        for path in others:
            assert_loads_alike(path, BF16, None, torch.bfloat16)


@pytest.mark.parametrize("world_size", [*(pytest.param(ranks, marks=pytest.mark.release) for ranks in (1, 2, 4)), 3])
def test_partitions_equal_the_ordinary_load(checkpoints: Path, minilm: Path, world_size: int) -> None:
    found = cases(checkpoints, minilm)
    others = [found[name][0] for name in ("llama, odd sizes, sharded, cast", "mixtral, experts fused on load")]
    others.append(str(builders.tiny_qwen3_vl_moe(checkpoints)))
    run_ranks(load_from_disk_and_network, found, others, world_size=world_size, timeout_s=180)
