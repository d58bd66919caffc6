"""ZeRO-3 on part of a model: one language model, a picture and an audio encoder, ranks that run different ones.

    torchrun --nproc-per-node 2 examples/partial_zero3.py

Makes three small random checkpoints, loads the language model into ZeRO-3 partitions and the encoders whole, and trains
them on pictures and sounds of ten classes whose captions name the class. In every step each rank draws a kind of
sample: pictures here, sounds there, on some ranks text alone. Prints what each rank holds, and how the loss falls.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    ASTConfig,
    ASTModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from lowmem_load import get_load_report, initialize_partial, load_model
from lowmem_load.llamafactory import DistributedInterface

MIB = float(1 << 20)
NUM_CLASSES, NUM_MELS, NUM_FRAMES, IMAGE_SIZE, VOCABULARY = 10, 16, 32, 32, 4000
KINDS = ("picture", "sound", "text")


def make_checkpoints(folder: Path, hidden_size: int, num_layers: int) -> None:
    """Write the three checkpoints that a real job would have."""
    torch.manual_seed(0)
    small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    llm = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3 // 32 * 32,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
    )
    LlamaForCausalLM(llm).save_pretrained(folder / "llm")
    picture = CLIPVisionConfig(**small, image_size=IMAGE_SIZE, patch_size=8)
    CLIPVisionModel(picture).save_pretrained(folder / "picture")
    sound = ASTConfig(**small, max_length=NUM_FRAMES, num_mel_bins=NUM_MELS, patch_size=8, time_stride=8)
    ASTModel(sound).save_pretrained(folder / "sound")


class Model(nn.Module):
    """Puts the projected features of an encoder before the text. The batch says which encoder runs."""

    def __init__(self, llm: nn.Module, picture: nn.Module, sound: nn.Module) -> None:
        super().__init__()
        self.llm, self.picture, self.sound = llm, picture, sound
        width = llm.config.hidden_size
        self.projectors = nn.ModuleDict(
            {
                "picture": nn.Linear(picture.config.hidden_size, width),
                "sound": nn.Linear(sound.config.hidden_size, width),
            }
        )

    def forward(self, kind: str, samples: torch.Tensor | None, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        embeds, labels = self.llm.get_input_embeddings()(input_ids), input_ids
        if samples is not None:
            features = getattr(self, kind)(samples).last_hidden_state
            prefix = self.projectors[kind](features).to(embeds.dtype)
            embeds = torch.cat([prefix, embeds], dim=1)
            labels = torch.cat([labels.new_full(prefix.shape[:2], -100), labels], dim=1)
        return self.llm(inputs_embeds=embeds, labels=labels).loss


def draw_batch(generator: torch.Generator) -> dict[str, Any]:
    """Return a batch of one kind; its size differs from rank to rank and step to step."""
    kind = KINDS[int(torch.randint(3, (), generator=generator))]
    size = int(torch.randint(3, 7, (), generator=generator))
    classes = torch.randint(NUM_CLASSES, (size,), generator=generator)
    shape = {"picture": (3, IMAGE_SIZE, IMAGE_SIZE), "sound": (NUM_FRAMES, NUM_MELS)}.get(kind)
    samples = None
    if shape is not None:
        level = (classes.float() / NUM_CLASSES * 4 - 2).reshape(-1, *[1] * len(shape))
        samples = level + 0.1 * torch.randn(size, *shape, generator=generator)
    return {"kind": kind, "samples": samples, "input_ids": torch.stack([classes + 100, classes + 200], dim=1)}


def main() -> None:
    """Make, load, train, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--num-layers", type=int, default=6)
    arguments = parser.parse_args()
    ranks = DistributedInterface()
    ds_config = {
        "zero_optimization": {"stage": 3},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-4, "torch_adam": True}},
    }
    with ranks.step("making the checkpoints") as making:
        if ranks.rank == 0:
            making.payload = tempfile.mkdtemp(prefix="partial-zero3-")
            make_checkpoints(Path(making.payload), arguments.hidden_size, arguments.num_layers)
    folder = making.payloads[0]

    llm = load_model(f"{folder}/llm", ds_config)
    picture = load_model(f"{folder}/picture", ds_config, partition=())
    sound = load_model(f"{folder}/sound", ds_config, auto_class="ASTModel", partition=())
    torch.manual_seed(0)  # initialize_partial gives all ranks rank 0's projectors in any case
    model = Model(llm, picture, sound).train()
    engine = initialize_partial(model, ds_config)

    report = get_load_report(llm)
    whole = sum(get_load_report(encoder).whole_bytes for encoder in (picture, sound))
    line = (
        f"rank {ranks.rank}: language model {report.partition_bytes / MIB:.1f} MiB of "
        f"{report.partition_bytes * report.world_size / MIB:.1f}, encoders {whole / MIB:.1f} MiB whole"
    )
    with ranks.step("printing") as printing:
        printing.payload = line
    if ranks.rank == 0:
        print("\n".join(printing.payloads))

    generator = torch.Generator().manual_seed(ranks.rank)
    for step in range(arguments.steps):
        batch = draw_batch(generator)
        loss = engine(**batch)
        engine.backward(loss)
        engine.step()
        if step % 5 == 0 or step == arguments.steps - 1:
            with ranks.step("printing") as printing:
                printing.payload = f"{batch['kind']} {loss.item():.3f}"
            if ranks.rank == 0:
                norm = float(engine.get_global_grad_norm())
                print(f"step {step:3}: {', '.join(printing.payloads)}; gradient norm {norm:.3f}")
    engine.save_checkpoint(f"{folder}/trained")
    engine.destroy()
    resumed = initialize_partial(model, ds_config)
    resumed.load_checkpoint(f"{folder}/trained")
    if ranks.rank == 0:
        print(f"saved, and resumed after step {resumed.global_steps}")
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
