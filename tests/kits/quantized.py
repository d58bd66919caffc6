"""What any `QuantizedFormat` must do, as tests."""

import abc
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

import lowmem_load
from lowmem_load.files.executor import Executor
from lowmem_load.load import plan_model
from lowmem_load.load.make_plan import PlannedModel
from lowmem_load.models.quantizers import FORMATS, format_of
from lowmem_load.planning.regions import FlatRange
from lowmem_load.quantized.format import QuantizedFormat
from tests.parity import BF16

WORLD_SIZES = (1, 3)


class QuantizedFormatContract(abc.ABC):
    """Tests of a format. It must be one of `FORMATS`."""

    kind: ClassVar[type[QuantizedFormat]]

    @abc.abstractmethod
    def write(self, folder: Path) -> dict[str, Any]:
        """Write a checkpoint of a causal model with weights of this format; return the keywords to load it by.

        Some weights should have sizes that ranks and blocks do not divide.
        """

    @pytest.fixture(autouse=True)
    def checkpoint(self, tmp_path: Path) -> None:
        """Write the checkpoint."""
        self.folder = tmp_path
        self.keywords = self.write(tmp_path)

    def test_its_configuration_is_recognized(self) -> None:
        """As an object and as in a config.json, by this format alone; and no other one is."""
        in_file = json.loads((self.folder / "config.json").read_text())["quantization_config"]
        for config in filter(None, (in_file, self.keywords.get("quantization_config"))):
            assert [type(each) for each in FORMATS if each.recognizes(config)] == [self.kind]
            assert type(format_of(config)) is self.kind
        assert format_of({"quant_method": "another"}) is None

    def test_each_rank_reads_the_bytes_of_its_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those that it has after an ordinary load. No weight is read or computed whole."""
        ordinary = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.bfloat16, **self.keywords)
        expected = {name: value.detach().view(-1) for name, value in ordinary.named_parameters()}
        made: list[PlannedModel] = []
        make_plan = plan_model.make_plan
        monkeypatch.setattr(plan_model, "make_plan", lambda *args: made.append(make_plan(*args)) or made[-1])
        for world_size in WORLD_SIZES:
            for rank in range(world_size):
                plan = lowmem_load.plan(self.folder, BF16, rank=rank, world_size=world_size, **self.keywords)
                assert plan.slow_paths == []
                assert bool(plan.num_quantized) is self.kind.stays_packed
                with Executor() as executor:
                    for target in plan.targets:
                        fill, region = target.destinations[0].fill, target.destinations[0].region
                        assert fill is not None and isinstance(region, FlatRange)
                        memory = torch.empty(fill.numel, dtype=target.dtype)
                        executor.fill(fill, memory, plan.values, made[-1].constants)
                        executor.finish()
                        part = expected[target.name][region.start : region.end]
                        assert part.dtype == memory.dtype
                        assert torch.equal(memory.view(torch.uint8), part.view(torch.uint8)), target.name

    def test_ranks_agree_on_the_plan(self) -> None:
        """Ranks that load by other keywords, or other files, have another digest; all others the same."""
        plans = [lowmem_load.plan(self.folder, BF16, rank=rank, world_size=2, **self.keywords) for rank in (0, 1)]
        assert plans[0].fingerprint == plans[1].fingerprint
