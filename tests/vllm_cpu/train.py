"""One rank of TRL's GRPO with vLLM in its process: `torchrun -m tests.vllm_cpu.train METHOD NUM_STEPS`.

The method "full" trains all weights, "merged" a LoRA that TRL's sync merges, "adapters" one that is sent alone.
"""

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import lowmem_load

lowmem_load.install()

from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.generation import vllm_generation  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402

from tests.vllm_cpu.engine import greedy, loadable_engine  # noqa: E402

FOUND: list[list[list[int]]] = []
"""Outputs after each sync."""
SECONDS: list[float] = []

SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4}
"""180 MB, of which a LoRA is less than 1 %."""


def make_model(folder: Path, sizes: dict[str, int]) -> PreTrainedTokenizerFast:
    """Writes a small model with its tokenizer; returns the latter."""
    words = {f"w{number}": number for number in range(252)} | {"<pad>": 252, "<s>": 253, "</s>": 254, "<unk>": 255}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    tokens = {"bos_token_id": 253, "eos_token_id": 254, "pad_token_id": 252}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, **heads, **tokens, initializer_range=0.2))
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return fast


def reward(completions: list[str], **_: Any) -> list[float]:
    """Returns rewards that differ, so that the weights change."""
    return [float(sum(int(word[1:]) for word in text.split() if word[1:].isdigit()) % 17) for text in completions]


def hand_over(generation: Any) -> None:
    """Do what a script does in place of TRL's sync, which knows no adapters."""
    engine, folder = generation.llm, os.path.abspath("adapter")
    lowmem_load.save_model(generation.model, folder)
    request = functools.partial(LoRARequest, lora_name="default", lora_int_id=1, lora_path=folder)
    assert engine.llm_engine.add_lora(request(load_inplace=True))
    engine.generate = functools.partial(type(engine).generate, engine, lora_request=request())


def sync_and_note(sync: Any, is_merged: bool, generation: Any) -> None:
    """Do a sync, in which nothing may be gathered; save the weights, and note what the engine makes of them."""
    gathered = deepspeed.zero.GatheredParameters

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("gathers")

    deepspeed.zero.GatheredParameters = refuse
    began_s = time.monotonic()
    sync(generation)
    SECONDS.append(time.monotonic() - began_s)
    deepspeed.zero.GatheredParameters = gathered
    lowmem_load.save_model(generation.model, f"saved/{len(FOUND)}", merge_adapters=is_merged)
    FOUND.append(greedy(generation.llm))


def main() -> None:
    """Train."""
    rank, method = int(os.environ["RANK"]), sys.argv[1]
    folder = Path(f"model{rank}")
    tokenizer = make_model(folder, SMALL if method == "full" else LARGE)
    adapter = None if method == "full" else LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    vllm_generation.LLM = functools.partial(loadable_engine, enable_lora=method == "adapters")
    sync = hand_over if method == "adapters" else vllm_generation.VLLMGeneration.sync_weights
    noted = functools.partialmethod(functools.partial(sync_and_note, sync, method == "merged"))
    vllm_generation.VLLMGeneration.sync_weights = noted
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"), "auto")
    arguments = GRPOConfig(
        output_dir="out",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=64,
        num_generations=4,
        per_device_train_batch_size=4,
        max_steps=int(sys.argv[2]),
        learning_rate=2e-2,
        max_completion_length=8,
        deepspeed={**auto, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    prompts = Dataset.from_dict({"prompt": [f"w{number} w{number + 1} w{number + 2}" for number in range(64)]})
    GRPOTrainer(str(folder), reward, arguments, prompts, processing_class=tokenizer, peft_config=adapter).train()
    Path(f"live{rank}.json").write_text(json.dumps({"outputs": FOUND, "seconds": SECONDS}))


if __name__ == "__main__":
    main()
