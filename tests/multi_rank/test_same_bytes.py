"""Ranks that hold different checkpoints of the same shapes are stopped; each node may have files of its own."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tests import builders
from tests.parity import BF16
from tests.ranks import run_ranks


def load_own(folders: list[str], same: list[str], copied: list[str]) -> tuple[str, float]:
    """Rank function: loads what its node has; returns the error, and seconds until it came."""
    from lowmem_load import load_model, load_report
    from lowmem_load.pipeline import same_bytes

    sampled: list[int] = []
    ordinary = same_bytes.sample_digests

    def counted(files, *args, **kwargs):
        sampled.append(len(files))
        return ordinary(files, *args, **kwargs)

    same_bytes.sample_digests = counted
    rank = int(os.environ["RANK"])
    model = load_model(same[rank], BF16)
    assert not sampled, "files that are the very same need no sample"
    assert "compare" in load_report(model).seconds
    load_model(copied[rank], BF16)
    assert len(sampled) == (rank == copied.index(copied[rank])), "one rank of each node reads its sample"
    start = time.perf_counter()
    with pytest.raises(
        ValueError, match=r"model\.safetensors: the ranks hold 2 different files of this name"
    ) as caught:
        load_model(folders[rank], BF16)
    seconds = time.perf_counter() - start
    load_model(same[rank], BF16)  # the next load is not affected
    return str(caught.value), seconds


def changed(folder: Path, to: Path, name: str | None) -> Path:
    """Copies a checkpoint, with another value in all tensors or in the one of this name."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, to)
    for file in to.glob("*.safetensors"):
        state = {key: value + (name in (None, key)) for key, value in load_file(file).items()}
        save_file(state, file, metadata={"format": "pt"})
    return to


@pytest.mark.parametrize(
    ("world_size", "name"),
    [(2, None), (4, None), (2, "lm_head.weight"), (4, "model.embed_tokens.weight"), (2, "model.norm.weight")],
)
def test_two_checkpoints_of_one_shape_are_not_mixed(
    checkpoints: Path, tmp_path: Path, world_size: int, name: str | None
) -> None:
    """The first half of the ranks is one node, the other half another."""
    first = builders.tiny_llama(checkpoints, vocab_size=4000)
    second = changed(first, tmp_path / "second", name)
    shutil.copytree(first, tmp_path / "copy")
    half = world_size // 2
    answers = run_ranks(
        load_own,
        [str(first)] * half + [str(second)] * half,
        [str(first)] * world_size,
        [str(first)] * half + [str(tmp_path / "copy")] * half,
        world_size=world_size,
    )
    assert len({text for text, _ in answers}) == 1, "the same error on every rank"
    (text,) = {text for text, _ in answers}
    assert str(first) in text and str(second) in text
    assert ("rank(s) 0:" in text) if half == 1 else ("rank(s) 0-1:" in text and "rank(s) 2-3:" in text)
    print([round(seconds, 3) for _, seconds in answers])
    assert max(seconds for _, seconds in answers) < 10


def load_with_own_config(folders: list[str]) -> str:
    """Rank function: loads what its node has; returns the error."""
    from lowmem_load import load_model

    with pytest.raises(RuntimeError) as caught:
        load_model(folders[int(os.environ["RANK"])], BF16)
    load_model(folders[0], BF16)
    return str(caught.value)


def test_two_configurations_of_equal_weights_are_not_mixed(checkpoints: Path, tmp_path: Path) -> None:
    first = builders.tiny_llama(checkpoints, vocab_size=4000)
    second = Path(shutil.copytree(first, tmp_path / "second"))
    config = json.loads((second / "config.json").read_text())
    (second / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 2e-6}))
    first_text, second_text = run_ranks(load_with_own_config, [str(first), str(second)])
    assert "describing the model failed on 1 rank(s)" in first_text
    expected = "rank 1: holds configuration rms_norm_eps 2e-06, where rank(s) 0 hold 1e-06"
    assert expected in first_text
    assert expected in second_text


def test_two_ways_to_generate_are_not_mixed(checkpoints: Path, tmp_path: Path) -> None:
    first = builders.tiny_llama(checkpoints, vocab_size=4000)
    second = Path(shutil.copytree(first, tmp_path / "second"))
    generation = json.loads((second / "generation_config.json").read_text())
    (second / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": 7}))
    for text in run_ranks(load_with_own_config, [str(first), str(second)]):
        assert "rank 1: holds generation_config.json eos_token_id 7, where rank(s) 0 hold" in text
