"""Trains a loaded model for a few steps: equal losses show that the load is complete."""

from __future__ import annotations

from typing import Any

import torch

SEQUENCE_LENGTH = 32
BATCH_SIZE = 2


def training_losses(model: Any, ds_config: dict[str, Any], num_steps: int, rank: int) -> list[float]:
    """Train `num_steps` steps of ZeRO-3 AdamW on synthetic batches and return this rank's losses.

    Collective: all ranks call it; each sees its own batches, the same ones for every method.
    """
    import deepspeed

    # torch_adam: DeepSpeed's own Adam would be compiled first. Offloaded states need that one.
    offloaded = "offload_optimizer" in ds_config["zero_optimization"]
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4} if offloaded else {"lr": 1e-4, "torch_adam": True}}
    config = {**ds_config, "train_micro_batch_size_per_gpu": BATCH_SIZE, "optimizer": optimizer}
    torch.manual_seed(0)
    model.train()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    generator = torch.Generator().manual_seed(1000 + rank)
    losses = []
    for _ in range(num_steps):
        shape = (BATCH_SIZE, SEQUENCE_LENGTH)
        tokens = torch.randint(0, model.config.vocab_size, shape, generator=generator).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
