"""A language model behind encoders of pictures and sounds, batches in which ranks use different ones, and a reference.

The reference trains in one process on the batches of all ranks: the mean of their losses, torch's AdamW and clipping.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

KINDS = ("picture", "sound", "text")
HIDDEN, VOCABULARY, CLIP, LR = 32, 128, 0.5, 1e-3
SEED = 7


class PictureEncoder(nn.Module):
    """(batch, 3, 8, 8) -> (batch, 4, HIDDEN)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.project = nn.Linear(16, HIDDEN)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.project(torch.tanh(self.patches(pixels)).flatten(2).transpose(1, 2))


class SoundEncoder(nn.Module):
    """(batch, time, 5) -> (batch, time, HIDDEN)."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(5, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU())
        self.project = nn.Linear(24, HIDDEN)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        return self.project(self.mix(frames))


class Multimodal(nn.Module):
    """Which encoder runs depends on the batch."""

    def __init__(self, llm: nn.Module) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            self.picture = PictureEncoder()
            self.sound = SoundEncoder()
        self.llm = llm
        self.enter_below = False

    def forward(self, kind: str, features: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        device = next(self.parameters()).device
        features, input_ids = features.to(device), input_ids.to(device)
        embeds, labels = self.llm.get_input_embeddings()(input_ids), input_ids
        if kind != "text":
            prefix = getattr(self, kind)(features).to(embeds.dtype)
            embeds = torch.cat([prefix, embeds], dim=1)
            labels = torch.cat([torch.full(prefix.shape[:2], -100, device=device), input_ids], dim=1)
        if self.enter_below:  # as models do that run a backbone and a head by themselves
            logits = self.llm.lm_head(self.llm.model(inputs_embeds=embeds).last_hidden_state)
            return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return self.llm(inputs_embeds=embeds, labels=labels).loss


def kinds_of(step: int, world_size: int) -> list[str]:
    """Returns which kind each rank has: another assignment in each step, in some of them one kind on all ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [KINDS[number] for number in torch.randint(0, 3, (world_size,), generator=generator).tolist()]


def batch_of(step: int, rank: int, world_size: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Returns a batch, whose size and lengths differ from rank to rank and step to step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    kind = kinds_of(step, world_size)[rank]
    size, length, time = (int(torch.randint(low, 6, (), generator=generator)) for low in (1, 3, 2))
    shape = {"picture": (size, 3, 8, 8), "sound": (size, time, 5), "text": (0,)}[kind]
    return {
        "kind": kind,
        "features": torch.randn(shape, generator=generator).to(dtype),
        "input_ids": torch.randint(3, VOCABULARY, (size, length), generator=generator),
    }


def reference(
    path: str,
    world_size: int,
    steps: int,
    *,
    accumulate: int = 1,
    prepare: Callable[[nn.Module], Any] = lambda model: None,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Returns parameters and the mean loss of each step of training in one process."""
    from transformers import AutoModelForCausalLM

    model = Multimodal(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)).train()
    prepare(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(groups(model) if groups else trained, lr=LR)
    scheduler = schedule(optimizer) if schedule else None
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        mean = 0.0
        for micro in range(accumulate):
            for rank in range(world_size):
                batch = batch_of(step * accumulate + micro, rank, world_size)
                loss = model(**batch) / (world_size * accumulate)
                if loss.requires_grad:
                    loss.backward()
                mean += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(mean)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, losses
