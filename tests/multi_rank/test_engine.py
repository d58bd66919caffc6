"""ModelEngine on two ranks: what it sets up trains, in each precision, and it leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import builders
from tests.ranks import run_ranks

ZERO3 = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}}
AUTO = {**ZERO3, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 4}, "gradient_clipping": "auto"}
ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}


def write_yaml(folder: Path, model: Path, ds_config: dict[str, Any], **settings: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ds_z3.json").write_text(json.dumps(ds_config))
    dist_config = {"name": "deepspeed", "config_file": "ds_z3.json"}
    path = folder / "train.yaml"
    path.write_text(json.dumps({"model": str(model), "dist_config": dist_config, "output_dir": "x", **settings}))
    return str(path)


def checkpoints_activations(model: nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def train(path: str, steps: int) -> dict[str, Any]:
    """Rank function."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    from lowmem_load import ModelEngine, load_report

    engine = ModelEngine(path)
    model = engine.model
    found: dict[str, Any] = {
        "precision": engine.precision.value,
        "enabled": [engine.ds_config[name]["enabled"] for name in ("bf16", "fp16")],
        "parameter dtypes": {str(parameter.dtype) for parameter in model.parameters()},
        "report dtype": load_report(model).dtype,
        "config dtype": str(model.config.dtype),
        "transformers saw": engine.hf_deepspeed_config.config == engine.ds_config,
        "training": model.training,
        "checkpointing": checkpoints_activations(model),
        "use_cache": engine.model_config.use_cache,
        "same config": engine.model_config is model.config,
        "processor": engine.processor,
        "extra": engine.extra,
        "bucket": engine.ds_config["zero_optimization"]["reduce_bucket_size"],
    }
    if engine.precision.value == "float16" and not get_accelerator().is_fp16_supported():
        return found
    ds_engine, *_ = deepspeed.initialize(model=model, config={**engine.ds_config, "optimizer": ADAM})
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 100, (2, 12), generator=torch.Generator().manual_seed(engine.distributed.rank))
        loss = ds_engine(input_ids=tokens, labels=tokens).loss
        ds_engine.backward(loss)
        ds_engine.step()
        losses.append(loss.item())
    found["losses"] = losses
    found["compute dtype"] = str(ds_engine(input_ids=tokens).logits.dtype)
    found["skipped"] = ds_engine.skipped_steps
    return found


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, "bfloat16"),
        ({"fp16": True}, "float16"),
        ({"bf16": False, "fp16": False}, "float32"),
    ],
)
def test_a_yaml_trains(checkpoints: Path, tmp_path: Path, settings: dict[str, Any], dtype: str) -> None:
    """Trains in fp16 only where DeepSpeed can: on CPU it says "Type fp16 is not supported on your device"."""
    path = write_yaml(tmp_path, builders.tiny_llama(checkpoints), AUTO, **settings)
    for found in run_ranks(train, path, 2, world_size=2):
        if "losses" in found:
            losses = found.pop("losses")
            assert losses[1] < losses[0]
            assert (found.pop("compute dtype"), found.pop("skipped")) == (f"torch.{dtype}", 0)
        else:
            assert dtype == "float16"
        assert found == {
            "precision": dtype,
            "enabled": [dtype == "bfloat16", dtype == "float16"],
            "parameter dtypes": {f"torch.{dtype}"},
            "report dtype": f"torch.{dtype}",
            "config dtype": f"torch.{dtype}",
            "transformers saw": True,
            "training": True,
            "checkpointing": True,
            "use_cache": False,
            "same config": True,
            "processor": None,
            "extra": {"output_dir": "x"},
            "bucket": 32 * 32,
        }


