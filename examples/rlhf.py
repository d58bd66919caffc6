"""Four models as RLHF has them, under three DeepSpeed configurations, in one process per rank.

torchrun --nproc-per-node 2 examples/rlhf.py [--model FOLDER] [--steps 5]

Actor and critic are trained under ZeRO-3, each by an engine of its own. The reference only runs: ZeRO-3 with its
partitions in host memory. The reward model is whole on every rank. Each `load_model` follows the configuration that it
is given and leaves nothing behind, so that order and mixture do not matter.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lowmem_load import get_load_report, load_model
from lowmem_load.llamafactory import DistributedInterface

PROMPT_LENGTH, RESPONSE_LENGTH, BATCH_SIZE = 8, 8, 4
KL_WEIGHT = 0.05

COMMON = {"train_micro_batch_size_per_gpu": BATCH_SIZE, "gradient_clipping": 1.0}
# torch_adam: DeepSpeed would have to compile its own Adam.
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
TRAINED = {**COMMON, "zero_optimization": {"stage": 3}, "optimizer": OPTIMIZER}
REFERENCE = {**COMMON, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": False}}}
REWARD = {**COMMON, "zero_optimization": {"stage": 0}}


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log probability of each response token, (batch, response length), from logits over all tokens."""
    predicted = logits[:, PROMPT_LENGTH - 1 : -1].float().log_softmax(-1)
    return predicted.gather(-1, tokens[:, PROMPT_LENGTH:, None]).squeeze(-1)


def train(path: str, steps: int) -> dict[str, list[float]]:
    """Load the four models and train two; return the losses of each step on this rank."""
    ranks = DistributedInterface()
    actor = load_model(path, TRAINED)
    critic = load_model(path, TRAINED, auto_class="AutoModelForTokenClassification", num_labels=1)
    reference = load_model(path, REFERENCE)
    reward = load_model(path, REWARD, auto_class="AutoModelForSequenceClassification", num_labels=1)
    if ranks.rank == 0:
        for name, model in {"actor": actor, "critic": critic, "reference": reference, "reward": reward}.items():
            print(f"{name}: {get_load_report(model)}")
    actor_engine, *_ = deepspeed.initialize(model=actor, config=TRAINED)
    critic_engine, *_ = deepspeed.initialize(model=critic, config=TRAINED)
    reference_engine, *_ = deepspeed.initialize(model=reference, config=REFERENCE)
    reward = reward.to(ranks.device).eval()
    reference_engine.eval()

    losses: dict[str, list[float]] = {"actor": [], "critic": []}
    generator = torch.Generator().manual_seed(ranks.rank)
    for step in range(steps):
        prompts = torch.randint(5, actor.config.vocab_size, (BATCH_SIZE, PROMPT_LENGTH), generator=generator)
        tokens = respond(actor_engine, prompts.to(ranks.device))
        with torch.no_grad():
            scores = reward(tokens).logits.squeeze(-1).float()
            usual = log_probabilities(reference_engine(tokens).logits, tokens)

        values = critic_engine(tokens).logits.squeeze(-1)[:, -1].float()
        critic_loss = torch.nn.functional.mse_loss(values, scores)
        critic_engine.backward(critic_loss)
        critic_engine.step()

        chosen = log_probabilities(actor_engine(tokens).logits, tokens)
        advantages = (scores - values.detach())[:, None]
        actor_loss = -(advantages * chosen).mean() + KL_WEIGHT * (chosen - usual).mean()
        actor_engine.backward(actor_loss)
        actor_engine.step()

        losses["actor"].append(actor_loss.item())
        losses["critic"].append(critic_loss.item())
        if ranks.rank == 0:
            print(f"step {step}: actor {actor_loss.item():.4f}, critic {critic_loss.item():.4f}", flush=True)
    return losses


def respond(engine: Any, prompts: torch.Tensor) -> torch.Tensor:
    """Return the prompts with the actor's responses, (batch, prompt + response length)."""
    engine.eval()
    with torch.no_grad():
        tokens: torch.Tensor = engine.module.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=RESPONSE_LENGTH,
            min_new_tokens=RESPONSE_LENGTH,
            do_sample=False,
        )
    engine.train()
    return tokens


def make_model(folder: Path) -> None:
    """Write a small random Llama."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=256,
        pad_token_id=0,
        dtype="float32",
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Command line; return the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="folder or Hub id of a causal model; a small random one is made if left out")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args(argv)
    ranks = DistributedInterface()
    with tempfile.TemporaryDirectory() as folder:
        with ranks.step("making the model") as making:
            making.payload = options.model or folder
            if options.model is None and ranks.rank == 0:
                make_model(Path(folder))
        path = making.payloads[0]
        losses = train(path, options.steps)
        ranks.barrier()
    ranks.destroy()
    return losses


if __name__ == "__main__":
    main()
