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

TYPES: dict[str, tuple[str, ...]] = {
    "decoders": ("llama", "gpt2", "gpt_neox", "bloom", "phi3", "gemma2"),
    "experts": ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "jamba", "dbrx"),
    "state-space": ("mamba", "zamba2", "rwkv", "recurrent_gemma"),
    "masked": ("bert", "albert", "deberta-v2", "modernbert"),
    "encoder-decoder": ("t5", "bart", "led"),
    "vision": ("vit", "swin", "resnet", "detr", "mask2former", "sam"),
    "speech": ("wav2vec2", "whisper", "speecht5", "vits"),
    "vision-language": ("clip", "llava", "qwen2_vl", "blip-2"),
    "near relatives": (
        *("gptj", "opt", "qwen2", "qwen3", "olmo2", "granitemoe", "qwen3_next", "mamba2", "falcon_mamba", "roberta"),
        *("electra", "mpnet", "big_bird", "pegasus", "marian", "m2m_100", "convnext", "segformer", "beit", "dinov2"),
        *("hubert", "siglip", "paligemma"),
    ),
}
"""60 model types by kind. The last differ from one above in sizes and names of modules: only releases load them."""

KINDS = [pytest.param(kind, marks=pytest.mark.release) if kind == "near relatives" else kind for kind in TYPES]

FEW = ("llama", "gpt2", "mixtral", "qwen3_moe", "mamba", "bert", "t5", "vit", "wav2vec2", "whisper", "clip", "qwen2_vl")
"""One or two of each kind, for more ranks and the other precision."""


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


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks(root: Path, kind: str) -> None:
    assert _failures(_cases(root, TYPES[kind]), 2, "fp32") == {}


def test_more_ranks_and_the_other_precision(root: Path) -> None:
    """Saved again as well: an ordinary load of that is the ordinary load of the original."""
    assert _failures(_cases(root, FEW), 3, "bf16", saves=True) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_lazy_models(root: Path, kind: str) -> None:
    assert _failures(_cases(root, TYPES[kind]), 1, "fp32", method="lazy") == {}


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.release)])
def test_two_ranks_of_fsdp2(tmp_path: Path, is_whole: bool) -> None:
    """The types whose weights transformers converts: where it slices before it converts, their shards are wrong.

    Many have the same operations as another: one of each is enough where a change did not touch conversions.
    """
    by_operations: dict[tuple[type, ...], list[str]] = {}
    for name in model_types():
        converters = [each for each in registry().get(name, ()) if isinstance(each, WeightConverter)]
        if converters:
            operations = tuple(type(operation) for each in converters for operation in each.operations)
            by_operations.setdefault(operations, []).append(name)
    types = [name for names in by_operations.values() for name in (names if is_whole else names[:1])]
    assert _failures(_cases(tmp_path, types, cross=False), 2, "fp32", method="fsdp") == {}
