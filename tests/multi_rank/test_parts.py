"""A module whose parts have a checkpoint each: two transformers models and a projector, sharded, and trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, CLIPVisionConfig, CLIPVisionModel

from lowmem_load import CheckpointError, ConfigError, UnsupportedError, initialize_partial, load_into
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.engines.parameters import is_partitioned
from tests import builders
from tests.model_digest import differing
from tests.multi_rank.test_load_into import shard_fully
from tests.multi_rank.test_own_modules import Z3
from tests.ranks import run_ranks

LR = 1e-3
CONFIG: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": LR, "torch_adam": True}},
}


class Seeing(nn.Module):
    """Patches of a picture come before the words."""

    def __init__(self, vision: nn.Module, llm: nn.Module) -> None:
        super().__init__()
        self.vision, self.llm = vision, llm
        self.projector = nn.Linear(vision.config.hidden_size, llm.config.hidden_size)

    def forward(self, pixels: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        seen = self.projector(self.vision(pixel_values=pixels).last_hidden_state)
        embeds = torch.cat([seen, self.llm.get_input_embeddings()(input_ids)], dim=1)
        labels = torch.cat([torch.full(seen.shape[:2], -100), input_ids], dim=1)
        return self.llm(inputs_embeds=embeds, labels=labels).loss


def loaded_by_default(paths: dict[str, str]) -> nn.Module:
    model = Seeing(
        CLIPVisionModel.from_pretrained(paths["vision"]),
        AutoModelForCausalLM.from_pretrained(paths["llm"], dtype=torch.float32),
    )
    torch.manual_seed(0)
    model.projector.reset_parameters()
    return model


def built(paths: dict[str, str]) -> nn.Module:
    llm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(paths["llm"]), dtype=torch.float32)
    return Seeing(CLIPVisionModel(CLIPVisionConfig.from_pretrained(paths["vision"])), llm)


def on_meta(paths: dict[str, str]) -> nn.Module:
    with torch.device("meta"):
        model = built(paths)
    model.vision.requires_grad_(False)
    return model


def sharded(paths: dict[str, str]) -> nn.Module:
    model = on_meta(paths)
    shard_fully(model)
    model.to_empty(device="cpu")
    return model


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, 3, 8, 8, generator=generator), torch.randint(3, 99, (2, 5), generator=generator)


def fill(paths: dict[str, str], folder: str) -> None:
    rank = DistributedInterface().rank
    expected = loaded_by_default(paths)
    checkpoints = {**paths, "projector": f"{folder}/projector.safetensors"}
    for make, how in ((sharded, {}), (on_meta, {"ds_config": Z3})):
        model = make(paths)
        with pytest.raises(UnsupportedError, match="has 2 transformers models; call load_into for each of them"):
            load_into(model, paths["llm"], **how)
        reports = [load_into(model.get_submodule(name), path, **how) for name, path in checkpoints.items()]
        assert not differing(model, expected)
        assert not any(parameter.requires_grad for parameter in model.vision.parameters())
        read_bytes = sum(report.read_bytes for report in reports)
        assert read_bytes < 0.6 * sum(parameter.nbytes for parameter in expected.parameters())
        model = make(paths)
        model.vision.extra = nn.Linear(2, 2, device="meta" if how else "cpu")
        with pytest.raises(CheckpointError, match=r"extra\.weight.* Build (that|the model) from"):
            load_into(model.vision, paths["vision"], **how)

    # ZeRO-3 on the language model alone, and the rest whole on each rank.
    model = on_meta(paths)
    load_into(model.llm, checkpoints["llm"], CONFIG)
    for part in (model.vision, model.projector):
        part.to_empty(device="cpu")
    load_into(model.vision, checkpoints["vision"])
    load_into(model.projector, checkpoints["projector"])
    assert {name.split(".")[0] for name, p in model.named_parameters() if is_partitioned(p)} == {"llm"}
    assert not differing(model, expected)
    engine = initialize_partial(model.train(), CONFIG)
    expected.vision.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in expected.parameters() if p.requires_grad], lr=LR)
    for step in range(3):
        loss = engine(*batch(step, rank))
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        losses = [expected(*batch(step, other)) for other in range(2)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        assert abs(loss.item() - losses[rank].item()) < 1e-5, step
    dist.barrier()


def fill_transformers(path: str) -> None:
    """Rank function: a transformers model into ZeRO-3 partitions, alone and inside of a module."""
    DistributedInterface()
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        wrapper = nn.Module()
        wrapper.policy, wrapper.value = AutoModelForCausalLM.from_config(config, dtype=torch.float32), nn.Linear(32, 1)
    load_into(model, path, Z3)
    assert not differing(model, expected)
    with pytest.raises(ConfigError, match=r"not .* next to it"):
        load_into(wrapper, path, Z3)
    load_into(wrapper, path, Z3, skip=["value.weight", "value.bias"])
    assert not differing(wrapper.policy, expected)

    class Own(type(model)):  # type: ignore[misc]
        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            return super().from_pretrained(*args, **kwargs)

    with torch.device("meta"):
        model = Own._from_config(config, dtype=torch.float32)
    load_into(model, path, Z3)
    assert not differing(model, expected)


def write(folder: Path, checkpoints: Path) -> dict[str, str]:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "image_size": 8, "patch_size": 4}
    CLIPVisionModel(CLIPVisionConfig(num_hidden_layers=2, **sizes)).save_pretrained(folder / "vision")
    llm = builders.tiny_llama(checkpoints, torch.float32)
    torch.manual_seed(0)
    save_file(nn.Linear(32, 32).state_dict(), folder / "projector.safetensors")
    return {"llm": str(llm), "vision": str(folder / "vision")}


def test_a_module_of_two_models_equals_the_default_load_and_trains_as_one_process(
    tmp_path: Path, checkpoints: Path
) -> None:
    run_ranks(fill, write(tmp_path, checkpoints), str(tmp_path), timeout_s=240)


@pytest.mark.parametrize("build", [builders.tiny_mixtral, builders.tiny_qwen2_tied])
def test_transformers_models_take_a_ds_config(build: Any, checkpoints: Path) -> None:
    run_ranks(fill_transformers, str(build(checkpoints)), timeout_s=120)
