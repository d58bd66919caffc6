"""Which DeepSpeed configuration transformers sees, and the transformers models within a module."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import transformers.integrations.deepspeed as hf_deepspeed
from torch import nn
from transformers import BertConfig, BertModel
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from lowmem_load.hf.active import active_zero3_config, transformers_models, was_dropped

ZERO_3 = {"zero_optimization": {"stage": 3}}
ZERO_2 = {"zero_optimization": {"stage": 2}}


@pytest.fixture(autouse=True)
def no_config() -> Iterator[None]:
    before = hf_deepspeed._hf_deepspeed_config_weak_ref
    unset_hf_deepspeed_config()
    yield
    hf_deepspeed._hf_deepspeed_config_weak_ref = before


def test_without_a_configuration_none_is_active_or_dropped() -> None:
    assert active_zero3_config() is None
    assert not was_dropped()


def test_one_of_zero_3_is_active_while_it_is_kept() -> None:
    kept = HfDeepSpeedConfig(ZERO_3)
    assert active_zero3_config() is kept.config
    assert not was_dropped()
    del kept
    gc.collect()
    assert active_zero3_config() is None
    assert was_dropped()


def test_one_that_was_unset_was_not_dropped() -> None:
    kept = HfDeepSpeedConfig(ZERO_3)
    unset_hf_deepspeed_config()
    del kept
    gc.collect()
    assert active_zero3_config() is None
    assert not was_dropped()


def test_the_last_one_counts() -> None:
    first, second = HfDeepSpeedConfig(ZERO_3), HfDeepSpeedConfig(ZERO_2)
    assert active_zero3_config() is None
    third = HfDeepSpeedConfig(ZERO_3)
    assert active_zero3_config() is third.config
    del first, second


def bert() -> BertModel:
    sizes = {"hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 4}
    return BertModel(BertConfig(vocab_size=5, max_position_embeddings=4, **sizes))


class Wrapper(nn.Module):
    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(modules)


def test_the_outermost_transformers_models_are_found_through_wrappers() -> None:
    first, second = bert(), bert()
    assert transformers_models(first) == [first]
    assert transformers_models(Wrapper(Wrapper(first), nn.Linear(2, 2), second)) == [first, second]
    assert transformers_models(nn.Linear(2, 2)) == []


def test_a_transformers_model_within_another_is_not_listed() -> None:
    outer = bert()
    outer.add_module("inner", bert())
    assert transformers_models(Wrapper(outer)) == [outer]
