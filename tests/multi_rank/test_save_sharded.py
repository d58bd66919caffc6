"""`save_model` of a model of DTensors: the bytes that `save_pretrained` of the whole model writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from lowmem_load import save_model
from tests import builders
from tests.model_digest import model_digest
from tests.multi_rank.test_load_into import filled, meshes, start
from tests.ranks import run_ranks


def save_all(paths: dict[str, str], folder: str) -> None:
    """Rank function: each model on each mesh."""
    world_size = start()
    for mesh, shard in meshes(world_size).items():
        for name, path in paths.items():
            model = filled(path, shard)
            with torch.no_grad():
                model(torch.arange(8)[None])  # FSDP2 then keeps some parameters gathered
            report = save_model(model, Path(folder, f"{mesh} {name}"), max_shard_size=20_000)
            assert report.files
            if mesh == "fsdp" or name == "llama":
                cls = getattr(transformers, type(model).__mro__[2].__name__)
                assert model_digest(model) == model_digest(cls.from_pretrained(path, dtype=torch.float32)), (mesh, name)


@pytest.mark.parametrize(
    ("world_size", "is_whole"), [(2, True), (4, False), pytest.param(4, True, marks=pytest.mark.release)]
)
def test_files_are_those_of_the_whole_model(checkpoints: Path, tmp_path: Path, world_size: int, is_whole: bool) -> None:
    paths = {"llama": str(builders.tiny_llama(checkpoints, torch.float32))}
    if is_whole:
        paths["tied"] = str(builders.tiny_qwen2_tied(checkpoints))
        paths["experts"] = str(builders.tiny_mixtral(checkpoints))
    for name, path in paths.items():
        cls = getattr(transformers, transformers.AutoConfig.from_pretrained(path).architectures[0])
        cls.from_pretrained(path, dtype=torch.float32).save_pretrained(tmp_path / name, max_shard_size=20_000)
    run_ranks(save_all, paths, str(tmp_path / "saved"), world_size=world_size, timeout_s=180)
    for folder in (tmp_path / "saved").iterdir():
        expected = tmp_path / folder.name.split()[-1]
        names = sorted(path.name for path in expected.iterdir())
        assert sorted(path.name for path in folder.iterdir()) == names
        for name in names:
            if name == "config.json":
                assert json.loads((folder / name).read_text()) == json.loads((expected / name).read_text())
            else:
                assert (folder / name).read_bytes() == (expected / name).read_bytes(), (folder, name)
