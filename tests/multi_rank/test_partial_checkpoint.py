"""A run of partial ZeRO-3 that was saved and resumed goes on as one that was not interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

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

WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 6}}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
    "bf16, a user's optimizer and scheduler": (
        {"bf16": {"enabled": True}},
        {"groups": two_rates, "schedule": halving, "dtype": torch.bfloat16},
    ),
    "the ds_config's scheduler, a frozen encoder": ({"scheduler": WARMUP}, {"prepare": freeze_encoder}),
    "a frozen language model": ({"scheduler": WARMUP}, {"prepare": freeze_llm}),
}


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
    from lowmem_load.partial_checkpoint import WHOLE_FILE

    engine = make_engine(path, CONFIG)
    nowhere = engine.load_checkpoint(f"{folder}/nowhere")
    train(engine, 0, 1)
    engine.save_checkpoint(folder, tag="one")
    if engine.zero3.global_rank == 0:
        Path(folder, "one", WHOLE_FILE).unlink()
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
