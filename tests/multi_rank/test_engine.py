"""ModelEngine on two ranks: what it sets up trains, in each precision, and it leaves nothing behind."""

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled
from transformers.integrations.deepspeed import deepspeed_config

from lowmem_load import CheckpointError, ConfigError, RankError, UnsupportedError, get_load_report
from lowmem_load.engines.parameters import is_partitioned
from lowmem_load.integrations.llamafactory import DistConfig, ModelArguments
from lowmem_load.llamafactory import ModelEngine
from tests import builders
from tests.model_digest import gathered
from tests.parity import ADAM
from tests.parity import train as steps_of
from tests.ranks import run_ranks

ZERO3 = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}}
AUTO = {**ZERO3, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 4}, "gradient_clipping": "auto"}


def write_yaml(folder: Path, model: Path, ds_config: dict[str, Any], **settings: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ds_z3.json").write_text(json.dumps(ds_config))
    dist_config = {"name": "deepspeed", "config_file": "ds_z3.json"}
    path = folder / "train.yaml"
    path.write_text(json.dumps({"model": str(model), "dist_config": dist_config, "output_dir": "x", **settings}))
    return str(path)


def checkpoints_activations(model: nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def train(path: str, name: str) -> None:
    """Trains in fp16 only where DeepSpeed can: on CPU it says "Type fp16 is not supported"."""
    engine = ModelEngine(path)
    model = engine.model
    assert engine.precision is getattr(torch, name)
    assert engine.ds_config["bf16"]["enabled"] is (name == "bfloat16")
    assert engine.ds_config["fp16"]["enabled"] is (name == "float16")
    assert {str(parameter.dtype) for parameter in model.parameters()} == {f"torch.{name}"}
    assert get_load_report(model).contents.endswith(f", {name}")
    assert str(model.config.dtype) == f"torch.{name}"
    assert engine.hf_deepspeed_config.config == engine.ds_config  # it is what transformers saw
    assert model.training
    assert checkpoints_activations(model)
    assert engine.model_config is model.config
    assert engine.model_config.use_cache is False
    assert engine.processor is None
    assert engine.extra == {"output_dir": "x"}
    assert engine.ds_config["zero_optimization"]["reduce_bucket_size"] == 32 * 32
    if name == "float16" and not get_accelerator().is_fp16_supported():
        return
    ds_engine, *_ = deepspeed.initialize(model=model, config={**engine.ds_config, **ADAM})
    losses = steps_of(ds_engine, 2)
    assert losses[1] < losses[0]
    assert str(ds_engine(input_ids=torch.arange(12)[None]).logits.dtype) == f"torch.{name}"
    assert ds_engine.skipped_steps == 0


SETTINGS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float16": {"fp16": True},
    "float32": {"bf16": False, "fp16": False},
}


def set_up(path: str) -> None:
    """Makes engines of which is_train, freeze, the stage and the model's abilities differ."""
    dist = DistConfig({**ZERO3, "bf16": {"enabled": True}})
    patterns = ["model.embed_tokens.*", "*.layers.0.mlp.*_proj.weight"]
    engine = ModelEngine(
        ModelArguments(path, freeze=patterns, attn_implementation="eager", gradient_checkpointing=False), dist
    )
    model = engine.model
    frozen = sorted(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    assert frozen == [
        "model.embed_tokens.weight",
        *(f"model.layers.0.mlp.{name}_proj.weight" for name in ("down", "gate", "up")),
    ]
    assert not checkpoints_activations(model)
    assert model.config.use_cache is True
    assert model.config._attn_implementation == "eager"
    ds_engine, *_ = deepspeed.initialize(model=model, config={**engine.ds_config, **ADAM})
    before = {name: gathered(parameter) for name, parameter in model.named_parameters()}
    tokens = torch.arange(12)[None]
    ds_engine.backward(ds_engine(input_ids=tokens, labels=tokens).loss)
    ds_engine.step()
    unchanged = [name for name, parameter in model.named_parameters() if torch.equal(gathered(parameter), before[name])]
    assert sorted(unchanged) == frozen

    model = ModelEngine({"model": path, "gradient_checkpointing": True}, dist, is_train=False).model
    assert not model.training
    assert not checkpoints_activations(model)

    model = ModelEngine({"model": path}, {"config_file": {"zero_optimization": {"stage": 2}}}).model
    assert {(p.dtype, p.numel() > 0) for p in model.parameters()} == {(torch.float32, True)}  # as load_model reads it

    class Unable(LlamaForCausalLM):
        supports_gradient_checkpointing = False

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = ModelEngine({"model": path, "auto_class": Unable}, dist)
    messages = [str(warning.message) for warning in caught if "checkpointing" in str(warning.message)]
    assert len(messages) == (engine.distributed.rank == 0)
    assert all("does not support" in text and "it trains without" in text for text in messages)
    assert engine.model.training
    assert not checkpoints_activations(engine.model)
    with pytest.raises(UnsupportedError, match=r"^Unable: no gradient checkpointing"):
        ModelEngine({"model": path, "auto_class": Unable, "gradient_checkpointing": True}, dist)
    unmatched = r"^freeze: 'nope\.\*', 'no' match\(es\) none of the model's 21 parameters.*model\.embed_tokens\.weight"
    with pytest.raises(ConfigError, match=unmatched):
        ModelEngine({"model": path, "freeze": ["lm_head.*", "nope.*", "no"]}, dist)


def make_several(path: str) -> None:
    """Makes engines after one another, one that fails among them, next to somebody else's configuration."""
    assert deepspeed_config() is None
    first = ModelEngine({"model": path, "bf16": True}, {"config_file": ZERO3})
    assert deepspeed_config() is None
    plain = AutoModelForCausalLM.from_pretrained(path)
    assert not any(is_partitioned(parameter) for parameter in plain.parameters())
    second = ModelEngine({"model": path, "bf16": False, "fp16": False}, {"config_file": ZERO3})
    assert deepspeed_config() is None
    assert [next(engine.model.parameters()).dtype for engine in (first, second)] == [torch.bfloat16, torch.float32]
    for broken in ({"model": path, "freeze": ["nope"]}, {"model": path, "auto_class": "Nope"}):
        with pytest.raises(ValueError, match=r"(?i)nope"):
            ModelEngine(broken, {"config_file": ZERO3})
        assert deepspeed_config() is None
    theirs = HfDeepSpeedConfig({"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 1})
    third = ModelEngine({"model": path, "bf16": True}, {"config_file": ZERO3})
    assert deepspeed_config() is theirs.config
    assert not is_deepspeed_zero3_enabled()
    with first.deepspeed_visible():
        assert deepspeed_config() is first.hf_deepspeed_config.config
        assert is_deepspeed_zero3_enabled()
        with third.deepspeed_visible():
            assert deepspeed_config() is third.hf_deepspeed_config.config
        first.model.resize_token_embeddings(140, mean_resizing=False)
    assert deepspeed_config() is theirs.config
    # transformers leaves the new one whole, for deepspeed.initialize to partition
    resized, old = first.model.get_input_embeddings().weight, third.model.get_input_embeddings().weight
    assert resized.shape == (140, 32)
    with deepspeed.zero.GatheredParameters([old]):
        assert torch.equal(resized[:128], old)


def use_engines(llama: str, paths: dict[str, str]) -> None:
    set_up(llama)  # first: it asks for the timeout of the process group
    make_several(llama)
    for dtype, path in paths.items():
        train(path, dtype)


def test_engines_train_and_leave_no_configuration_behind(checkpoints: Path, tmp_path: Path) -> None:
    model = builders.tiny_llama(checkpoints)
    paths = {dtype: write_yaml(tmp_path / dtype, model, AUTO, **settings) for dtype, settings in SETTINGS.items()}
    run_ranks(use_engines, str(model), paths, timeout_s=180)


def load_processors(minilm: str, broken: str, absent: str) -> None:
    dist_config = {"config_file": {**ZERO3, "bf16": {"enabled": False}, "fp16": {"enabled": False}}}
    engine = ModelEngine({"model": minilm}, dist_config, is_train=False)
    assert engine.processor("hello world")["input_ids"] == [101, 7592, 2088, 102]
    with pytest.raises(CheckpointError, match=f"^{re.escape(broken)}: its tokenizer cannot be loaded") as caught:
        ModelEngine({"model": broken}, dist_config)
    assert caught.type is CheckpointError
    message = r"(?s)preparing failed on 1 rank\(s\).*rank 0: CheckpointError"
    with pytest.raises(RankError, match=message):
        ModelEngine({"model": [broken, minilm][dist.get_rank()]}, dist_config)
    with pytest.raises(CheckpointError) as caught:
        ModelEngine({"model": absent}, dist_config)
    assert caught.type is CheckpointError
    assert str(caught.value) == f"{absent}: no such folder"


def test_processor(minilm: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "vocab.txt", "tokenizer_config.json"):
        shutil.copy(minilm / name, broken)
    (broken / "model.safetensors").symlink_to(minilm / "model.safetensors")
    (broken / "tokenizer.json").write_text('{"version": ')
    run_ranks(load_processors, str(minilm), str(broken), str(tmp_path / "absent"))
