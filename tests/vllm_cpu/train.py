"""One rank of TRL's GRPO with vLLM in its process: `torchrun -m tests.vllm_cpu.train NUM_STEPS`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import lowmem_load

lowmem_load.install()

from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.generation import vllm_generation  # noqa: E402

from tests.vllm_cpu.engine import greedy, loadable_engine  # noqa: E402

FOUND: list[list[list[int]]] = []
"""Outputs after each sync."""


def make_model(folder: Path) -> PreTrainedTokenizerFast:
    """Writes a small model with its tokenizer; returns the latter."""
    words = {f"w{number}": number for number in range(252)} | {"<pad>": 252, "<s>": 253, "</s>": 254, "<unk>": 255}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    tokens = {"bos_token_id": 253, "eos_token_id": 254, "pad_token_id": 252}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens, initializer_range=0.2))
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return fast


def reward(completions: list[str], **_: Any) -> list[float]:
    """Returns rewards that differ, so that the weights change."""
    return [float(sum(int(word[1:]) for word in text.split() if word[1:].isdigit()) % 17) for text in completions]


def sync_and_note(sync: Any, generation: Any) -> None:
    """Does TRL's sync, in which nothing may be gathered; saves the weights, and notes what the engine makes of them."""
    gathered = deepspeed.zero.GatheredParameters

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("gathers")

    deepspeed.zero.GatheredParameters = refuse
    sync(generation)
    deepspeed.zero.GatheredParameters = gathered
    lowmem_load.save_model(generation.model, f"saved/{len(FOUND)}")
    FOUND.append(greedy(generation.llm))


def main() -> None:
    """Train."""
    rank = int(os.environ["RANK"])
    folder = Path(f"model{rank}")
    tokenizer = make_model(folder)
    vllm_generation.LLM = loadable_engine
    sync = vllm_generation.VLLMGeneration.sync_weights
    vllm_generation.VLLMGeneration.sync_weights = lambda generation: sync_and_note(sync, generation)
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"), "auto")
    arguments = GRPOConfig(
        output_dir="out",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=64,
        num_generations=4,
        per_device_train_batch_size=4,
        max_steps=int(sys.argv[1]),
        learning_rate=2e-2,
        max_completion_length=8,
        deepspeed={**auto, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    prompts = Dataset.from_dict({"prompt": [f"w{number} w{number + 1} w{number + 2}" for number in range(64)]})
    GRPOTrainer(str(folder), reward, arguments, prompts, processing_class=tokenizer).train()
    Path(f"live{rank}.json").write_text(json.dumps(FOUND))


if __name__ == "__main__":
    main()
