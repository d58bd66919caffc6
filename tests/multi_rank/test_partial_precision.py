"""Partial ZeRO-3 in bf16 and fp16: master weights, one loss scale, and steps that both parts skip."""

from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from lowmem_load.distributed.process_group import DistributedInterface
from tests import builders
from tests.multi_rank.test_partial_training import CONFIG, make_engine, train
from tests.multimodal import batch_of, reference
from tests.ranks import run_ranks
from tests.steps import payloads

STEPS = 20
SCALE = 2.0**10
SECTIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {"bf16": {"enabled": True}},
    "float16": {"fp16": {"enabled": True, "initial_scale_power": 10, "hysteresis": 1, "loss_scale_window": 1000}},
}


def allow_fp16() -> None:
    """DeepSpeed refuses fp16 on most CPUs for its speed; torch computes in it all the same."""
    get_accelerator().is_fp16_supported = lambda: True


def train_in_low_precision(path: str) -> None:
    allow_fp16()
    expected = reference(path, 2, STEPS)
    for name in SECTIONS:
        compare_with_float32(path, name, *expected)
    overflow(path)


def compare_with_float32(path: str, name: str, expected: dict[str, torch.Tensor], expected_losses: list[float]) -> None:
    """Low precision ends near float32, as a share of how far training went."""
    dtype = getattr(torch, name)
    engine = make_engine(path, {**CONFIG, **SECTIONS[name]}, dtype=dtype)
    before = engine.consolidated_state_dict()
    losses = train(engine, 0, STEPS, dtype=dtype)
    after = engine.consolidated_state_dict()
    assert {p.dtype for g in engine._replicated.optimizer.param_groups for p in g["params"]} == {torch.float32}
    assert engine.skipped_steps == 0
    assert engine.zero3.optimizer.loss_scale == (SCALE if name == "float16" else 1.0)
    engine.destroy()
    all_losses = payloads(DistributedInterface(), losses)
    mean = [sum(values) / 2 for values in zip(*all_losses, strict=True)]
    assert max(abs(a - b) for a, b in zip(mean, expected_losses, strict=True)) < 0.05
    if DistributedInterface().rank > 0:
        return
    assert {value.dtype for value in after.values()} == {dtype}
    for part in ("picture", "sound", "llm"):
        names = [n for n in expected if n.startswith(part)]
        off = torch.cat([(after[n].float() - expected[n]).reshape(-1) for n in names]).norm()
        moved = torch.cat([(after[n].float() - before[n].float()).reshape(-1) for n in names]).norm()
        assert off / moved < 0.35, part


def overflow(path: str) -> None:
    """Takes steps in which gradients overflow on one rank: in the whole part alone, then in both."""
    engine = make_engine(path, {**CONFIG, **SECTIONS["float16"]}, dtype=torch.float16, schedule=constant)
    rank = DistributedInterface().rank
    train(engine, 0, 2, dtype=torch.float16)
    for skipped, kind in enumerate(("none", "whole part", "both")):
        before = state_of(engine)
        scale, epoch = engine.zero3.optimizer.loss_scale, engine.lr_scheduler.last_epoch
        batch = {**batch_of(2, 0, 2, torch.float16), "kind": "sound", "features": torch.ones(1, 2, 5).half()}
        batch["input_ids"] = batch["input_ids"][:1]
        weight = engine.module.sound.project.weight
        bad = weight.register_hook(lambda grad: grad * float("inf")) if kind == "whole part" and rank == 1 else None
        loss = engine(**batch)
        engine.backward(loss * 1e6 if kind == "both" and rank == 1 else loss)
        engine.step()
        if bad:
            bad.remove()
        after = state_of(engine)
        changed = {n.split(".")[0] for n in after if not torch.equal(after[n], before[n])}
        if kind == "none":
            assert {"llm", "sound"} <= changed
        else:
            assert changed == set(), kind
            assert all(bool(value.isfinite().all()) for value in after.values()), kind
        assert engine.optimizer.overflow is (kind != "none"), kind
        assert engine.zero3.optimizer.loss_scale / scale == (1 if kind == "none" else 0.5), kind
        assert engine.lr_scheduler.last_epoch - epoch == (kind == "none"), kind
        assert engine.skipped_steps == skipped, kind


def constant(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """Returns this rank's share of all that a step changes."""
    partitions = {
        f"llm.{number}": p.detach().clone()
        for number, p in enumerate(engine.zero3.optimizer.fp32_partitioned_groups_flat)
    }
    whole = {name: p.detach().clone() for name, p in engine._replicated.masters.items()}
    return {**partitions, **whole}


def test_low_precision_follows_float32_and_an_overflow_in_either_part_skips_both(checkpoints: Path) -> None:
    run_ranks(train_in_low_precision, str(builders.tiny_llama(checkpoints, torch.float32)), timeout_s=240)