def set_up(path: str) -> dict[str, Any]:
    """Rank function: what is_train, freeze, the stage and the model's abilities change."""
    import deepspeed
    from transformers import LlamaForCausalLM

    from lowmem_load import DistConfig, ModelArguments, ModelEngine

    found: dict[str, Any] = {}
    dist = DistConfig({**ZERO3, "bf16": {"enabled": True}}, timeout=120)
    patterns = ["model.embed_tokens.*", "*.layers.0.mlp.*_proj.weight"]
    engine = ModelEngine(
        ModelArguments(path, freeze=patterns, attn_implementation="eager", gradient_checkpointing=False), dist
    )
    model = engine.model
    found["frozen"] = sorted(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    found["not checkpointing"] = (checkpoints_activations(model), model.config.use_cache)
    found["attention"] = model.config._attn_implementation
    ds_engine, *_ = deepspeed.initialize(model=model, config={**engine.ds_config, "optimizer": ADAM})
    before = whole(model)
    tokens = torch.arange(12)[None]
    ds_engine.backward(ds_engine(input_ids=tokens, labels=tokens).loss)
    ds_engine.step()
    after = whole(model)
    found["unchanged"] = sorted(name for name in before if torch.equal(before[name], after[name]))

    engine = ModelEngine({"model": path, "gradient_checkpointing": True}, dist, is_train=False)
    found["inference"] = (engine.model.training, checkpoints_activations(engine.model))

    engine = ModelEngine({"model": path}, {"config_file": {"zero_optimization": {"stage": 2}}})
    found["stage 2"] = {(str(p.dtype), p.numel() > 0) for p in engine.model.parameters()}

    class Unable(LlamaForCausalLM):
        supports_gradient_checkpointing = False

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = ModelEngine({"model": path, "auto_class": Unable}, dist)
    found["warnings"] = [str(warning.message) for warning in caught if "checkpointing" in str(warning.message)]
    found["unable"] = (engine.model.training, checkpoints_activations(engine.model))
    found["errors"] = []
    for extra in ({"auto_class": Unable, "gradient_checkpointing": True}, {"freeze": ["lm_head.*", "nope.*", "no"]}):
        try:
            ModelEngine({"model": path, **extra}, dist)
        except Exception as error:
            found["errors"].append(f"{type(error).__name__}: {error}")
    return found


def whole(model: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    values = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            values[name] = parameter.detach().clone()
    return values


def test_modes_and_freezing(checkpoints: Path) -> None:
    frozen = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("down", "gate", "up")]
    for rank, found in enumerate(run_ranks(set_up, str(builders.tiny_llama(checkpoints)), world_size=2)):
        assert found["frozen"] == ["model.embed_tokens.weight", *frozen]
        assert found["unchanged"] == found["frozen"]
        assert found["not checkpointing"] == (False, True)
        assert found["attention"] == "eager"
        assert found["inference"] == (False, False)
        assert found["stage 2"] == {("torch.bfloat16", True)}
        assert found["unable"] == (True, False)
        assert len(found["warnings"]) == (rank == 0)
        assert all("does not support" in text and "it trains without" in text for text in found["warnings"])
        unsupported, unmatched = found["errors"]
        assert unsupported.startswith("UnsupportedError: Unable: no gradient checkpointing")
        assert unmatched.startswith("ConfigError: freeze: 'nope.*', 'no' match(es) none of the model's 21 parameters")
        assert "model.embed_tokens.weight" in unmatched


def leaks(path: str) -> dict[str, Any]:
    """Rank function: engines after one another, one that fails among them, beside somebody else's configuration."""
    import transformers.integrations.deepspeed as integration
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

    from lowmem_load import ModelEngine
    from lowmem_load.ds.partition import is_partitioned, partition_of
    from lowmem_load.planning.ranges import partition_range

    def visible() -> Any:
        return integration._hf_deepspeed_config_weak_ref

    found: dict[str, Any] = {"before": visible()}
    first = ModelEngine({"model": path, "bf16": True}, {"config_file": ZERO3})
    found["after one"] = visible()
    plain = AutoModelForCausalLM.from_pretrained(path)
    found["plain is plain"] = not any(is_partitioned(parameter) for parameter in plain.parameters())
    second = ModelEngine({"model": path, "bf16": False, "fp16": False}, {"config_file": ZERO3})
    found["after two"] = visible()
    found["dtypes"] = [str(next(engine.model.parameters()).dtype) for engine in (first, second)]
    for broken in ({"model": path, "freeze": ["nope"]}, {"model": path, "auto_class": "Nope"}):
        try:
            ModelEngine(broken, {"config_file": ZERO3})
        except ValueError:
            found.setdefault("after errors", []).append(visible())
    theirs = HfDeepSpeedConfig({"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 1})
    third = ModelEngine({"model": path}, {"config_file": ZERO3})
    found["theirs stays"] = visible()() is theirs and not is_deepspeed_zero3_enabled()
    with first.deepspeed_visible():
        found["ours inside"] = visible()() is first.hf_deepspeed_config and is_deepspeed_zero3_enabled()
        with third.deepspeed_visible():
            found["nested"] = visible()() is third.hf_deepspeed_config
        first.model.resize_token_embeddings(140, mean_resizing=False)
    found["theirs again"] = visible()() is theirs
    # transformers leaves the new one whole, for deepspeed.initialize to partition
    resized, old = first.model.get_input_embeddings().weight, third.model.get_input_embeddings().weight
    found["resized"] = tuple(resized.shape)
    span = partition_range(old.ds_numel, first.distributed.rank, 2)
    found["kept"] = torch.equal(resized.flatten()[span.start : span.end], partition_of(old))
    return found


def test_no_configuration_leaks(checkpoints: Path) -> None:
    for found in run_ranks(leaks, str(builders.tiny_llama(checkpoints)), world_size=2):
        assert found == {
            "before": None,
            "after one": None,
            "plain is plain": True,
            "after two": None,
            "dtypes": ["torch.bfloat16", "torch.float32"],
            "after errors": [None, None],
            "theirs stays": True,
            "ours inside": True,
            "nested": True,
            "theirs again": True,
            "resized": (140, 32),
            "kept": True,
        }


def processors(minilm: str, broken: str, other: str) -> dict[str, Any]:
    """Rank function."""
    import torch.distributed as dist

    from lowmem_load import ModelEngine

    dist_config = {"config_file": {**ZERO3, "bf16": {"enabled": False}, "fp16": {"enabled": False}}}
    engine = ModelEngine({"model": minilm}, dist_config, is_train=False)
    found: dict[str, Any] = {"tokens": engine.processor("hello world")["input_ids"], "errors": []}
    ranks_differ = [broken, minilm][dist.get_rank()]
    for name in (broken, ranks_differ, other):
        try:
            ModelEngine({"model": name}, dist_config)
        except Exception as error:
            found["errors"].append(f"{type(error).__name__}: {error}")
    return found


def test_processor(minilm: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "vocab.txt", "tokenizer_config.json"):
        shutil.copy(minilm / name, broken)
    (broken / "model.safetensors").symlink_to(minilm / "model.safetensors")
    (broken / "tokenizer.json").write_text('{"version": ')
    for found in run_ranks(processors, str(minilm), str(broken), str(tmp_path / "absent"), world_size=2):
        assert found["tokens"] == [101, 7592, 2088, 102]
        both, one, absent = found["errors"]
        assert both.startswith(f"CheckpointError: {broken}: its tokenizer cannot be loaded")
        assert one.startswith("RankError: ")
        assert "preparing failed on 1 rank(s)" in one
        assert "rank 0: CheckpointError" in one
        assert absent == f"CheckpointError: {tmp_path / 'absent'}: no such folder"
