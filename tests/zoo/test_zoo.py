"""A representative part of the zoo: model types under ZeRO-3 and lazily, and those that are converted on a mesh.

`walk.py` does all types.
"""

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
        assert [outcome.name for outcome in outcomes if not outcome.found("saved")] == []
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


def test_lazy_models(root: Path) -> None:
    assert _failures(_cases(root, FEW, cross=False), 1, "fp32", method="lazy") == {}


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.release)])
def test_two_ranks_of_fsdp2(tmp_path: Path, is_whole: bool) -> None:
    """The types whose weights transformers converts: where it slices before it converts, their shards are wrong."""
    types = [name for name in (model_types() if is_whole else FEW) if is_converted(name)]
    assert types
    assert _failures(_cases(tmp_path, types, cross=False), 2, "fp32", method="fsdp") == {}


def is_converted(name: str) -> bool:
    return any(isinstance(rule, WeightConverter) for rule in registry().get(name, ()))
