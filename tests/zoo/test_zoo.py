"""A representative part of the zoo: model types under ZeRO-3 and lazily, and those that are converted on a mesh.

`walk.py` does all types.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from transformers.core_model_loading import WeightConverter

from tests.conversions.mappings import registry
from tests.zoo import walk
from tests.zoo.checks import Case
from tests.zoo.configs import model_types

pytestmark = pytest.mark.ranks  # by walk.py

FEW = ("llama", "gpt2", "mixtral", "qwen3_moe", "mamba", "bert", "t5", "vit", "wav2vec2", "whisper", "clip", "qwen2_vl")
"""One or two of each kind. `make zoo` loads all types under ZeRO-3."""

MORE = (
    *("gpt_neox", "bloom", "phi3", "gemma2", "deepseek_v3", "gpt_oss", "jamba", "dbrx", "zamba2", "rwkv"),
    *("recurrent_gemma", "albert", "deberta-v2", "modernbert", "bart", "led", "swin", "resnet", "detr", "mask2former"),
    *("sam", "speecht5", "vits", "llava", "blip-2", "gptj", "opt", "qwen2", "qwen3", "olmo2", "granitemoe"),
    *("qwen3_next", "mamba2", "falcon_mamba", "roberta", "electra", "mpnet", "big_bird", "pegasus", "marian"),
    *("m2m_100", "convnext", "segformer", "beit", "dinov2", "hubert", "siglip", "paligemma"),
)
"""Types that a release loads lazily as well."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the models, each of which is built once."""
    return tmp_path_factory.mktemp("zoo")


def _cases(root: Path, types: Iterable[str], *, cross: bool = True) -> list[Case]:
    """The loads to compare. Types that cannot be built here fail by name."""
    built = walk.build(list(types), root)
    assert {name: info["error"] for name, info in built.items() if "error" in info} == {}
    return walk.cases_of(built, root, cross=cross)


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


def test_two_ranks(root: Path) -> None:
    assert _failures(_cases(root, FEW), 2, "fp32") == {}


@pytest.mark.release
def test_more_ranks_and_the_other_precision(root: Path) -> None:
    """Saved again as well: an ordinary load of that is the ordinary load of the original."""
    assert _failures(_cases(root, FEW), 3, "bf16", saves=True) == {}


@pytest.mark.parametrize("types", [FEW, pytest.param(MORE, marks=pytest.mark.release)], ids=["few", "more"])
def test_lazy_models(root: Path, types: tuple[str, ...]) -> None:
    assert _failures(_cases(root, types, cross=types is MORE), 1, "fp32", method="lazy") == {}


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.release)])
def test_two_ranks_of_fsdp2(tmp_path: Path, is_whole: bool) -> None:
    """The types whose weights transformers converts: where it slices before it converts, their shards are wrong."""
    types = [name for name in (model_types() if is_whole else FEW) if is_converted(name)]
    assert types
    assert _failures(_cases(tmp_path, types, cross=False), 2, "fp32", method="fsdp") == {}


def is_converted(name: str) -> bool:
    return any(isinstance(rule, WeightConverter) for rule in registry().get(name, ()))
