"""Checkpoints of FSDP2 as torch and verl save them: folders equal save_pretrained, loads on other ranks are equal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lowmem_load import RankError, consolidate, load_model
from lowmem_load.distributed.process_group import DistributedInterface
from tests import builders
from tests.multi_rank.test_save import equal_folders
from tests.ranks import run_ranks
from tests.zero_checkpoint import save_zero3

BUILDERS: dict[str, Callable[[Path], Path]] = {
    "llama": builders.tiny_llama,
    "mixtral": builders.tiny_mixtral,
    "qwen2": builders.tiny_qwen2_tied,
    "llava": builders.tiny_llava,
}
LOADED = ("llama-zero", "llama-shards", "llama-tp", "llama-tpbin", "llava-dcp", "mixtral-verl")
"""Those that ranks load, into both engines."""

TP_PLAN = {"q_proj": "col", "k_proj": "col", "v_proj": "col", "o_proj": "row", "gate_proj": "col", "down_proj": "row"}


def model_of(folder: Path) -> Any:
    """Return the model of a folder with its values, on the CPU."""
    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype="auto")


def sharded(model: Any, shape: tuple[int, ...], *, tensor_parallel: bool = False) -> Any:
    """Return the model cut by FSDP2 in a mesh of this shape; with tensor parallelism along the second dim."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "model")[: len(shape)])
    layers = [module for name, module in model.named_modules() if name.rpartition(".")[2].isdigit()]
    for layer in layers:
        if tensor_parallel:
            named = {name: name.rpartition(".")[2] for name, _ in layer.named_modules()}
            styles = {name: TP_PLAN[last] for name, last in named.items() if last in TP_PLAN}
            ways = {"col": ColwiseParallel, "row": RowwiseParallel}
            parallelize_module(layer, mesh["model"], {name: ways[style]() for name, style in styles.items()})
        fully_shard(layer, mesh=mesh["data"] if tensor_parallel else mesh)
    return fully_shard(model, mesh=mesh["data"] if tensor_parallel else mesh)


def save_all(folders: dict[str, Path], root: Path) -> None:
    """Save each model in each way, on four ranks."""
    DistributedInterface()
    rank = dist.get_rank()
    for name, folder in folders.items():
        state = sharded(model_of(folder), (4,)).state_dict()
        dcp.save({"model": state, "step": 7}, checkpoint_id=root / f"{name}-dcp")
        (root / f"{name}-verl").mkdir(exist_ok=True)
        torch.save(state, root / f"{name}-verl" / f"model_world_size_4_rank_{rank}.pt")
    state = sharded(model_of(folders["llama"]), (4,)).state_dict()
    dcp.async_save(state, checkpoint_id=root / "llama-async").result()
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(root / "llama-shards", save_distributed=True))
    for name, shape, has_tp in (("llama-hsdp", (2, 2), False), ("llama-tp", (2, 2), True)):
        state = sharded(model_of(folders["llama"]), shape, tensor_parallel=has_tp).state_dict()
        dcp.save(state, checkpoint_id=root / name)
        (root / f"{name}bin").mkdir(exist_ok=True)
        torch.save(state, root / f"{name}bin" / f"pytorch_model_fsdp_0_rank{rank}.bin")


@pytest.fixture(scope="module")
def saved(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], Path]:
    """The folders of the models, and one with what four ranks have saved of them."""
    folders = {name: build(checkpoints) for name, build in BUILDERS.items()}
    root = tmp_path_factory.mktemp("saved")
    run_ranks(save_all, folders, root, world_size=4, timeout_s=180)
    masters = {name: value.detach().float() for name, value in model_of(folders["llama"]).named_parameters()}
    save_zero3(root / "llama-zero", masters, world_size=4)
    return folders, root


def checkpoints_in(root: Path) -> list[tuple[str, Path]]:
    return [(path.name.partition("-")[0], path) for path in sorted(root.iterdir()) if path.is_dir()]


def test_the_folder_is_that_of_save_pretrained(saved: tuple[dict[str, Path], Path], tmp_path: Path) -> None:
    folders, root = saved
    for name, folder in folders.items():
        model_of(folder).save_pretrained(tmp_path / name)
    kinds = checkpoints_in(root)
    assert len(kinds) == 2 * len(folders) + 7
    for name, checkpoint in kinds:
        dtype = torch.bfloat16 if checkpoint.name == "llama-zero" else None  # its values are fp32
        report = consolidate(checkpoint, tmp_path / checkpoint.name, config=folders[name], dtype=dtype)
        equal_folders(tmp_path / checkpoint.name, tmp_path / name)
        assert report.written_bytes > 0


def load_all(folders: dict[str, Path], root: Path, made: Path) -> dict[str, float]:
    """Load each checkpoint into both engines; return which share of the weights this rank has read."""
    DistributedInterface()
    shares: dict[str, float] = {}
    for name, checkpoint in checkpoints_in(root):
        if checkpoint.name not in LOADED:
            continue
        reference = model_of(folders[name])
        expected, dtype = reference.state_dict(), next(reference.parameters()).dtype
        config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
        config["bf16"] = {"enabled": dtype == torch.bfloat16}
        kind = type(reference)
        model = load_model(folders[name], config, auto_class=kind, weights_from=checkpoint)
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            differing = [key for key, value in model.state_dict().items() if not torch.equal(value, expected[key])]
        assert not differing, (checkpoint.name, differing)
        assert model.generation_config.to_dict() == reference.generation_config.to_dict()
        nbytes = sum(value.numel() * value.element_size() for value in reference.parameters())
        shares[checkpoint.name] = model.lowmem_load_report.read_bytes / nbytes
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        cut = load_model(folders[name], mesh=mesh, auto_class=kind, weights_from=checkpoint, dtype=dtype)
        for key, value in cut.state_dict().items():
            assert torch.equal(value.full_tensor() if hasattr(value, "full_tensor") else value, expected[key]), key
    for name in ("llama-dcp", "mixtral-verl"):
        consolidate(root / name, made / name, config=folders[name.partition("-")[0]], ranks=DistributedInterface())
    others = root / ("llama-dcp" if dist.get_rank() else "llama-async")  # of equal shapes, under equal names
    with pytest.raises(RankError, match="has checkpoint"):
        consolidate(others, made / "mixed", config=folders["llama"], ranks=DistributedInterface())
    assert not (made / "mixed").exists()
    return shares


def test_other_ranks_load_their_parts(saved: tuple[dict[str, Path], Path], tmp_path: Path) -> None:
    folders, root = saved
    shares = run_ranks(load_all, folders, root, tmp_path, world_size=3, timeout_s=240)
    for by_checkpoint in shares:
        assert by_checkpoint.pop("llama-zero") < 0.72  # of fp32 values, a third
        assert max(by_checkpoint.values()) < 0.36, by_checkpoint  # a third, and padding
    for name in ("llama-dcp", "mixtral-verl"):
        model = name.partition("-")[0]
        model_of(folders[model]).save_pretrained(tmp_path / model)
        equal_folders(tmp_path / name, tmp_path / model)


def fail_alike(folder: Path, checkpoint: Path) -> str:
    DistributedInterface()
    with pytest.raises(Exception, match="the weights are not of a") as caught:
        load_model(folder, {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}, weights_from=checkpoint)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_weights_of_another_model_are_one_error_on_all_ranks(saved: tuple[dict[str, Path], Path]) -> None:
    folders, root = saved
    first, second = run_ranks(fail_alike, folders["llama"], root / "qwen2-dcp", world_size=2)
    assert first == second
    assert "unexpected: model.layers.0.self_attn.k_proj.bias" in first
