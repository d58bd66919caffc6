"""A run of partial ZeRO-3 that was saved and resumed goes on as one that was not interrupted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from torch import nn

from lowmem_load import consolidate, load_checkpoint, load_model
from lowmem_load.errors import CheckpointError, ConfigError, RankError, UnsupportedError
from lowmem_load.training_checkpoints.zero_checkpoint import REPLICATED_FILE
from tests import builders
from tests.multi_rank.test_partial_training import (
    CONFIG,
    freeze_encoder,
    freeze_llm,
    halving,
    make_engine,
    train,
    two_rates,
)
from tests.multimodal import Multimodal
from tests.ranks import run_ranks


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step / 10))


WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 6}}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16, a user's optimizer and scheduler": (
        {"bf16": {"enabled": True}},
        {"groups": two_rates, "schedule": halving, "dtype": torch.bfloat16},
    ),
    "the ds_config's scheduler, a frozen encoder": ({"scheduler": WARMUP}, {"prepare": freeze_encoder}),
    "a frozen language model": ({"scheduler": WARMUP}, {"prepare": freeze_llm}),
    "a scheduler that returns numpy's numbers": ({}, {"schedule": cosine}),
}


def shifted(model: nn.Module) -> None:
    """Makes all weights other ones than the checkpoint's."""
    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        for parameter in model.parameters():
            parameter.add_(1.0)


def scaled(shape: int) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        model.picture.scale = nn.Parameter(torch.full((shape,), 5.0), requires_grad=False)

    return prepare


def resume(path: str, folder: str) -> None:
    """Rank function: trains on, and again from the checkpoint: nothing may differ."""
    for number, (way, (sections, options)) in enumerate(WAYS.items()):
        config, dtype = {**CONFIG, **sections}, options.get("dtype", torch.float32)
        engine = make_engine(path, config, **options)
        train(engine, 0, 4, dtype=dtype)
        engine.save_checkpoint(f"{folder}/{number}", client_state={"way": way})
        losses = train(engine, 4, 8, dtype=dtype)
        rates, state = engine.get_lr(), engine.consolidated_state_dict()
        engine.destroy()
        engine = make_engine(path, config, **options)
        with torch.no_grad():  # nothing may be left of what the new engine began with
            for parameter in (*engine.module.picture.parameters(), *engine.module.sound.parameters()):
                parameter.add_(1.0)
        loaded, client_state = engine.load_checkpoint(f"{folder}/{number}")
        assert client_state["way"] == way
        assert str(loaded).startswith(folder), way
        assert engine.global_steps == 4, way
        assert train(engine, 4, 8, dtype=dtype) == losses, way
        assert engine.get_lr() == rates, way
        if sections.get("scheduler"):
            assert len(set(rates)) > 1 or 0 < rates[0] < 1e-3 + 1e-9, way
        assert_same_state(state, engine.consolidated_state_dict())
        engine.destroy()


def assert_same_state(expected: dict[str, torch.Tensor] | None, state: dict[str, torch.Tensor] | None) -> None:
    """Compares on the rank that has them, which is rank 0."""
    if expected is not None:
        assert state is not None
        assert [name for name in expected if not torch.equal(expected[name], state[name])] == []


def other_order(model: nn.Module) -> list[dict[str, Any]]:
    """The groups of `two_rates`, each with its parameters the other way round."""
    return [{**group, "params": group["params"][::-1]} for group in two_rates(model)]


