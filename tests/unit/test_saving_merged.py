"""Rows of a weight, merged by PEFT's code without the others, are those of the weight that it merges as a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.hf.merging import unloaded
from lowmem_load.planning.ranges import FlatRange, partition_range
from lowmem_load.saving import save as merged
from lowmem_load.saving.local_shards import LocalShard, local_shards
from lowmem_load.saving.save import gathered_adapters, merged_pieces, row_blocks

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False but")


class Model(nn.Module):
    """One of each layer whose weight is merged by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.turned, self.words = nn.Linear(77, 700), Conv1D(90, 300), nn.Embedding(500, 33)


def adapted(dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    targets = ["linear", "turned", *([] if kwargs.get("lora_bias") else ["words"])]
    config = LoraConfig(target_modules=targets, r=6, init_lora_weights=False, **kwargs)
    return get_peft_model(Model().to(dtype), config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", range(3))
def test_rows_are_those_of_the_whole(dtype: torch.dtype, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged, "BLOCK_BYTES", 40_000)
    wanted = dict(adapted(dtype).merge_and_unload().named_parameters())
    model = adapted(dtype)
    tensors = {id(one.tensor): one for one in local_shards(model, 0, masters=False)}
    with unloaded(model) as (base, merges):
        names = {id(parameter): name for name, parameter in base.named_parameters()}
    assert [merge.by_rows for merge in merges] == [True] * 3
    for merge in merges:
        whole = tensors[id(merge.parameters[0])]
        mine = partition_range(whole.tensor.numel(), rank, 3)
        shard = LocalShard(whole.source, whole.tensor, (mine,), False, False)
        taken = [(memory.clone(), first) for memory, first in merged_pieces(merge, shard, gathered_adapters(merges))]
        assert [first for _, first in taken] == [
            mine.start + sum(len(memory) for memory, _ in taken[:number]) for number in range(len(taken))
        ]
        found = torch.cat([memory for memory, _ in taken])
        expected = wanted[names[id(whole.tensor)]].detach().reshape(-1)[mine.start : mine.end]
        assert found.dtype == dtype and torch.equal(found, expected), names[id(whole.tensor)]
    assert not any("merge" in vars(module) for module in model.modules())


def test_blocks_cover_a_range_once_and_are_never_few_rows() -> None:
    for mine in (FlatRange(0, 0), FlatRange(5, 6), FlatRange(995, 3333), FlatRange(0, 10_000)):
        blocks = list(row_blocks(mine, 1000, 10))
        rows = [row for start, end, *_ in blocks for row in range(start, end)]
        assert rows == sorted({element // 10 for element in range(mine.start, mine.end)})
        assert all(lower <= start < end <= upper <= 1000 for start, end, lower, upper in blocks)
        assert all(upper - lower >= 64 for _, _, lower, upper in blocks)
    assert list(row_blocks(FlatRange(0, 50), 5, 10)) == [(0, 5, 0, 5)]


def test_what_takes_more_than_rows_is_gathered_and_merged() -> None:
    """A variant of LoRA, and a bias."""
    for kwargs in ({"use_dora": True}, {"lora_bias": True}):
        model = adapted(**kwargs)
        wanted = dict(adapted(**kwargs).merge_and_unload().named_parameters())
        with unloaded(model) as (base, merges):
            names = {id(parameter): name for name, parameter in base.named_parameters()}
        for merge in merges:
            assert not merge.by_rows
            found = merge.run({id(parameter): parameter.detach().clone() for parameter in merge.parameters})
            for parameter, value in zip(merge.parameters, found, strict=True):
                assert torch.equal(value, wanted[names[id(parameter)]]), names[id(parameter)]


def test_what_cannot_be_merged_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear is no PeftModel"), unloaded(nn.Linear(2, 2)):
        pass
    model = get_peft_model(nn.ModuleDict({"mha": nn.MultiheadAttention(8, 2)}), LoraConfig(target_modules=["mha"]))
    before = [id(module) for module in model.modules()]
    with pytest.raises(UnsupportedError, match=r"LoRA on torch\.nn\.MultiheadAttention"), unloaded(model):
        pass
    assert before == [id(module) for module in model.modules()]
