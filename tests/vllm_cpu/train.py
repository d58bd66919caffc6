"""One rank of TRL's GRPO with vLLM in its process: `torchrun -m tests.vllm_cpu.train METHOD SHARDING NUM_STEPS`.

The method "full" trains all weights, "merged" a LoRA that TRL's sync merges, and "adapters" one that is sent alone. For
"changes", of all weights only changes are sent, in bf16, to engines that die now and then. "async full" and "async
merged" are AsyncGRPO, whose engine rank 0 has. The sharding is "zero3" or "fsdp2".
"""

import contextlib
import functools
import json
import os
import queue
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate.state
import deepspeed
import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import lowmem_load
from lowmem_load.errors import RankError
from tests.frameworks.stand_ins import fsdp_on_cpu

lowmem_load.install()

from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.experimental.async_grpo import (  # noqa: E402
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
)
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample  # noqa: E402
from trl.generation import vllm_generation  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402

from tests.vllm_cpu.engine import client_of, greedy, loadable_engine, model_of  # noqa: E402

FOUND: list[Any] = []
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
    assert engine.reset_prefix_cache()
    engine.generate = functools.partial(type(engine).generate, engine, lora_request=request())


def push_changes(clients: list[Any], generation: Any) -> None:
    """Push what changed. In the third sync rank 1's client dies in the middle first, and in the fourth it is new."""
    push = functools.partial(
        lowmem_load.push_weights, generation.model, changed_only=True, bucket_bytes=1 << 17, dtype=torch.bfloat16
    )
    number, rank = len(FOUND), generation.accelerator.process_index
    if number == 0 or (number == 3 and rank == 1):
        clients.append(client_of(generation.llm))
    client = clients[-1]
    if number == 2:
        client.buckets_to_live = 3 if rank == 1 else -1
        with contextlib.suppress(RankError):
            push(client=client)
            raise AssertionError("the push has not failed")
    client.kinds.clear()
    push(client=client)
    assert ("Change" in client.kinds) == (number in (1, 4)), (number, client.kinds)


def sync_and_note(sync: Any, how_to_save: dict[str, Any], owner: Any) -> None:
    """Do a sync, in which nothing may be gathered; save the weights, and note what the engine makes of them."""
    gathered, full_tensor = deepspeed.zero.GatheredParameters, DTensor.full_tensor

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("gathers")

    deepspeed.zero.GatheredParameters = DTensor.full_tensor = refuse
    began_s = time.monotonic()
    sync(owner)
    SECONDS.append(time.monotonic() - began_s)
    deepspeed.zero.GatheredParameters, DTensor.full_tensor = gathered, full_tensor
    model = owner.accelerator.unwrap_model(owner.model)
    lowmem_load.save_model(model, f"saved/{len(FOUND)}", **how_to_save)
    FOUND.append(greedy(owner.llm))


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    of_q: Any,
    of_k: Any,
    *_: Any,
    softmax_scale: float,
    **__: Any,
) -> torch.Tensor:
    """Stand for FlashAttention, which AsyncGRPO loads from the Hub for a GPU: causal, piece by piece."""
    out = torch.empty_like(query)
    for (first, last), (first_key, last_key) in zip(pairwise(of_q.tolist()), pairwise(of_k.tolist()), strict=True):
        shape = last - first, last_key - first_key
        mask = torch.ones(shape, dtype=torch.bool).tril(shape[1] - shape[0])
        q, k, v = (
            each.transpose(0, 1)[None]
            for each in (query[first:last], key[first_key:last_key], value[first_key:last_key])
        )
        found = scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale, enable_gqa=True)
        out[first:last] = found[0].transpose(0, 1)
    return out