def other_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The groups of `two_rates`, but one parameter of each part has moved."""
    encoders, no_decay, decay = two_rates(model)
    no_decay["params"] += [encoders["params"].pop(), decay["params"].pop()]
    return [encoders, no_decay, decay]


def resume_with_another_optimizer(path: str, folder: str) -> None:
    """Rank function: the order of parameters in the optimizer does not matter, their groups do."""
    engine = make_engine(path, CONFIG, groups=two_rates, schedule=halving)
    train(engine, 0, 3)
    engine.save_checkpoint(folder)
    losses = train(engine, 3, 6)
    engine.destroy()
    engine = make_engine(path, CONFIG, groups=other_order, schedule=halving)
    engine.load_checkpoint(folder)
    assert train(engine, 3, 6) == losses
    engine.destroy()
    engine = make_engine(path, CONFIG, groups=other_groups, schedule=halving)
    before = engine.consolidated_state_dict()
    with pytest.raises(ConfigError, match=r"is in group 1 of the optimizer, and was in group [02] when"):
        engine.load_checkpoint(folder)
    assert_same_state(before, engine.consolidated_state_dict())
    assert all(np.isfinite(train(engine, 0, 1)))
    engine.destroy()

    def refuse(_: Any) -> None:
        if engine.zero3.global_rank:
            raise OSError("of this rank alone")

    engine = make_engine(path, CONFIG, groups=two_rates, schedule=halving)
    engine.lr_scheduler.load_state_dict = refuse
    with pytest.raises(RankError, match=r"rank 1: OSError: of this rank alone"):
        engine.load_checkpoint(folder)
    with pytest.raises(ConfigError, match="was loaded into this engine halfway"):
        train(engine, 3, 4)
    del engine.lr_scheduler.load_state_dict
    engine.load_checkpoint(folder)
    assert train(engine, 3, 6) == losses


def load_broken(path: str, folder: str) -> None:
    """Rank function: what is said of a folder without a checkpoint, and of one without the whole part."""
    engine = make_engine(path, CONFIG)
    assert engine.load_checkpoint(f"{folder}/nowhere") == (None, {})
    with pytest.raises(CheckpointError, match="no checkpoint 'nowhere', which 'tag' names"):
        engine.load_checkpoint(folder, "nowhere")
    train(engine, 0, 1)
    engine.save_checkpoint(folder, tag="one")
    train(engine, 1, 2)
    engine.save_checkpoint(folder, tag="two")
    if engine.zero3.global_rank == 0:  # as if the second save had gone to "one", and been killed
        Path(folder, "two", REPLICATED_FILE).replace(Path(folder, "one", REPLICATED_FILE))
    torch.distributed.barrier()
    engine.destroy()
    engine = make_engine(path, CONFIG)
    with pytest.raises(CheckpointError, match=r"whole_states.pt: was saved at step 2, .*model_states.pt at 1"):
        load_checkpoint(engine, folder, tag="one")
    with pytest.raises(CheckpointError, match=r"was saved at step 2"):
        consolidate(folder, f"{folder}/made-{engine.zero3.global_rank}", tag="one")
    torch.distributed.barrier()
    if engine.zero3.global_rank == 0:
        Path(folder, "one", REPLICATED_FILE).unlink()
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=r"lowmem_load_whole_states\.pt") as caught:
        engine.load_checkpoint(folder, tag="one")
    assert caught.type is CheckpointError


def load_into_another(path: str, folder: str) -> None:
    """Rank function: loads checkpoints into engines of models that differ from the saved ones."""
    engine = make_engine(path, CONFIG, prepare=freeze_llm)
    train(engine, 0, 2)
    engine.save_checkpoint(f"{folder}/stage1")
    saved = engine.consolidated_state_dict()
    engine.destroy()
    engine = make_engine(path, CONFIG, prepare=shifted)  # all of it is trained
    engine.load_checkpoint(f"{folder}/stage1", load_module_only=True)
    assert_same_state(saved, engine.consolidated_state_dict())
    assert all(np.isfinite(train(engine, 0, 2)))
    engine.save_checkpoint(f"{folder}/stage2")
    with pytest.raises(UnsupportedError, match=r"call lowmem_load\.save_model"):
        engine.save_16bit_model(f"{folder}/one", "model.bin")
    saved = engine.consolidated_state_dict()
    rank = engine.zero3.global_rank
    with pytest.raises(RankError, match=r"has checkpoint global_step2, where .* have none"):
        engine.load_checkpoint(f"{folder}/stage2" if rank else f"{folder}/nowhere")
    engine.destroy()
    engine = make_engine(path, CONFIG, prepare=freeze_llm)
    with pytest.raises(ConfigError, match=r"trains other parameters: picture\.patches\.bias"):
        engine.load_checkpoint(f"{folder}/stage2")
    engine.load_checkpoint(f"{folder}/stage2", load_module_only=True)
    assert_same_state(saved, engine.consolidated_state_dict())
    engine.destroy()
    full: Any = deepspeed.initialize(model=Multimodal(load_model(path, CONFIG)), config=CONFIG)[0]
    with pytest.raises(UnsupportedError, match=r"picture\..*: partial ZeRO-3 has saved them in full"):
        load_checkpoint(full, f"{folder}/stage2", load_optimizer_states=False)
    full.destroy()

    engine = make_engine(path, CONFIG, prepare=scaled(1))
    engine.save_checkpoint(f"{folder}/scale")
    engine.save_checkpoint(f"{folder}/excluded", exclude_frozen_parameters=True)
    engine.destroy()
    engine = make_engine(path, CONFIG, prepare=scaled(7))
    with pytest.raises(ConfigError, match=r"picture\.scale"):
        engine.load_checkpoint(f"{folder}/scale")
    engine.load_checkpoint(f"{folder}/excluded")
    engine.destroy()
    engine = make_engine(path, CONFIG)
    with pytest.raises(ConfigError, match=r"picture\.scale"):
        engine.load_checkpoint(f"{folder}/scale")


@pytest.mark.parametrize("check", [resume, resume_with_another_optimizer, load_broken, load_into_another])
def test_checkpoints(check: Callable[[str, str], None], checkpoints: Path, tmp_path: Path) -> None:
    run_ranks(check, str(builders.tiny_llama(checkpoints, torch.float32)), str(tmp_path), timeout_s=300)
