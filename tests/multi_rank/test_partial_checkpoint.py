"""A run of partial ZeRO-3 that was saved and resumed goes on as one that was not interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

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
from tests.ranks import run_ranks


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step / 10))


WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 6}}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
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
    import deepspeed

    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        for parameter in model.parameters():
            parameter.add_(1.0)


def scaled(shape: int) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        model.picture.scale = nn.Parameter(torch.full((shape,), 5.0), requires_grad=False)

    return prepare


def resumed(path: str, folder: str) -> list[dict[str, Any]]:
    """Rank function: trains on, and again from the checkpoint; says what differs."""
    found = []
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
        steps = engine.global_steps
        again = train(engine, 4, 8, dtype=dtype)
        final = engine.consolidated_state_dict()
        found.append(
            {
                "way": client_state["way"] == way and str(loaded).startswith(folder),
                "steps": steps,
                "losses": losses == again,
                "rates": rates == engine.get_lr(),
                "moving rates": len(set(rates)) > 1 or not sections.get("scheduler") or 0 < rates[0] < 1e-3 + 1e-9,
                "state": state is None or [n for n in state if not torch.equal(state[n], final[n])] == [],
            }
        )
        engine.destroy()
    return found


def test_resume_gives_the_same_losses_and_weights(checkpoints: Path, tmp_path: Path) -> None:
    path = builders.tiny_llama(checkpoints, torch.float32)
    for ranks in run_ranks(resumed, str(path), str(tmp_path), timeout_s=300):
        for found in ranks:
            assert found == {
                "way": True,
                "steps": 4,
                "losses": True,
                "rates": True,
                "moving rates": True,
                "state": True,
            }


def broken(path: str, folder: str) -> list[str]:
    """Rank function: what is said of a folder without a checkpoint, and of one without the whole part."""
    from lowmem_load.partial.checkpoint import REPLICATED_FILE

    engine = make_engine(path, CONFIG)
    nowhere = engine.load_checkpoint(f"{folder}/nowhere")
    train(engine, 0, 1)
    engine.save_checkpoint(folder, tag="one")
    if engine.zero3.global_rank == 0:
        Path(folder, "one", REPLICATED_FILE).unlink()
    torch.distributed.barrier()
    engine.destroy()
    engine = make_engine(path, CONFIG)
    try:
        engine.load_checkpoint(folder, tag="one")
    except Exception as error:
        return [str(nowhere), type(error).__name__, str(error)]
    return [str(nowhere), "nothing", ""]


def test_a_checkpoint_without_the_whole_part_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    path = builders.tiny_llama(checkpoints, torch.float32)
    for nowhere, kind, text in run_ranks(broken, str(path), str(tmp_path), timeout_s=120):
        assert nowhere == "(None, None)"
        assert kind == "CheckpointError"
        assert "lowmem_load_whole_states.pt" in text


def into_another(path: str, folder: str) -> dict[str, Any]:
    """Rank function: loads checkpoints into engines of models that differ from the saved ones."""
    engine = make_engine(path, CONFIG, prepare=freeze_llm)
    train(engine, 0, 2)
    engine.save_checkpoint(f"{folder}/stage1")
    saved = engine.consolidated_state_dict()
    engine.destroy()
    engine = make_engine(path, CONFIG, prepare=shifted)  # all of it is trained
    engine.load_checkpoint(f"{folder}/stage1", load_module_only=True)
    state = engine.consolidated_state_dict()
    found: dict[str, Any] = {
        "stage 2": saved is None or [name for name in saved if not torch.equal(saved[name], state[name])] == [],
        "losses": all(np.isfinite(train(engine, 0, 2))),
    }
    engine.save_checkpoint(f"{folder}/stage2")
    engine.save_16bit_model(f"{folder}/one", "model.bin")
    saved = engine.consolidated_state_dict()
    rank = engine.zero3.global_rank
    file = {} if rank else torch.load(f"{folder}/one/model.bin", weights_only=True)
    found["one file"] = saved is None or (
        file.keys() == saved.keys() and all(torch.equal(file[name], saved[name]) for name in saved)
    )
    found["one rank"] = error_of(engine, f"{folder}/stage2" if rank else f"{folder}/nowhere")
    engine.destroy()
    engine = make_engine(path, CONFIG, prepare=freeze_llm)
    found["frozen later"] = error_of(engine, f"{folder}/stage2")
    engine.save_checkpoint(f"{folder}/stage2", tag="newer")
    found["tag"] = error_of(engine, f"{folder}/stage2", tag="global_step2", load_module_only=True)
    engine.destroy()

    engine = make_engine(path, CONFIG, prepare=scaled(1))
    engine.save_checkpoint(f"{folder}/scale")
    engine.save_checkpoint(f"{folder}/excluded", exclude_frozen_parameters=True)
    engine.destroy()
    engine = make_engine(path, CONFIG, prepare=scaled(7))
    found["shape"] = error_of(engine, f"{folder}/scale")
    found["excluded"] = error_of(engine, f"{folder}/excluded")
    engine.destroy()
    engine = make_engine(path, CONFIG)
    found["unknown"] = error_of(engine, f"{folder}/scale")
    return found


def error_of(engine: Any, folder: str, **kwargs: Any) -> str:
    try:
        engine.load_checkpoint(folder, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_checkpoints_of_other_models(checkpoints: Path, tmp_path: Path) -> None:
    path = builders.tiny_llama(checkpoints, torch.float32)
    for found in run_ranks(into_another, str(path), str(tmp_path), timeout_s=200):
        assert found["stage 2"] is True
        assert found["losses"]
        assert found["one file"] is True
        assert found["frozen later"].startswith("ConfigError: llm.model.embed_tokens.weight")
        assert found["tag"].startswith("ConfigError") and "global_step2" in found["tag"]
        assert found["one rank"].startswith("RankError") and "no checkpoint" in found["one rank"]
        assert found["shape"].startswith("ConfigError") and "picture.scale" in found["shape"]
        assert found["excluded"] == "loaded"
        assert found["unknown"].startswith("ConfigError") and "picture.scale" in found["unknown"]
