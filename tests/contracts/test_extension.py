"""Another byte source and another target are one class each, here, and no change elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from lowmem_load import DistributedInterface, load_report
from lowmem_load.config.settings import read_settings
from lowmem_load.ds.zero3_target import target_maker
from lowmem_load.hf import loader
from lowmem_load.io.executor import Executor
from lowmem_load.io.source import ByteSource, LocalFile
from lowmem_load.pipeline.describe import describe
from lowmem_load.pipeline.execute import execute
from lowmem_load.pipeline.load import Load
from lowmem_load.pipeline.make_plan import make_plan
from lowmem_load.planning.load_plan import LoadPlan, TargetPlan
from lowmem_load.planning.regions import FlatRange, Grid
from lowmem_load.target import Layout, Target
from tests import builders
from tests.kits.source import SourceContract
from tests.kits.target import TargetContract

CPU = torch.device("cpu")
KEY = 0x5A


# -- a byte source ---------------------------------------------------------------------------------------------------


class Encoded:
    """A file of which every byte is stored xored with `KEY`, as an encrypting store would keep it."""

    def __init__(self, path: str) -> None:
        self._file = LocalFile(path)
        self.path, self.nbytes, self.version = path, self._file.nbytes, self._file.version

    def read_into(self, offset: int, memory: memoryview) -> None:
        self._file.read_into(offset, memory)
        values = np.frombuffer(memory, np.uint8)
        values ^= KEY

    def close(self) -> None:
        self._file.close()


def encoded(data: bytes) -> bytes:
    return (np.frombuffer(data, np.uint8) ^ np.uint8(KEY)).tobytes()


class TestEncoded(SourceContract):
    @pytest.fixture(autouse=True)
    def in_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def put(self, name: str, data: bytes) -> str:
        (self.folder / "incoming").write_bytes(encoded(data))
        (self.folder / "incoming").replace(self.folder / name)
        return str(self.folder / name)

    def open(self, path: str) -> ByteSource:
        return Encoded(path)


@pytest.fixture
def distributed() -> Iterator[DistributedInterface]:
    interface = DistributedInterface()
    yield interface
    interface.destroy()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("as_bin", [False, True])
def test_a_model_is_loaded_through_another_source(
    stage: int, as_bin: bool, checkpoints: Path, tmp_path: Path, distributed: DistributedInterface
) -> None:
    plain = builders.tiny_llama(checkpoints, max_shard_size="20KB")
    plain = builders.as_torch_bin(plain, 2) if as_bin else plain
    folder = Path(shutil.copytree(plain, tmp_path / "encoded"))
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    assert len(weights) > 1
    for file in weights:
        file.write_bytes(encoded(file.read_bytes()))
    config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    settings = read_settings(config, world_size=1)
    load = Load(settings, distributed, target_maker(0, CPU), open_source=Encoded)
    with loader.intercepted(load):
        model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ordinary = transformers.LlamaForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    expected = dict(ordinary.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(expected)
    for name, parameter in model.named_parameters():
        values = parameter.ds_tensor if stage == 3 else parameter.detach().view(-1)
        assert torch.equal(values, expected[name].detach().view(-1)), name
    assert load_report(model).read_bytes == sum(parameter.nbytes for parameter in expected.values())


# -- a target --------------------------------------------------------------------------------------------------------


class ColumnShards:
    """Each rank holds a band of the last dim of every parameter, as of a DTensor that is sharded along it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.device = CPU
        self._rank, self._world_size = rank, world_size

    def layout(self, _: str, parameter: torch.Tensor) -> Layout:
        if not parameter.dim():  # has no last dim: the first rank's
            scalar = FlatRange(0, int(self._rank == 0))
            return Layout("column_shard", parameter.dtype, (scalar,), (scalar.numel,), on_host=True)
        *rows, columns = parameter.shape
        size = -(-columns // self._world_size)
        first = min(self._rank * size, columns)
        band = Grid((*(((0, row),) for row in rows), ((first, min(first + size, columns)),)))
        return Layout("column_shard", parameter.dtype, (band,), (band.numel,), on_host=True)

    def fp32_buffers(self, _: nn.Module, /) -> list[torch.Tensor]:
        return []

    def prepare(self, _: nn.Module, /) -> None:
        pass

    def files(self, _: Sequence[TargetPlan], /) -> Mapping[str, int]:
        return {}

    def make(
        self, plan: TargetPlan, parameter: nn.Parameter, _: Callable[[], None]
    ) -> tuple[nn.Parameter, list[torch.Tensor]]:
        (destination,) = plan.destinations
        region = destination.region
        band = torch.empty(region.sizes if isinstance(region, Grid) else region.numel, dtype=plan.dtype)
        return nn.Parameter(band, parameter.requires_grad), [band.view(-1)]

    def finish(self) -> None:
        pass


def bands_of(cls: Any, path: Path, rank: int, world_size: int) -> tuple[nn.Module, LoadPlan]:
    """Loads what one rank holds; no other rank is there."""
    settings = read_settings({"zero_optimization": {"stage": 3}}, world_size=world_size)
    plans: list[LoadPlan] = []

    def handler(call: loader.TransformersCall) -> tuple[nn.Module, dict[str, Any]]:
        with Executor() as executor:
            described = describe(
                call,
                settings,
                lambda *_: ColumnShards(rank, world_size),
                executor,
                holds_values=True,
            )
            planned = make_plan(described, rank)
            plans.append(planned.plan)
            described.target.prepare(described.model)
            execute(planned, described.target, executor)
        return described.model, described.info

    torch.manual_seed(0)
    with loader.intercepted(handler):
        return cls.from_pretrained(path, dtype=torch.float32), plans[0]


@pytest.mark.parametrize(
    ("build", "class_name"),
    [
        (lambda root: builders.tiny_llama(root, torch.float32, "20KB"), "LlamaForCausalLM"),
        (builders.tiny_llama, "LlamaForCausalLM"),  # cast
        (lambda root: builders.tiny_mixtral(root, torch.float32), "MixtralForCausalLM"),  # experts are fused
        (lambda root: builders.as_torch_bin(builders.tiny_qwen2_tied(root, torch.float32)), "Qwen2ForCausalLM"),
        (builders.tiny_bert, "BertForSequenceClassification"),  # the head is initialised
    ],
)
def test_bands_of_all_ranks_are_the_ordinary_load(
    build: Callable[[Path], Path], class_name: str, checkpoints: Path
) -> None:
    cls, path = getattr(transformers, class_name), build(checkpoints)
    torch.manual_seed(0)
    ordinary = cls.from_pretrained(path, dtype=torch.float32)
    ranks = [bands_of(cls, path, rank, 3) for rank in range(3)]
    bands = [dict(model.named_parameters()) for model, _ in ranks]
    for name, parameter in ordinary.named_parameters():
        glued = torch.cat([each[name].detach() for each in bands], dim=-1)
        assert torch.equal(glued, parameter), name
    for model, plan in ranks:
        held = sum(parameter.nbytes for parameter in model.parameters())
        assert plan.partition_bytes == held
    whole = sum(parameter.nbytes for parameter in ordinary.parameters())
    assert sum(plan.partition_bytes for _, plan in ranks) == whole


class TestColumnShards(TargetContract):
    def target(self, rank: int, world_size: int) -> Target:
        return ColumnShards(rank, world_size)
