"""Folders that torch_checkpointing has written are read like those of torch DCP."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lowmem_load import CheckpointError, UnsupportedError, consolidate, load_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.files.executor import Executor
from lowmem_load.training_checkpoints.open_model import open_model
from tests import builders
from tests.model_digest import model_digest
from tests.multi_rank.test_save import BF16, equal_folders
from tests.multi_rank.test_training_checkpoints import model_of, sharded
from tests.ranks import run_ranks
from tests.unit.test_dcp import values_in

FULL = {name: torch.randn(shape).bfloat16() for name, shape in {"a": (7, 6), "b": (5,), "c": (8, 4)}.items()}


def gathered(_manager: Any, data: Any, _group: Any = None) -> dict[int, Any]:
    """What the package gathers on CUDA, whatever the device of the tensors is."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, data)
    return dict(enumerate(found))


def save(folder: Path, state: Any, *, only_safetensors: bool = True) -> None:
    """Save a state dict as the item "model", and a step, by the package's own manager."""
    from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
    from torch_checkpointing.checkpoint_manager import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    layout = LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization()) if only_safetensors else None
    items = {"model": ItemSpec(layout=layout, resharder=DefaultResharder())}
    config = CheckpointManager.Config(
        items=items, save=SyncCheckpointSaverConfig(), storage_config=LocalFileSystemStorageConfig(use_direct_io=False)
    )
    DefaultMetadataManager._all_gather_pickled_data = gathered  # type: ignore[method-assign]
    manager = CheckpointManager(config)
    manager.save(str(folder), {"model": state, "step": 7})
    manager.close()
    if dist.is_initialized():
        dist.barrier()


def save_all(llama: Path, root: Path, full: dict[str, torch.Tensor]) -> None:
    DistributedInterface()
    count = dist.get_world_size()
    mesh = init_device_mesh("cpu", (count,))
    placed = {"a": Shard(0), "b": Replicate(), "c": Shard(1)}
    save(root / f"tensors-{count}", {name: distribute_tensor(full[name], mesh, [placed[name]]) for name in full})
    save(root / f"plain-{count}", full)
    save(root / f"torch-{count}", full, only_safetensors=False)
    save(root / f"llama-{count}", sharded(model_of(llama), (count,)).state_dict())
    if count == 4:
        save(root / "llama-hsdp", sharded(model_of(llama), (2, 2)).state_dict())
        save(root / "llama-tp", sharded(model_of(llama), (2, 2), tensor_parallel=True).state_dict())
        save(root / "other-4", {"a": full["a"] + dist.get_rank()})


def load_from(llama: Path, checkpoint: Path, expected: Path) -> None:
    found = load_model(str(llama), BF16, weights_from=str(checkpoint))
    assert model_digest(found) == model_digest(load_model(str(expected), BF16))


@pytest.fixture(scope="module")
def saved(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    llama, root = builders.tiny_llama(checkpoints), tmp_path_factory.mktemp("saved")
    for count in (1, 2, 4):
        run_ranks(save_all, llama, root, FULL, world_size=count, timeout_s=120)
    return llama, root


def test_tensors_are_equal(saved: tuple[Path, Path], tmp_path: Path) -> None:
    llama, root = saved
    for count in (1, 2, 4):
        for kind in ("tensors", "plain"):
            values = values_in(root / f"{kind}-{count}")
            assert values.keys() == FULL.keys()
            assert all(torch.equal(values[name], FULL[name]) for name in FULL), (kind, count)
    model_of(llama).save_pretrained(tmp_path / "expected")
    for folder in (root / f"llama-{kind}" for kind in (1, 2, 4, "hsdp")):
        consolidate(folder, tmp_path / folder.name, config=llama)
        equal_folders(tmp_path / folder.name, tmp_path / "expected")
    run_ranks(load_from, llama, root / "llama-4", tmp_path / "expected", world_size=2)


def test_what_cannot_be_read_is_refused(saved: tuple[Path, Path], tmp_path: Path) -> None:
    _, root = saved
    with pytest.raises(UnsupportedError, match="model: is not in safetensors files; save the item with"):
        values_in(root / "torch-2")
    with pytest.raises(UnsupportedError, match="is not a tensor of one mesh"):
        values_in(root / "llama-tp")
    with pytest.raises(CheckpointError, match="a has other values than the same part"):
        values_in(root / "other-4")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda item: item["rank_to_layout_info"][1].update(file_path="../x"), "which is not in its folder"),
        (lambda item: item["rank_to_layout_info"][1].update(file_path="model_9.safetensors"), "is missing"),
        (lambda item: item["rank_to_layout_info"].pop(1), "which files are those of the 2 ranks"),
        (lambda item: item["nested_path_to_metadata"].pop('["b"]'), r"has b, which metadata.pkl does not name"),
        (lambda item: item["nested_path_to_metadata"].update(d=open), "is not metadata of torch_checkpointing"),
    ],
)
def test_forged_metadata(saved: tuple[Path, Path], tmp_path: Path, change: Any, text: str) -> None:
    folder = tmp_path / "forged"
    shutil.copytree(saved[1] / "tensors-2", folder)
    tree = pickle.loads((folder / "metadata.pkl").read_bytes())
    change(tree["metadata"]["model"])
    (folder / "metadata.pkl").write_bytes(pickle.dumps(tree))
    with pytest.raises(CheckpointError, match=text), Executor() as executor:
        open_model(str(folder), executor)
