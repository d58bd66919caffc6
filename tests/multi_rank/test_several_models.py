"""Several models in one process, models on some of the ranks, and what is done to a model between load and training."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import set_z3_leaf_modules
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from lowmem_load import get_load_report, load_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.errors import ConfigError
from tests import builders
from tests.parity import ADAM, BF16, FP32, differences, losses_of_engine, train
from tests.ranks import run_ranks

CONFIGS: dict[str, dict[str, Any]] = {
    "actor": {**BF16, **ADAM},
    "critic": {
        **FP32,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": False}},
        **ADAM,
    },
    "lower": {**FP32, "zero_optimization": {"stage": 1}, **ADAM},
}


def train_apart(path: str, names: list[str]) -> dict[str, list[float]]:
    """Rank function: one model after the other."""
    return {name: train_together(path, [name])[name] for name in names}


def train_together(path: str, names: list[str]) -> dict[str, list[float]]:
    """Rank function: loads all models, makes all engines, then takes steps in turns."""
    engines = {}
    models = {name: load_model(path, CONFIGS[name]) for name in names}
    for name, model in models.items():
        torch.manual_seed(0)
        engines[name], *_ = deepspeed.initialize(model=model.train(), config=CONFIGS[name])
    losses: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(4):
        for name, engine in engines.items():
            losses[name] += train(engine, 1)
    return losses


def test_engines_of_several_models_train_as_each_would_alone(checkpoints: Path) -> None:
    path = str(builders.tiny_llama(checkpoints))
    names = list(CONFIGS)
    together = run_ranks(train_together, path, names, world_size=2)
    assert together == run_ranks(train_apart, path, names, world_size=2)
    assert all(len(set(losses)) == 4 for of_rank in together for losses in of_rank.values())


def groups(group: Any, alone: Any) -> SimpleNamespace:
    """What deepspeed.initialize asks for the ranks that train together."""
    return SimpleNamespace(
        get_data_parallel_group=lambda: group,
        get_data_parallel_world_size=lambda: dist.get_world_size(group),
        get_data_parallel_rank=lambda: dist.get_rank(group),
        get_model_parallel_group=lambda: alone,
        get_model_parallel_world_size=lambda: 1,
        get_model_parallel_rank=lambda: 0,
    )


def load_on_halves(llama: str, mixtral: str) -> list[float]:
    """Rank function for four ranks: each half loads a model of its own, and trains one; returns the losses.

    What they train has to be the same: DeepSpeed compares the order of modules over all ranks of the world.
    """
    world = DistributedInterface()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([rank]) for rank in range(4)][world.rank]
    half = halves[world.rank // 2]
    config = {**BF16, "train_batch_size": "auto", **ADAM}
    # Both models on each half, in another order: DeepSpeed compares the numbers of parameters across all ranks.
    for path in ((llama, mixtral), (mixtral, llama))[world.rank // 2]:
        model = load_model(path, config, data_parallel_group=half)
        report = get_load_report(model)
        assert (report.rank, report.world_size, report.ds_config["train_batch_size"]) == (world.rank % 2, 2, 2)
        assert differences(model, AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16), half) == []
    with pytest.raises(ConfigError, match=f"rank {world.rank} is not in it"):
        load_model(path, config, data_parallel_group=halves[1 - world.rank // 2])
    model = load_model(llama, config, data_parallel_group=half).train()
    engine, *_ = deepspeed.initialize(model=model, config=dict(report.ds_config), mpu=groups(half, alone))
    return train(engine, 3)


def losses_alone(path: str) -> list[float]:
    return losses_of_engine(load_model(path, BF16), BF16)


def test_models_on_a_part_of_the_ranks(checkpoints: Path) -> None:
    paths = [str(builders.tiny_llama(checkpoints)), str(builders.tiny_mixtral(checkpoints))]
    losses = run_ranks(load_on_halves, *paths, world_size=4)
    alone = run_ranks(losses_alone, paths[0], world_size=2)
    assert losses == [*alone, *alone]


def between_load_and_training(path: str) -> None:
    """Rank function: frozen parameters, parameter groups, leaf modules train as by default."""
    losses = losses_of_changed_models(path, "lowmem")
    assert losses == losses_of_changed_models(path, "default")
    assert all(len(set(of_case)) == 4 for of_case in losses.values())


def losses_of_changed_models(path: str, how: str) -> dict[str, list[float]]:
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    losses: dict[str, list[float]] = {}
    for case in ("frozen", "groups", "leaves"):
        if how == "default":
            alive = HfDeepSpeedConfig(dict(BF16))
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
            del alive
        else:
            model = load_model(path, BF16)
        model.train()
        parameters: Any = list(model.parameters())
        if case == "frozen":
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("self_attn" not in name)
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if case == "groups":
            norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
            others = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
            parameters = [{"params": norms, "weight_decay": 0.0}, {"params": others, "lr": 1e-2}]
        if case == "leaves":
            assert set_z3_leaf_modules(model, [MixtralSparseMoeBlock])
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        config = {**BF16, "zero_allow_untested_optimizer": True}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        losses[case] = train(engine, 4)
    return losses


def test_frozen_parameters_groups_and_leaf_modules_train_as_by_default(checkpoints: Path) -> None:
    run_ranks(between_load_and_training, str(builders.tiny_mixtral(checkpoints)), timeout_s=120)
