"""Every target passes the shipped contract, under each setting that changes what ranks hold."""

from typing import Any

import pytest
import torch

from lowmem_load.config.settings import Settings, read_settings
from lowmem_load.engines.target import Replicated, Target
from lowmem_load.engines.zero3_target import Zero3
from tests.kits.target import TargetContract

pytestmark = pytest.mark.usefixtures("lone_process")

CPU = torch.device("cpu")


def settings(world_size: int, *, bf16: bool = False, **zero: Any) -> Settings:
    config = {"zero_optimization": {"stage": 3, **zero}, "bf16": {"enabled": bf16}}
    return read_settings(config, world_size=world_size).for_model(None)


class TestZero3(TargetContract):
    def target(self, rank: int, world_size: int) -> Target:
        return Zero3(settings(world_size), rank, CPU)


class TestZero3Offloaded(TargetContract):
    def target(self, rank: int, world_size: int) -> Target:
        return Zero3(settings(world_size, offload_param={"device": "cpu"}), rank, CPU)


class TestZero3WithSecondaryPartitions(TargetContract):
    worlds = (1, 2, 4)  # DeepSpeed makes groups of 2

    def target(self, rank: int, world_size: int) -> Target:
        return Zero3(settings(world_size, zero_hpz_partition_size=2), rank, CPU)


class TestReplicated(TargetContract):
    def target(self, *_: int) -> Target:
        return Replicated(CPU)


class TestPartial(TargetContract):
    modules = ("inside", "outside", "inside_too", "insides")

    def target(self, rank: int, world_size: int) -> Target:
        chosen = ("inside", "inside_too")
        return Zero3(settings(world_size, bf16=True), rank, CPU, None, chosen)
