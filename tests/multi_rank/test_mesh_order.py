"""Meshes whose ranks are not in ascending order: torch sorts the ranks of a group, and that is where a shard is.

The measure is what torch gathers, `full_tensor()`. Its rows are of distinct values, and no dim divides by the ranks.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from lowmem_load import RankError, UnsupportedError, consolidate, iter_weights, load_into, load_model, save_model
from lowmem_load.engines.mesh import local_shard, part_of
from tests import builders
from tests.model_digest import differing, whole_tensors
from tests.multi_rank.test_load_into import start
from tests.ranks import run_ranks

TRUTH = {"weight": torch.arange(84.0).reshape(7, 12), "bias": torch.arange(7.0)}


def placed(mesh: Any, *, tensor_parallel: bool = False) -> nn.Module:
    """A linear layer with the values above, which torch has sharded."""
    model = nn.Linear(12, 7)
    model.load_state_dict(TRUTH)
    if tensor_parallel:
        parallelize_module(model, mesh["tp"], RowwiseParallel())
        return fully_shard(model, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh)


def cases() -> dict[str, Callable[[], nn.Module]]:
    def mesh(ranks: Any, *names: str) -> Any:
        return DeviceMesh("cpu", ranks, mesh_dim_names=names or None)

    root = mesh([[[3], [0]], [[1], [2]]], "dp", "cp", "tp")
    return {
        "reversed": lambda: placed(mesh([3, 2, 1, 0])),
        "rotated": lambda: placed(mesh([2, 0, 3, 1])),
        "replicas": lambda: placed(mesh([[2, 0], [3, 1]], "dp", "shard")),
        "replicas in orders of their own": lambda: placed(mesh([[0, 1], [3, 2]], "dp", "shard")),
        "a part of a mesh": lambda: placed(mesh([[3, 1], [2, 0]], "dp", "tp")["tp"]),
        "a flattened part": lambda: placed(root["dp", "cp"]._flatten("both")),
        "tensor parallelism": lambda: placed(mesh([[2, 0], [3, 1]], "dp", "tp"), tensor_parallel=True),
        "tensor parallelism, reversed": lambda: placed(mesh([[3, 2], [1, 0]], "dp", "tp"), tensor_parallel=True),
    }


def go_both_ways(folder: Path, llama: str) -> None:
    """Rank function: each mesh, each function."""

    def cut(model: nn.Module) -> None:
        """As values that a script has changed are cut."""
        for name, tensor in model.named_parameters():
            grid, memory = local_shard(name, tensor, needs_memory=True)
            memory.copy_(part_of(TRUTH[name], grid))

    start()
    if dist.get_rank() == 0:
        save_file(TRUTH, folder / "model.safetensors", {"format": "pt"})
    dist.barrier()
    for name, make in cases().items():
        model = make()
        torch.testing.assert_close(whole_tensors(model), TRUTH, rtol=0, atol=0, msg=name)  # torch's own
        (folder / name).mkdir(exist_ok=True)
        torch.save(model.state_dict(), folder / name / f"model_world_size_4_rank_{dist.get_rank()}.pt")
        save_model(model, folder / f"{name} saved")
        torch.testing.assert_close(load_file(folder / f"{name} saved" / "model.safetensors"), TRUTH, rtol=0, atol=0)
        sent = {key: tensor.clone() for bucket in iter_weights(model) for key, tensor in bucket}
        torch.testing.assert_close(sent, TRUTH, rtol=0, atol=0, msg=name)
        for fill in (
            lambda model: load_into(model, folder),
            lambda model: load_into(model, folder, share_reads="job"),
            cut,
        ):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            fill(model)
            torch.testing.assert_close(whole_tensors(model), TRUTH, rtol=0, atol=0, msg=name)
    reference = transformers.AutoModelForCausalLM.from_pretrained(llama)
    for mesh in (DeviceMesh("cpu", [2, 0, 3, 1]), DeviceMesh("cpu", [[2, 0], [3, 1]], mesh_dim_names=("dp", "shard"))):
        assert differing(load_model(llama, mesh=mesh), reference) == [], mesh
    # Along one dim rank 0 comes before 3, along the other 1 before 2: ranks 0 and 1 would have one part.
    with pytest.raises((UnsupportedError, RankError), match="gives several ranks the same part"):
        load_into(
            placed(DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("dp", "tp")), tensor_parallel=True), folder
        )


def test_each_rank_has_the_part_that_torch_gives_it(checkpoints: Path, tmp_path: Path) -> None:
    run_ranks(go_both_ways, tmp_path, str(builders.tiny_llama(checkpoints)), world_size=4, timeout_s=240)
    folders = sorted(path.parent for path in tmp_path.glob("*/model_world_size_4_rank_0.pt"))
    for folder in folders:
        with pytest.raises(UnsupportedError, match=r"weight: its mesh has ranks in another order"):
            consolidate(folder, tmp_path / f"{folder.name} made", config=False)
    assert len(folders) == 8
