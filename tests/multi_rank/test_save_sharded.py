"""`save_model` of a model of DTensors: the bytes that `save_pretrained` of the whole model writes."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from lowmem_load import save_model
from tests import builders
from tests.model_digest import model_digest
from tests.multi_rank.test_load_into import filled, meshes, shard_fully, start
from tests.multi_rank.test_save import equal_folders
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
        equal_folders(folder, tmp_path / folder.name.split()[-1])


def with_adapter(path: str) -> Any:
    """Return a model with an adapter that is not zero."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return adapted


def save_merged(path: str, folder: str) -> None:
    """Rank function: a model and its adapter, sharded by FSDP2."""
    mesh = init_device_mesh("cpu", (start(),))
    model = with_adapter(path)
    shard_fully(model, mesh=mesh)
    save_model(model, folder, merge_adapters=True)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
def test_adapters_of_sharded_models_are_merged(checkpoints: Path, tmp_path: Path) -> None:
    path = str(builders.tiny_llama(checkpoints, torch.float32))
    run_ranks(save_merged, path, str(tmp_path / "saved"), world_size=2, timeout_s=120)
    with_adapter(path).merge_and_unload().save_pretrained(tmp_path / "whole")
    saved, whole = (load_file(tmp_path / folder / "model.safetensors") for folder in ("saved", "whole"))
    assert saved.keys() == whole.keys()
    assert all(torch.equal(saved[name], whole[name]) for name in whole)
