"""Which DeepSpeed configuration transformers sees, what it hears while a load is described, and models in a module."""

import contextlib
import copy
import gc
import importlib
import inspect
import threading
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import transformers.integrations.deepspeed as hf_deepspeed
import transformers.modeling_utils as modeling_utils
from torch import nn
from transformers import BertConfig, BertModel, HubertConfig, HubertModel, LlamaConfig, LlamaForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config
from transformers.models.hubert import modeling_hubert

from lowmem_load.errors import ConfigError
from lowmem_load.models import active as lock
from lowmem_load.models.active import (
    active_zero3_config,
    begins_after_drop,
    constructors,
    load_lock,
    ordinary_path,
    show_ds_config,
    transformers_models,
)

ZERO_3 = {"zero_optimization": {"stage": 3}}
ZERO_2 = {"zero_optimization": {"stage": 2}}


@pytest.fixture(autouse=True)
def no_config() -> Iterator[None]:
    before = hf_deepspeed._hf_deepspeed_config_weak_ref
    unset_hf_deepspeed_config()
    yield
    hf_deepspeed._hf_deepspeed_config_weak_ref = before


def test_one_of_zero_3_is_active_while_it_is_kept() -> None:
    kept = HfDeepSpeedConfig(ZERO_3)
    assert active_zero3_config() is kept.config
    del kept
    gc.collect()
    assert active_zero3_config() is None
    assert begins_after_drop()
    kept = HfDeepSpeedConfig(ZERO_3)
    assert not begins_after_drop()
    del kept
    gc.collect()
    assert not begins_after_drop(), "it has served a load"
    kept = HfDeepSpeedConfig(ZERO_3)
    unset_hf_deepspeed_config()
    del kept
    gc.collect()
    assert not begins_after_drop()


# -- the ordinary path -----------------------------------------------------------------------------------------------


def enabled() -> bool:
    return True


def test_on_the_ordinary_path_everybody_hears_that_there_is_no_zero_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if what axolotl 0.19 has put there answers, which does not ask the configuration."""
    for module in (modeling_utils, hf_deepspeed):
        monkeypatch.setattr(module, "is_deepspeed_zero3_enabled", enabled)
    kept = HfDeepSpeedConfig(ZERO_3)
    late = ModuleType("imported_meanwhile")
    with ordinary_path():
        late.is_deepspeed_zero3_enabled = hf_deepspeed.is_deepspeed_zero3_enabled
        modules = [modeling_utils, hf_deepspeed, modeling_hubert, late]
        assert [module.is_deepspeed_zero3_enabled() for module in modules] == [False] * 4
        assert hf_deepspeed.deepspeed_config() is None
    assert [module.is_deepspeed_zero3_enabled() for module in modules] == [True] * 4
    assert active_zero3_config() is kept.config
    unset_hf_deepspeed_config()
    with ordinary_path():
        assert hf_deepspeed.deepspeed_config() is None
    assert hf_deepspeed._hf_deepspeed_config_weak_ref is None


def test_on_the_ordinary_path_a_load_hears_that_there_is_no_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other modules ask about FSDP only what the load has answered, or after it."""
    asking = [modeling_utils, importlib.import_module("transformers.integrations.accelerate")]
    for module in asking:
        monkeypatch.setattr(module, "is_fsdp_enabled", enabled)
    with ordinary_path():
        assert not any(module.is_fsdp_enabled() for module in asking)
    assert all(module.is_fsdp_enabled() for module in asking)


def test_the_ordinary_path_sees_no_default_device() -> None:
    with torch.device("meta"):  # after set_default_device(None) torch 2.8 cannot say any more which is the default
        with ordinary_path():
            assert torch.empty(1).device.type == torch.get_default_device().type == "cpu"
        assert torch.empty(1).device.type == "meta"


