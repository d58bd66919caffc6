"""A representative part of the zoo: loads of 60 model types under ZeRO-3, and of all that are converted on a mesh.

`walk.py` does all types.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.core_model_loading import WeightConverter

from tests.conversions.mappings import registry
from tests.zoo import walk
from tests.zoo.checks import Case
from tests.zoo.configs import model_types

pytestmark = pytest.mark.ranks  # by walk.py

TYPES: dict[str, tuple[str, ...]] = {
    "decoders": ("llama", "gpt2", "gptj", "gpt_neox", "bloom", "opt", "phi3", "gemma2", "qwen2", "qwen3", "olmo2"),
    "experts": ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "jamba", "granitemoe", "dbrx", "qwen3_next"),
    "state-space": ("mamba", "mamba2", "falcon_mamba", "zamba2", "rwkv", "recurrent_gemma"),
    "masked": ("bert", "roberta", "albert", "electra", "deberta-v2", "modernbert", "mpnet", "big_bird"),
    "encoder-decoder": ("t5", "bart", "pegasus", "marian", "led", "m2m_100"),
    "vision": ("vit", "swin", "convnext", "resnet", "detr", "segformer", "mask2former", "beit", "dinov2", "sam"),
    "speech": ("wav2vec2", "hubert", "whisper", "speecht5", "vits"),
    "vision-language": ("clip", "siglip", "llava", "qwen2_vl", "blip-2", "paligemma"),
}
"""60 model types by kind."""

FEW = ("llama", "gpt2", "mixtral", "qwen3_moe", "mamba", "bert", "t5", "vit", "wav2vec2", "whisper", "clip", "qwen2_vl")
"""One or two of each kind, for more ranks and the other precision."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """The loads to compare. Types that cannot be built here fail by name."""
    root = tmp_path_factory.mktemp("zoo")
    built = walk.build([name for names in TYPES.values() for name in names], root)
    assert {name: info["error"] for name, info in built.items() if "error" in info} == {}
    return walk.cases_of(built, root)


def _failures(
    cases: list[Case], world_size: int, precision: str, *, method: str = "lowmem", saves: bool = False
) -> dict[str, str]:
    outcomes = walk.compare(cases, world_size=world_size, precision=precision, method=method, saves=saves)
    assert len(outcomes) == len(cases)
    if saves:
        assert [outcome.name for outcome in outcomes if not outcome.total("saved")] == []
    return {
        outcome.name: outcome.error or outcome.status
        for outcome in outcomes
        if outcome.status not in ("exact", "unsteady")
    }


@pytest.mark.parametrize("kind", TYPES)
def test_two_ranks(cases: list[Case], kind: str) -> None:
    chosen = [case for case in cases if case.name.split("/")[0] in TYPES[kind]]
    assert _failures(chosen, 2, "fp32") == {}


def test_more_ranks_and_the_other_precision(cases: list[Case]) -> None:
    """Saved again as well: an ordinary load of that is the ordinary load of the original."""
    chosen = [case for case in cases if case.name.split("/")[0] in FEW]
    assert _failures(chosen, 3, "bf16", saves=True) == {}


def test_lazy_models(cases: list[Case]) -> None:
    assert _failures(cases, 1, "fp32", method="lazy") == {}


def test_two_ranks_of_fsdp2(tmp_path: Path) -> None:
    """The types whose weights transformers converts: where it slices before it converts, their shards are wrong."""
    known = registry()
    types = [name for name in model_types() if any(isinstance(each, WeightConverter) for each in known.get(name, ()))]
    built = walk.build(types, tmp_path)
    assert {name: info["error"] for name, info in built.items() if "error" in info} == {}
    assert _failures(walk.cases_of(built, tmp_path, cross=False), 2, "fp32", method="fsdp") == {}
