"""Ranks that hold different checkpoints of the same shapes are stopped; each node may have files of its own."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lowmem_load import get_load_report, load_model
from lowmem_load.load import checks
from tests import builders
from tests.parity import BF16
from tests.ranks import run_ranks


def load_own(same: list[str], copied: list[str], different: list[list[str]]) -> list[tuple[str, float]]:
    """Rank function: loads what its node has; returns the error of each that differs, and seconds until it came."""
    sampled: list[int] = []
    ordinary = checks.sample_digests

    def counted(files, *args, **kwargs):
        sampled.append(len(files))
        return ordinary(files, *args, **kwargs)

    checks.sample_digests = counted
    rank = int(os.environ["RANK"])
    model = load_model(same[rank], BF16)
    assert not sampled, "files that are the very same need no sample"
    assert "compare" in get_load_report(model).seconds
    load_model(copied[rank], BF16)
    assert len(sampled) == (rank == copied.index(copied[rank])), "one rank of each node reads its sample"
    errors = []
    for folders in different:
        start = time.perf_counter()
        with pytest.raises((ValueError, RuntimeError)) as caught:
            load_model(folders[rank], BF16)
        errors.append((str(caught.value), time.perf_counter() - start))
        load_model(same[rank], BF16)  # the next load is not affected
    return errors


def with_other_tensor(folder: Path, to: Path, name: str | None) -> Path:
    """A copy of a checkpoint, with another value in all tensors or in the one of this name."""
    shutil.copytree(folder, to)
    for file in to.glob("*.safetensors"):
        state = {key: value + (name in (None, key)) for key, value in load_file(file).items()}
        save_file(state, file, metadata={"format": "pt"})
    return to


def with_other_value(folder: Path, to: Path, file: str, values: dict[str, object]) -> Path:
    """A copy of a checkpoint, with other values in a JSON file."""
    shutil.copytree(folder, to)
    (to / file).write_text(json.dumps({**json.loads((to / file).read_text()), **values}))
    return to


def test_two_checkpoints_of_one_shape_are_not_mixed(checkpoints: Path, tmp_path: Path) -> None:
    """The first half of the ranks is one node, the other half another."""
    first = builders.tiny_llama(checkpoints, vocab_size=4000)
    copied = shutil.copytree(first, tmp_path / "copy")
    others = [
        with_other_tensor(first, tmp_path / str(number), name) for number, name in enumerate((None, "lm_head.weight"))
    ]
    others += [
        with_other_value(first, tmp_path / "config", "config.json", {"rms_norm_eps": 2e-6}),
        with_other_value(first, tmp_path / "generation", "generation_config.json", {"eos_token_id": 7}),
    ]
    pairs = [[str(first)] * 2 + [str(other)] * 2 for other in (copied, *others)]
    answers = run_ranks(load_own, [str(first)] * 4, pairs[0], pairs[1:], world_size=4, timeout_s=60)
    texts = [[text for text, _ in answer] for answer in answers]
    assert all(text == texts[0] for text in texts), "the same errors on every rank"
    *of_files, of_config, of_generation = texts[0]
    for text, other in zip(of_files, others, strict=False):
        assert "model.safetensors: the ranks have 2 different files of this name" in text
        assert f"rank(s) 0-1: {first}" in text and f"rank(s) 2-3: {other}" in text
    assert "describing the model failed" in of_config
    assert "has configuration rms_norm_eps 2e-06, where rank(s) 0" in of_config and "have 1e-06" in of_config
    assert "has generation_config.json eos_token_id 7, where rank(s) 0" in of_generation
    assert max(seconds for answer in answers for _, seconds in answer) < 10
