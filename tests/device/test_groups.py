"""Process groups of ranks with devices: the device comes first, loads use no collective, mixtures of backends work."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from lowmem_load import load_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.errors import ConfigError, RankError
from tests import builders
from tests.parity import BF16, differences
from tests.ranks import SIMULATED, run_ranks
from tests.steps import payloads

MIXED = "cpu:gloo,sim:simccl"
ONE_VISIBLE = {**SIMULATED, "SIM_DEVICES": "2", "SIM_VISIBLE_DEVICES": "1"}


def load(path: str) -> Any:
    from tests.device.simulated import counters, reset

    reset()
    model = load_model(path, BF16, auto_class="AutoModelForCausalLM")
    assert "collective" not in counters()
    return model


def make_and_adopt(path: str) -> None:
    """Rank function: groups made here, and groups of others, of one backend and of two."""
    seen = []
    init = dist.init_process_group
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(
            dist,
            "init_process_group",
            lambda *args, **kwargs: (seen.append(torch.accelerator.current_device_index()), init(*args, **kwargs)),
        )
        group = DistributedInterface()
    local_rank = int(os.environ["LOCAL_RANK"])
    assert (seen, group.backend, group.device) == ([local_rank], "simccl", torch.device("sim", local_rank))
    load(path)
    group.destroy()

    group = DistributedInterface(backend=MIXED)
    assert (group.backend, payloads(group, group.rank)) == ("simccl", [0, 1])
    dist.all_reduce(torch.ones(1))  # of host memory, through gloo
    load(path)
    group.destroy()

    for backend in ("simccl", MIXED):
        torch.sim.set_device(0)
        dist.init_process_group(
            backend, store=dist.PrefixStore(f"own {backend}", _store()), rank=local_rank, world_size=2
        )
        model = load(path)
        assert torch.accelerator.current_device_index() == local_rank
        assert next(model.parameters()).ds_tensor.device == torch.device("sim", local_rank)
        DistributedInterface().destroy(force=True)
    dist.init_process_group(MIXED, store=dist.PrefixStore("compare", _store()), rank=local_rank, world_size=2)
    assert differences(load(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)) == []


def _store() -> Any:
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore(
        "127.0.0.1", port, is_master=os.environ["RANK"] == "0", wait_for_workers=False, multi_tenant=True
    )


@pytest.fixture
def path(checkpoints: Path) -> str:
    return str(builders.tiny_llama(checkpoints))


def test_a_load_uses_no_collective_whatever_the_group(path: str) -> None:
    run_ranks(make_and_adopt, path, env={**SIMULATED, "SIM_DEVICES": "2"})


def adopt_without_a_device(folder: str) -> None:
    """Rank function: where LOCAL_RANK is not set, a process with one device uses that."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("simccl", store=dist.FileStore(f"{folder}/first", 2), rank=rank, world_size=2)
    if rank == 1:
        for _ in range(2):  # nothing is adopted by the first one
            with pytest.raises(ConfigError, match="LOCAL_RANK is 1, but this process sees 1 sim"):
                DistributedInterface()
    else:
        with pytest.raises(RankError, match="rank 1: left DistributedInterface: ConfigError: LOCAL_RANK is 1"):
            payloads(DistributedInterface(), 1)
    del os.environ["LOCAL_RANK"]
    dist.destroy_process_group()
    dist.init_process_group("simccl", store=dist.FileStore(f"{folder}/second", 2), rank=rank, world_size=2)
    assert DistributedInterface().device == torch.device("sim", 0)


def test_a_group_is_adopted_on_the_device_that_there_is(tmp_path: Path) -> None:
    run_ranks(adopt_without_a_device, str(tmp_path), env=ONE_VISIBLE, timeout_s=30)