class Rollouts:
    """AsyncGRPO's worker and its way to the engine, in this process. After each sync come the samples of one step."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.rollout_buffer, self.metrics_queue = engine, queue.Queue[Any](), queue.Queue[Any]()

    def send_weights(self, pairs: Any) -> None:
        """Have vLLM load them."""
        model_of(self.engine).load_weights(pairs)
        assert self.engine.reset_prefix_cache()

    def update_model_version(self, version: int) -> None:
        """Make two groups of four samples."""
        sampling = SamplingParams(max_tokens=8, logprobs=0, n=4, seed=self.rollout_buffer.qsize())
        prompts = [{"prompt_token_ids": [group, group + 1, group + 2]} for group in (2 * version, 2 * version + 1)]
        for group, found in enumerate(self.engine.generate(prompts, sampling, use_tqdm=False)):
            rewards = [float(sum(output.token_ids) % 17) for output in found.outputs]
            for output, mine in zip(found.outputs, rewards, strict=True):
                tokens, context = [*found.prompt_token_ids, *output.token_ids], len(found.prompt_token_ids)
                logs = [of[token].logprob for of, token in zip(output.logprobs, output.token_ids, strict=True)]
                self.rollout_buffer.put(
                    RolloutSample(
                        prompt=[],
                        completion=[],
                        input_ids=np.array(tokens),
                        completion_mask=np.array([0] * context + [1] * len(logs)),
                        old_log_probs=np.array([0.0] * context + logs, dtype=np.float32),
                        advantage=mine - sum(rewards) / len(rewards),
                        model_version=version,
                        group_id=2 * version + group,
                        metrics={},
                    )
                )

    def start(self) -> None:
        """Make more, since accelerate reads one batch ahead."""
        self.update_model_version(1)

    def nothing(self, *_: Any) -> None:
        """Stand for what needs nothing here."""

    init_weight_transfer = pause = resume = destroy = stop = check_health = nothing


def main() -> None:
    """Train."""
    rank, (method, sharding, num_steps) = int(os.environ["RANK"]), sys.argv[1:]
    folder, is_async, trained = Path(f"model{rank}"), method.startswith("async"), method.removeprefix("async ")
    is_lora = trained in ("merged", "adapters")
    tokenizer = make_model(folder, LARGE if is_lora and not is_async else SMALL)
    adapter = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if is_lora else None
    make_engine = functools.partial(loadable_engine, enable_lora=trained == "adapters")
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"), "auto")
    zero3 = {**auto, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    options: dict[str, Any] = {"deepspeed": zero3}
    if sharding == "fsdp2":
        fsdp_on_cpu(accelerate.state)
        wrap = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        options = {"fsdp": True, "fsdp_config": wrap}
    how_to_save = {"merge_adapters": trained == "merged", "dtype": torch.bfloat16 if trained == "changes" else None}
    options |= {
        "output_dir": "out",
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "max_steps": int(num_steps),
        "learning_rate": 1e-4 if trained == "changes" else 2e-2,
        "max_completion_length": 8,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
    }
    prompts = Dataset.from_dict({"prompt": [f"w{number} w{number + 1} w{number + 2}" for number in range(64)]})
    common = {"train_dataset": prompts, "processing_class": tokenizer, "peft_config": adapter}
    if is_async:
        packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
        async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # it asks CUDA
        arguments = AsyncGRPOConfig(token_budget=0, dtype="float32", **options)
        engine = make_engine(model=str(folder), distributed_executor_backend="external_launcher")
        AsyncGRPOTrainer.llm = engine
        AsyncGRPOTrainer._sync_weight = functools.partialmethod(
            functools.partial(sync_and_note, AsyncGRPOTrainer._sync_weight, how_to_save)
        )
        rollouts = Rollouts(engine)
        AsyncGRPOTrainer(
            str(folder), args=arguments, rollout_worker=rollouts, weight_transfer=rollouts, **common
        ).train()
    else:
        vllm_generation.LLM = make_engine
        syncs = {"adapters": hand_over, "changes": functools.partial(push_changes, [])}
        sync = syncs.get(trained, vllm_generation.VLLMGeneration.sync_weights)
        noted = functools.partialmethod(functools.partial(sync_and_note, sync, how_to_save))
        vllm_generation.VLLMGeneration.sync_weights = noted
        arguments = GRPOConfig(use_vllm=True, vllm_mode="colocate", vllm_max_model_length=128, **options)
        GRPOTrainer(str(folder), reward, arguments, **common).train()
    if rank == 0 or not is_async:
        Path(f"live{rank}.json").write_text(json.dumps({"outputs": FOUND, "seconds": SECONDS}))


if __name__ == "__main__":
    main()