def test_the_last_configuration_and_what_transformers_is_told_both_count(monkeypatch: pytest.MonkeyPatch) -> None:
    others = HfDeepSpeedConfig(ZERO_3), HfDeepSpeedConfig(ZERO_2)
    assert active_zero3_config() is None
    kept = HfDeepSpeedConfig(ZERO_3)
    assert active_zero3_config() is kept.config
    monkeypatch.setattr(modeling_utils, "is_deepspeed_zero3_enabled", lambda: False)
    assert active_zero3_config() is None
    monkeypatch.setattr(modeling_utils, "is_deepspeed_zero3_enabled", enabled)
    assert active_zero3_config() is kept.config
    kept = HfDeepSpeedConfig(ZERO_2)
    assert active_zero3_config() is None
    del kept, others
    assert active_zero3_config() is None


def bert() -> BertModel:
    sizes = {"hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 4}
    return BertModel(BertConfig(vocab_size=5, max_position_embeddings=4, **sizes))


def test_the_outermost_transformers_models_are_found_through_wrappers() -> None:
    first, second = bert(), bert()
    assert transformers_models(first) == [first]
    assert transformers_models(nn.Sequential(nn.Sequential(first), nn.Linear(2, 2), second)) == [first, second]
    assert transformers_models(nn.Linear(2, 2)) == []
    first.add_module("inner", bert())
    assert transformers_models(nn.Sequential(first)) == [first]


def test_a_method_that_sees_the_ds_config_is_one_to_its_callers() -> None:
    """As LLaMA-Factory's `patch_model` asks; a deepcopy has a method of its own."""
    model = LlamaForCausalLM(LlamaConfig(vocab_size=5, hidden_size=4, num_hidden_layers=1, num_attention_heads=1))
    signature = inspect.signature(model.generate)
    show_ds_config(model, ZERO_3, lambda _: True)
    assert "GenerationMixin" in str(model.generate.__func__)
    assert inspect.signature(model.generate) == signature
    copied = copy.deepcopy(model)
    for part in (copied, copied.model):  # others may call a model inside of it
        assert part.resize_token_embeddings.__self__ is part
        assert part.resize_token_embeddings.__func__ is not LlamaForCausalLM.resize_token_embeddings


@pytest.mark.parametrize("is_partitioned", [True, False])
def test_an_encoder_sees_the_ds_config_if_it_is_partitioned(is_partitioned: bool) -> None:
    sizes = {"hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 4}
    sizes |= {"num_conv_pos_embeddings": 2, "num_conv_pos_embedding_groups": 1}
    convolution = {"conv_dim": (4,), "conv_stride": (5,), "conv_kernel": (5,)}
    model = HubertModel(HubertConfig(**sizes, **convolution, layerdrop=1.0, apply_spec_augment=False))
    ran: list[nn.Module] = []
    model.encoder.layers[0].register_forward_hook(lambda layer, *_: ran.append(layer))
    show_ds_config(model, ZERO_3, lambda _: is_partitioned)
    model.train()(torch.zeros(1, 50))
    assert len(ran) == is_partitioned


# -- the lock for loads of one process: who waits for it, and who gives up ---------------------------------------------


@contextlib.contextmanager
def building() -> Iterator[None]:
    constructors.append(object())
    yield
    constructors.pop()


def begin(found: list[BaseException | None]) -> threading.Thread:
    """Return a thread that takes the lock; what comes of that is put into the list."""

    def take() -> None:
        try:
            with load_lock():
                found.append(None)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return thread


def test_a_thread_waits_until_the_other_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE_S", 0.3)
    found: list[BaseException | None] = []
    with load_lock():
        with load_lock():
            thread = begin(found)
        for _ in range(40):  # constructors, none of which takes long
            with building():
                thread.join(0.02)
        assert not found
    thread.join(60)
    assert found == [None]


def test_a_thread_does_not_wait_for_a_constructor_that_may_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE_S", 0.05)
    found: list[BaseException | None] = []
    with load_lock(), building():
        thread = begin(found)
        thread.join(60)
    [error] = found
    assert isinstance(error, ConfigError)
    assert "has been in the constructor of its model" in str(error)
    with load_lock():
        pass
