"""What initialize refuses, on every rank alike; and composites whose parts were loaded in several ways."""

import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from lowmem_load import ConfigError, RankError, get_load_report, initialize_partial, load_model, partial_zero3
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.engines import engine as engine_module
from lowmem_load.engines.parameters import is_partitioned
from lowmem_load.integrations.install import streaming
from lowmem_load.partial.partial_engine import PartialEngine
from tests import builders
from tests.multi_rank.test_partial_training import CONFIG, TOLERANCE, WITHOUT_OPTIMIZER, train, two_rates
from tests.multi_rank.test_partial_vision_language import stand_in_for_an_accelerator
from tests.multimodal import LR, Multimodal, reference
from tests.ranks import run_ranks

BF16 = {**CONFIG, "bf16": {"enabled": True}}


def plain(path: str) -> nn.Module:
    return Multimodal(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


def refuse(path: str) -> None:
    """Before anything is partitioned: each call's error has the class name and a part of the text that stand there."""
    rank = DistributedInterface().rank
    model, loaded = plain(path), Multimodal(load_model(path, CONFIG))
    frozen, uneven = plain(path).requires_grad_(False), plain(path)
    uneven.picture.requires_grad_(rank == 0)
    encoders = torch.optim.AdamW(model.picture.parameters())
    partly = plain(path)
    embedding = partly.llm.get_input_embeddings().requires_grad_(False)
    only_frozen = torch.optim.AdamW([*partly.picture.parameters(), embedding.weight])
    stranger = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    zenflow = {**CONFIG, "zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 0.1}}}
    adam, warmup = {"optimizer": torch.optim.AdamW}, {"type": "Warmup", "params": None}
    local = {"checkpoint": {"use_node_local_storage": True}}
    alone = torch.distributed.new_group([0]), torch.distributed.new_group([1])
    grouped = Multimodal(load_model(path, CONFIG, data_parallel_group=alone[rank]))
    llm = {"partition": "llm"}
    auto_rate = {**CONFIG, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    calls: list[tuple[str, nn.Module, Any, dict[str, Any]]] = [
        ("ConfigError: Multimodal was not loaded into partitions; pass partition", model, CONFIG, {}),
        ("ConfigError: that is what deepspeed.initialize does", model, CONFIG, {"partition": Multimodal}),
        (
            "ConfigError: partition leaves out llm.model.embed_tokens.weight",
            loaded,
            CONFIG,
            {"partition": "llm.lm_head"},
        ),
        ("ConfigError: the ds_config has stage 2", model, {**CONFIG, "zero_optimization": {"stage": 2}}, llm),
        ('ConfigError: write an "optimizer" section', model, WITHOUT_OPTIMIZER, llm),
        ("ConfigError: no trainable parameter of the partitioned part", model, CONFIG, {**llm, "optimizer": encoders}),
        ("ConfigError: no trainable parameter of the part", partly, CONFIG, {**llm, "optimizer": only_frozen}),
        ("ConfigError: has no trainable parameter of this model", model, CONFIG, {**llm, "optimizer": stranger}),
        ("ConfigError: there is nothing to train", frozen, CONFIG, llm),
        ("RankError: has parameters", uneven, CONFIG, llm),
        ('ConfigError: optimizer.params: lr is "auto"', model, auto_rate, llm),
        ("UnsupportedError: zero_optimization.zenflow", model, {**zenflow, "optimizer": None}, {**llm, **adam}),
        ("UnsupportedError: checkpoint.use_node_local_storage", model, {**CONFIG, **local}, llm),
        ("RankError: partition", model, CONFIG, {"partition": "llm" if rank else ["llm", "sound"]}),
        ("RankError: ds_config", model, {**CONFIG, "gradient_clipping": 1.0 + rank}, llm),
        ("ConfigError: 'Warmup' is not an lr scheduler", model, {**CONFIG, "scheduler": warmup}, llm),
        ("UnsupportedError: loaded with data_parallel_group", grouped, CONFIG, {}),
    ]
    for said, module, config, kwargs in calls:
        with raises(said):
            initialize_partial(module, config, **kwargs)


@contextmanager
def raises(said: str) -> Iterator[None]:
    """Expects an error whose class has the name before the first colon and whose text holds what is behind it."""
    kind, text = said.split(": ", maxsplit=1)
    with pytest.raises(Exception, match=re.escape(text)) as caught:
        yield
    assert caught.typename == kind, str(caught.value)


def change_later(path: str) -> None:
    """What is done to a model after its engine was made."""
    for part, name in (("picture", "picture.patches.weight"), ("llm", "llm.model.embed_tokens.weight")):
        model = plain(path).train()
        getattr(model, part).requires_grad_(False)
        counted = torch.optim.AdamW(model.parameters(), lr=1e-3)
        hits: list[int] = []
        counted.register_step_post_hook(lambda *_, hits=hits: hits.append(1))
        engine = initialize_partial(model, CONFIG, partition="llm", optimizer=counted)
        train(engine, 0, 2)
        getattr(model, part).requires_grad_(True)
        with pytest.raises(ConfigError, match=f"^{re.escape(name)}"):
            train(engine, 2, 3)
        assert len(hits) == 2, part  # a step is a step: halves do not count
        engine.destroy()
    model = plain(path).train()
    model.register_buffer("seen", torch.zeros(3, dtype=torch.int16))
    model.again = model.llm.get_input_embeddings()
    engine = initialize_partial(model, CONFIG, partition="llm")
    state = engine.consolidated_state_dict()
    if state is not None:
        assert torch.equal(state["again.weight"], state["llm.model.embed_tokens.weight"])
        assert list(state) == list(model.state_dict())
        assert [name for name, value in state.items() if not value.numel()] == []
    engine.destroy()


def fail_and_go_on(path: str, ranks: tuple[int, ...]) -> None:
    """Rank function: after an engine that could not be made, a model is as it was, and another engine trains it."""

    def num_hooks() -> int:
        return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())

    check_engine = engine_module.check_engine

    def fail(engine: Any) -> None:
        check_engine(engine)
        if DistributedInterface().rank in ranks:
            raise OSError("no memory")

    model = plain(path).train()
    before = num_hooks()
    engine_module.check_engine = fail
    with pytest.raises(RankError if len(ranks) == 1 else OSError, match="no memory"):
        initialize_partial(model, CONFIG, partition="llm")
    assert num_hooks() == before
    engine_module.check_engine = check_engine
    engine = initialize_partial(model, CONFIG, partition="llm")
    train(engine, 0, 2)
    engine.destroy()
    assert num_hooks() == before


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_after_an_engine_that_failed_another_one_trains(checkpoints: Path, ranks: tuple[int, ...]) -> None:
    path = builders.tiny_llama(checkpoints, torch.float32)
    run_ranks(fail_and_go_on, str(path), ranks)


def load_in_several_ways(llm: str, bert: str) -> None:
    DistributedInterface()

    def flags(model: nn.Module) -> set[tuple[bool, torch.dtype]]:
        return {(is_partitioned(p), p.dtype) for p in model.parameters()}

    with streaming(BF16, partition=LlamaForCausalLM):
        inside = AutoModelForCausalLM.from_pretrained(llm, dtype="auto")
        encoder = AutoModel.from_pretrained(bert, dtype=torch.float32)
    assert flags(inside) == {(True, torch.bfloat16)}
    assert flags(encoder) == {(False, torch.float32)}
    torch.manual_seed(0)
    asked = load_model(bert, BF16, auto_class="AutoModel", partition=(), dtype=torch.float32)
    assert flags(asked) == {(False, torch.float32)}
    default = load_model(bert, BF16, auto_class="AutoModel", partition=())
    assert flags(default) == {(False, torch.bfloat16)}
    some = load_model(llm, BF16, partition=["model.layers.*", "lm_head"], dtype="float32")
    assert flags(some) == {(True, torch.bfloat16), (False, torch.float32)}
    partitioned = {name for name, p in some.named_parameters() if is_partitioned(p)}
    assert {name.split(".")[0 if "lm_head" in name else 1] for name in partitioned} == {"layers", "lm_head"}
    assert get_load_report(some).whole_bytes == 4 * (128 * 32 + 32)
    torch.manual_seed(0)  # the checkpoint has no pooler: it is initialised
    ordinary = AutoModel.from_pretrained(bert, dtype=torch.float32)
    assert [name for name, p in ordinary.named_parameters() if not torch.equal(p, asked.get_parameter(name))] == []
    assert len(list(ordinary.parameters())) == len(list(asked.parameters()))

    model = Multimodal(inside).train().to(dtype=torch.float32)
    model.bert = encoder
    engine = initialize_partial(model, BF16)
    assert torch.tensor(train(engine, 0, 3)).isfinite().all()
    state = engine.consolidated_state_dict()
    if state is not None:
        assert state["picture.project.weight"].dtype == torch.float32
        assert set(state) == set(model.state_dict())


def test_parts_loaded_in_several_ways(checkpoints: Path) -> None:
    llm, bert = builders.tiny_llama(checkpoints, torch.bfloat16), builders.tiny_bert(checkpoints)
    run_ranks(load_in_several_ways, str(llm), str(bert), timeout_s=120)


def given(config: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """What cannot be followed, and what is said of it."""
    return [
        ("UnsupportedError: training_data", {"config": config, "training_data": [1]}),
        ("UnsupportedError: mpu, collate_fn", {"config": config, "mpu": object(), "collate_fn": list}),
        ("UnsupportedError: mesh_param", {"config": config, "mesh_param": (2, 1)}),
        ("UnsupportedError: args.device_rank", {"config": config, "args": Namespace(device_rank=0)}),
        ("ConfigError: 2 ds_configs", {"config": config, "args": Namespace(deepspeed_config=config)}),
        ("ConfigError: 0 ds_configs", {"args": Namespace(deepspeed_config=None)}),
        ("UnsupportedError: are groups", {"config": config, "model_parameters": [{"params": []}]}),
        ("UnsupportedError: not all", {"config": config, "model_parameters": []}),
    ]


def call_deepspeed_initialize(path: str) -> None:
    """Rank function: what `deepspeed.initialize` follows, refuses and leaves to DeepSpeed inside the block."""
    from peft import LoraConfig, get_peft_model

    ranks = DistributedInterface()
    stand_in_for_an_accelerator(ranks.rank, ranks.world_size)

    expected_of = {groups: reference(path, ranks.world_size, 4, groups=groups)[0] for groups in (None, two_rates)}

    def assert_trains(engine: Any, groups: Any = None) -> None:
        train(engine, 0, 4)
        state, expected = engine.consolidated_state_dict(), expected_of[groups]
        engine.destroy()
        if state is not None:
            assert max((state[name] - expected[name]).abs().max().item() for name in expected) < TOLERANCE

    def loaded() -> Multimodal:
        return Multimodal(load_model(path, CONFIG)).train()

    with partial_zero3():
        model = loaded()
        engine, optimizer, loader, _ = deepspeed.initialize(
            *(Namespace(local_rank=ranks.rank), model, partial(torch.optim.AdamW, lr=LR), two_rates(model)),
            config=WITHOUT_OPTIMIZER,
            dist_init_required=True,
        )
        assert [group["lr"] for group in optimizer.param_groups] == [5 * LR, LR, LR / 2]
        assert loader is None
        assert_trains(engine, two_rates)

        model = loaded()
        arguments, listed = Namespace(deepspeed_config=CONFIG, local_rank=ranks.rank), list(model.parameters())
        assert_trains(deepspeed.initialize(arguments, model, model_parameters=listed)[0])

        model = loaded()
        for said, kwargs in given(CONFIG):
            with raises(said):
                deepspeed.initialize(model=model, **kwargs)

        alive = HfDeepSpeedConfig(WITHOUT_OPTIMIZER)
        ordinary = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        del alive
        engine = deepspeed.initialize(model=Multimodal(ordinary), config=CONFIG)[0]
        assert type(engine) is PartialEngine
        assert engine._part._shell.llm is ordinary
        engine.destroy()
        engine = deepspeed.initialize(model=ordinary, config=WITHOUT_OPTIMIZER)[0]
        assert type(engine) is deepspeed.DeepSpeedEngine  # it is wholly partitioned
        lora = get_peft_model(load_model(path, CONFIG), LoraConfig(r=2, target_modules=["q_proj"]))
        assert type(deepspeed.initialize(model=lora, config=CONFIG)[0]) is deepspeed.DeepSpeedEngine
    with partial_zero3("llm"), partial_zero3("llm"):
        assert type(deepspeed.initialize(model=plain(path), config=CONFIG)[0]) is PartialEngine
        engine = deepspeed.initialize(model=ordinary, config=WITHOUT_OPTIMIZER)[0]
        assert type(engine) is deepspeed.DeepSpeedEngine


@pytest.mark.parametrize("check", [refuse, change_later, call_deepspeed_initialize])
def test_what_is_refused_and_what_is_given(check: Callable[[str], None], checkpoints: Path) -> None:
    run_ranks(check, str(builders.tiny_llama(checkpoints, torch.float32)), timeout_s=180)
