"""Modules that are no transformers model: FSDP2 shards and ZeRO-3 partitions equal the plain load."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from lowmem_load import CheckpointError, RankError, get_load_report, iter_weights, load_into, save_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.load.execute import execute
from tests.model_digest import differing
from tests.ranks import run_ranks
from tests.unit.test_modules import Net, state

Z3 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}


class Wide(Net):
    """Most of its bytes are in one weight; an LSTM keeps its parameters in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 64)
        self.memory = nn.LSTM(4, 4)


def wide() -> nn.Module:
    torch.manual_seed(3)
    return Wide()


def on_meta() -> nn.Module:
    with torch.device("meta"):
        model = Wide()
    model.scale.mark = "no decay"
    return model


def sharded() -> nn.Module:
    model = on_meta()
    fully_shard(model.wide)
    fully_shard(model)
    model.to_empty(device="cpu")
    return model


def assert_sent_as_saved(model: nn.Module, folder: Path) -> None:
    """Assert that `iter_weights` yields the tensors of the files of a save. Collective."""
    sent = {name: tensor for bucket in iter_weights(model) for name, tensor in bucket}
    saved = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], saved[name]) and sent[name].dtype == saved[name].dtype for name in saved)


def fill_all(folder: str) -> None:
    """Rank function."""
    rank = DistributedInterface().rank
    expected = wide()
    all_bytes = sum(tensor.nbytes for tensor in expected.parameters())

    model = sharded()
    report = load_into(model, folder, build=Wide)
    of_shards = report.read_bytes
    assert not differing(model, expected)
    assert of_shards < 0.55 * all_bytes
    assert model.head.weight is model.embed.weight

    model = on_meta()
    report = load_into(model, folder, Z3, build=Wide)
    assert get_load_report(model) is report
    assert not differing(model, expected)
    assert report.read_bytes < 0.55 * all_bytes
    assert model.head.weight is model.embed.weight
    assert model.memory._flat_weights[1] is model.memory.weight_hh_l0
    assert model.scale.mark == "no decay"
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in expected.parameters()]

    # A save has the names of the module, a tied weight once; `rename` turns them back.
    save_model(model, f"{folder}/saved", max_shard_size="8KB")
    assert_sent_as_saved(model, Path(folder) / "saved")
    assert save_model(model, f"{folder}/renamed", rename=lambda name: f"net.{name}").left_out == []
    report = save_model(model, f"{folder}/part", rename=lambda name: None if "inner.1" in name else name)
    assert report.left_out == [name for name in model.state_dict() if "inner.1" in name]
    for saved, rename in (("saved", None), ("renamed", {"^net[.]": ""})):
        model = sharded()
        load_into(model, f"{folder}/{saved}", build=Wide, rename=rename)
        assert not differing(model, expected)
    assert os.path.isfile(f"{folder}/saved/model.safetensors.index.json")

    # What no file has gets its values before a load for ZeRO-3.
    model = on_meta()
    model.wide.to_empty(device="cpu").load_state_dict(expected.wide.state_dict())
    left = ["wide.weight", "wide.bias"]
    load_into(model, folder, Z3, build=Wide, skip=left, rename=lambda name: None if name in left else name)
    assert not differing(model, expected)

    norm = nn.BatchNorm1d(3, affine=False)  # buffers alone
    load_into(norm, f"{folder}/norm")
    assert torch.equal(norm.running_mean, torch.arange(3.0))

    # After an error the module is as before.
    model = on_meta()
    before = list(model.parameters())
    with pytest.raises(CheckpointError, match="missing: scale"):
        load_into(model, folder, Z3, build=Wide, rename={"scale": "scales"})
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    rename = {"running_mean": "table"} if rank else {}
    with pytest.raises(RankError, match=r"rank 1: .* missing: inner\.1\.running_mean"):
        load_into(model, folder, Z3, build=Wide, rename=rename, strict=False)
    dist.barrier()
    before_it = attributes(model)

    def failing(*args: Any, **kwargs: Any) -> None:  # once partitions are made and filled
        execute(*args, **kwargs)
        if rank:
            raise OSError(5, "EIO")

    with patch("lowmem_load.load.load.execute", failing), pytest.raises(RankError, match=r"rank 1: .*EIO"):
        load_into(model, folder, Z3, build=Wide)
    after_it = attributes(model)
    assert [key for key, _ in after_it] == [key for key, _ in before_it]
    assert all(one is other for (_, one), (_, other) in zip(before_it, after_it, strict=True))


def attributes(model: nn.Module) -> list[tuple[Any, Any]]:
    """All that modules and their dicts refer to."""
    dicts = [own for module in model.modules() for own in (vars(module), *vars(module).values())]
    return [item for own in dicts if isinstance(own, dict) for item in own.items()]


def test_values_are_those_of_the_plain_load(tmp_path: Path) -> None:
    tensors = state(wide())
    save_file({name: tensor for name, tensor in tensors.items() if "wide" in name}, tmp_path / "wide.safetensors")

    save_file({name: tensor for name, tensor in tensors.items() if "wide" not in name}, tmp_path / "rest.safetensors")
    (tmp_path / "norm").mkdir()
    norm = {**nn.BatchNorm1d(3, affine=False).state_dict(), "running_mean": torch.arange(3.0)}
    save_file(norm, tmp_path / "norm" / "model.safetensors")
    run_ranks(fill_all, str(tmp_path), timeout_s=240)
