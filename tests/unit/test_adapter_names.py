"""Adapters in training checkpoints: what PEFT's own `save_pretrained` writes is what is written, or one error."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file

from lowmem_load import CheckpointError, ConfigError, consolidate
from tests.parity import assert_equal
from tests.zero_checkpoint import save_zero3

pytestmark = [pytest.mark.filterwarnings(f"ignore:::{package}") for package in ("peft", "torch")]
pytestmark.append(pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"))  # PEFT asks for it

Tensors = dict[str, torch.Tensor]

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": "lora_only"},
    "all biases": {"bias": "all"},
    "tokens": {"trainable_token_indices": [1, 5]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "dora": {"use_dora": True},
    "head": {"modules_to_save": ["lm_head", "norm"]},
    "ranks": {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"v_proj": 2}},
    "pissa": {"init_lora_weights": "pissa"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    for name, tied in (("apart", False), ("tied", True)):
        config = transformers.Qwen2Config(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
        )
        config.vocab_size, config.tie_word_embeddings, config.architectures = 23, tied, ["Qwen2ForCausalLM"]
        config.save_pretrained(folder / name)
    return folder


def trained(base: Path, adapter: str = "default", **how: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.AutoConfig.from_pretrained(base))
    options = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **how}
    wrapped = get_peft_model(model, LoraConfig(**options), adapter)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.normal_()
    return wrapped


def saved_by_peft(model: Any, folder: Path, adapter: str = "default") -> Path:
    model.save_pretrained(folder)
    return folder if adapter == "default" else folder / adapter


def save(state: Tensors, folder: Path) -> Path:
    dcp.save({"model": state}, checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.mark.parametrize(
    ("kind", "folder", "adapter"),
    [
        *((kind, "apart", "model") for kind in KINDS),
        *((kind, "tied", "default") for kind in ("plain", "tokens", "bias")),
        *(("head", "apart", adapter) for adapter in ("lora_B", "modules_to_save", "q_proj", "base_layer")),
    ],
)
def test_the_adapter_is_what_peft_saves(kind: str, folder: str, adapter: str, base: Path, tmp_path: Path) -> None:
    model = trained(base / folder, adapter, **KINDS[kind])
    expected = saved_by_peft(model, tmp_path / "peft", adapter)
    tensors = load_file(expected / "adapter_model.safetensors")
    plain = transformers.Qwen2ForCausalLM(transformers.AutoConfig.from_pretrained(base / folder)).state_dict()
    alone = get_peft_model_state_dict(model, adapter_name=adapter)
    for way, state in (("whole", model.state_dict()), ("only", alone)):
        checkpoint = save(state, tmp_path / way)
        shutil.copy(expected / "adapter_config.json", checkpoint)
        for config in (base / folder, False):
            out = tmp_path / f"{way} {config is not False}"
            if way == "whole" and not config:
                with pytest.raises(ConfigError, match=r"depends on the model: name that by config"):
                    consolidate(checkpoint, out, config=config)
                assert not out.exists()
                continue
            report = consolidate(checkpoint, out, config=config)
            place = out / "adapter" if way == "whole" else out
            assert_equal(load_file(place / "adapter_model.safetensors"), tensors)
            made = json.loads((place / "adapter_config.json").read_text())
            origin = json.loads((expected / "adapter_config.json").read_text())
            if kind == "pissa" and way == "whole":  # whose base has lost what the adapter has
                origin["init_lora_weights"] = True
            assert made == origin
            tied = ["base_model.model.lm_head.token_adapter.trainable_tokens_delta." + adapter]
            assert report.left_out == (tied if (kind, folder, way) == ("tokens", "tied", "whole") else [])
            if way == "whole":
                ties = {"lm_head.weight"} if folder == "tied" else set()
                assert load_file(out / "model.safetensors").keys() == plain.keys() - ties


@pytest.mark.parametrize(("has_base", "before"), [(True, ""), (True, "_orig_mod."), (False, "_orig_mod.")])
def test_zero_checkpoints_of_peft_and_torch_compile(has_base: bool, before: str, base: Path, tmp_path: Path) -> None:
    model = trained(base / "apart", "policy", modules_to_save=["norm"])
    expected = saved_by_peft(model, tmp_path / "peft", "policy")
    mine = {before + name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    rest = {before + name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    save_zero3(tmp_path / "zero", mine, world_size=2, frozen=rest if has_base else None)
    shutil.copy(expected / "adapter_config.json", tmp_path / "zero")
    out = tmp_path / "made"
    report = consolidate(tmp_path / "zero", out, config=base / "apart")
    place = out / "adapter" if has_base else out
    assert_equal(load_file(place / "adapter_model.safetensors"), load_file(expected / "adapter_model.safetensors"))
    assert (out / "model.safetensors").exists() == (out / "config.json").exists() == has_base
    assert report.left_out == []


@pytest.mark.parametrize("kind", ["bias", "tokens", "head", "embeddings"])
def test_what_trainer_saves_under_zero(kind: str, base: Path, tmp_path: Path) -> None:
    """It leaves out frozen parameters of a PEFT model."""
    model = trained(base / "apart", **KINDS[kind])
    expected = saved_by_peft(model, tmp_path / "peft")
    mine = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    save_zero3(tmp_path / "zero", mine, world_size=2)
    shutil.copy(expected / "adapter_config.json", tmp_path / "zero")
    errors = {"embeddings": r"lacks .*embed_tokens.base_layer.weight, which PEFT saves", "bias": "is not of a Qwen2"}
    if kind in errors:
        with pytest.raises(CheckpointError, match=errors[kind]):
            consolidate(tmp_path / "zero", tmp_path / "made", config=base / "apart")
        return
    report = consolidate(tmp_path / "zero", tmp_path / "made", config=base / "apart")
    made = load_file(tmp_path / "made" / "adapter_model.safetensors")
    assert_equal(made, load_file(expected / "adapter_model.safetensors"))
    assert {path.name for path in (tmp_path / "made").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert report.left_out == []


@pytest.mark.parametrize(
    ("kind", "edit", "text"),
    [
        (
            "dora",
            {"use_dora": False},
            r"with the adapter of adapter_config.json: .*lora_magnitude_vector.* is not part",
        ),
        ("plain", {"use_dora": True}, r"lora_magnitude_vector.default.weight is missing, not \(16,\)"),
        ("plain", {"r": 3}, r"lora_A.default.weight is \(2, 16\), not \(3, 16\)"),
        ("plain", {"target_modules": ["q_proj"]}, r"v_proj.base_layer.weight is not part"),
        ("plain", {"modules_to_save": ["norm"]}, r"norm.modules_to_save.default.weight is missing, not \(16,\)"),
        ("plain", {"trainable_token_indices": [3]}, r"trainable_tokens_delta.default is missing"),
        ("plain", {"peft_type": "PROMPT_TUNING"}, r"peft_type is 'PROMPT_TUNING', .*it is of another adapter"),
        ("plain", {"peft_type": None}, r"peft_type is None, .*it is of another adapter"),
        ("plain", {"r": "x"}, r"PEFT cannot put the adapter of its adapter_config.json on a Qwen2.*: TypeError"),
        ("plain", {"rank_pattern": 5}, r"PEFT cannot put the adapter .*: AttributeError"),
        ("plain", {"megatron_config": {"a": 1}, "megatron_core": "this", "r": 3}, r"is \(2, 16\), not \(3, 16\)"),
    ],
)
def test_a_configuration_of_another_adapter_is_refused(
    kind: str, edit: dict[str, Any], text: str, base: Path, tmp_path: Path
) -> None:
    model = trained(base / "apart", **KINDS[kind])
    checkpoint = save(model.state_dict(), tmp_path / "saved")
    values = json.loads((saved_by_peft(model, tmp_path / "peft") / "adapter_config.json").read_text())
    (checkpoint / "adapter_config.json").write_text(json.dumps({**values, **edit}))
    with pytest.raises(CheckpointError, match=text):
        consolidate(checkpoint, tmp_path / "made", config=base / "apart")
    assert not (tmp_path / "made").exists()
    assert "this" not in sys.modules, "a module that the file names is imported"


def test_a_resized_vocabulary_is_saved_with_the_adapter(base: Path, tmp_path: Path) -> None:
    model = transformers.Qwen2ForCausalLM(transformers.AutoConfig.from_pretrained(base / "apart"))
    model.resize_token_embeddings(29, mean_resizing=False)
    model.config.save_pretrained(tmp_path / "config")
    model.name_or_path = str(base / "apart")
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    expected = saved_by_peft(wrapped, tmp_path / "peft")
    checkpoint = save(wrapped.state_dict(), tmp_path / "saved")
    shutil.copy(expected / "adapter_config.json", checkpoint)
    consolidate(checkpoint, tmp_path / "made", config=tmp_path / "config")
    made = load_file(tmp_path / "made" / "adapter" / "adapter_model.safetensors")
    assert_equal(made, load_file(expected / "adapter_model.safetensors"))
    assert "base_model.model.lm_head.weight" in made


def test_a_missing_configuration_says_how_to_make_one(base: Path, tmp_path: Path) -> None:
    model = trained(base / "apart")
    checkpoint = save(get_peft_model_state_dict(model), tmp_path / "checkpoint-5" / "pytorch_model_fsdp_0")
    with pytest.raises(CheckpointError, match=rf"LoraConfig\(.*\).save_pretrained\('{checkpoint.parent}'\)"):
        consolidate(checkpoint.parent, tmp_path / "made")
    LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"]).save_pretrained(str(checkpoint.parent))
    consolidate(checkpoint.parent, tmp_path / "made")
    expected = saved_by_peft(model, tmp_path / "peft") / "adapter_model.safetensors"
    assert_equal(load_file(tmp_path / "made" / "adapter_model.safetensors"), load_file(expected))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_a_packed_base_is_left_out_by_name(dtype: torch.dtype, base: Path, tmp_path: Path) -> None:
    model = trained(base / "apart")
    expected = saved_by_peft(model, tmp_path / "peft")
    state = {
        name: torch.zeros(tensor.numel() // 2 // dtype.itemsize, 1, dtype=dtype)
        if name.endswith("proj.base_layer.weight") or "mlp" in name
        else tensor
        for name, tensor in model.state_dict().items()
    }
    checkpoint = save(state, tmp_path / "saved")
    shutil.copy(expected / "adapter_config.json", checkpoint)
    report, made = consolidate(checkpoint, tmp_path / "made", config=base / "apart"), tmp_path / "made"
    assert sorted(report.left_out) == sorted(model.unload().state_dict())
    assert not (made / "model.safetensors").exists()
    assert_equal(load_file(made / "adapter_model.safetensors"), load_file(expected / "adapter_model.safetensors"))
