"""What initialize refuses, on every rank alike; and composites whose parts were loaded in several ways."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import builders
from tests.multi_rank.test_partial_training import CONFIG, TOLERANCE, WITHOUT_OPTIMIZER, train, two_rates
from tests.multi_rank.test_partial_vision_language import stand_in_for_an_accelerator
from tests.multimodal import LR, Multimodal, reference
from tests.ranks import run_ranks

BF16 = {**CONFIG, "bf16": {"enabled": True}}


def plain(path: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return Multimodal(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


def refusals(path: str) -> list[tuple[str, str]]:
    """Rank function: the error of each call."""
    from lowmem_load import DistributedInterface, initialize, load_model

    rank = DistributedInterface().rank
    model, loaded = plain(path), Multimodal(load_model(path, CONFIG))
    frozen, uneven = plain(path).requires_grad_(False), plain(path)
    uneven.picture.requires_grad_(rank == 0)
    encoders = torch.optim.AdamW(model.picture.parameters())
    stranger = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    zero = {"stage": 3, "zenflow": {"topk_ratio": 0.1}}
    some = torch.optim.AdamW([*model.llm.parameters(), *(model.picture if rank else model.sound).parameters()])
    alone = torch.distributed.new_group([0]), torch.distributed.new_group([1])
    grouped = Multimodal(load_model(path, CONFIG, data_parallel_group=alone[rank]))
    calls: list[tuple[nn.Module, Any, dict[str, Any]]] = [
        (model, CONFIG, {}),
        (model, CONFIG, {"partition": "lm"}),
        (model, CONFIG, {"partition": Multimodal}),
        (loaded, CONFIG, {"partition": "llm.lm_head"}),
        (model, {**CONFIG, "zero_optimization": {"stage": 2}}, {"partition": "llm"}),
        (model, WITHOUT_OPTIMIZER, {"partition": "llm"}),
        (model, CONFIG, {"partition": "llm", "optimizer": encoders}),
        (model, CONFIG, {"partition": "llm", "optimizer": stranger}),
        (frozen, CONFIG, {"partition": "llm"}),
        (uneven, CONFIG, {"partition": "llm"}),
        (model, {**CONFIG, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, {"partition": "llm"}),
        (model, {**CONFIG, "zero_optimization": zero}, {"partition": "llm"}),
        (model, CONFIG, {"partition": "llm", "average": "median"}),
        (model, CONFIG, {"partition": "llm" if rank else "langauge"}),
        (model, CONFIG, {"partition": "llm" if rank else ["llm", "sound"]}),
        (model, CONFIG, {"partition": "llm", "average": "all" if rank else "used"}),
        (model, {**CONFIG, "gradient_clipping": 1.0 + rank}, {"partition": "llm"}),
        (model, CONFIG, {"partition": "llm", "optimizer": some}),
        (model, {**CONFIG, "scheduler": {"type": "Warmup"}}, {"partition": "llm"}),
        (grouped, CONFIG, {}),
    ]
    found = []
    for module, config, kwargs in calls:
        try:
            initialize(module, config, **kwargs)
            found.append(("nothing", ""))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    return found


EXPECTED = [
    ("ConfigError", "Multimodal was not loaded into partitions; pass partition"),
    ("ConfigError", "'lm' choose(s) no module"),
    ("ConfigError", "that is what deepspeed.initialize does"),
    ("ConfigError", "partition leaves out llm.model.embed_tokens.weight"),
    ("ConfigError", "the ds_config has stage 2"),
    ("ConfigError", 'write an "optimizer" section'),
    ("ConfigError", "holds no parameter of the partitioned part"),
    ("ConfigError", "holds no trainable parameter of this model"),
    ("ConfigError", "there is nothing to train"),
    ("RankError", "digest"),
    ("ConfigError", 'optimizer.params: lr is "auto"'),
    ("UnsupportedError", "zero_optimization.zenflow"),
    ("ConfigError", "'median'"),
    ("RankError", "rank 0: ConfigError: partition: 'langauge'"),
    ("RankError", "partition"),
    ("RankError", "average and unused"),
    ("RankError", "ds_config"),
    ("RankError", "optimizer's parameters"),
    ("ConfigError", "no lr scheduler 'Warmup'"),
    ("UnsupportedError", "loaded with data_parallel_group"),
]


def test_initialize_refuses_before_anything_is_partitioned(checkpoints: Path) -> None:
    path = builders.tiny_llama(checkpoints, torch.float32)
    for found in run_ranks(refusals, str(path), timeout_s=120):
        for (kind, text), (expected, part) in zip(found, EXPECTED, strict=True):
            assert (kind, part in text) == (expected, True), (kind, text)


def changed_later(path: str) -> dict[str, Any]:
    """Rank function: what is done to a model after its engine was made."""
    from lowmem_load import initialize

    found: dict[str, Any] = {}
    for part in ("picture", "llm"):
        model = plain(path).train()
        getattr(model, part).requires_grad_(False)
        counted = torch.optim.AdamW(model.parameters(), lr=1e-3)
        hits: list[int] = []
        counted.register_step_post_hook(lambda *_, hits=hits: hits.append(1))
        engine = initialize(model, CONFIG, partition="llm", optimizer=counted)
        train(engine, 0, 2)
        getattr(model, part).requires_grad_(True)
        try:
            train(engine, 2, 3)
        except Exception as error:
            found[part] = f"{type(error).__name__}: {error}"
        found[f"{part} hits"] = len(hits)
        engine.destroy()
    model = plain(path).train()
    model.register_buffer("seen", torch.zeros(3, dtype=torch.int16))
    model.again = model.llm.get_input_embeddings()
    engine = initialize(model, CONFIG, partition="llm")
    state = engine.consolidated_state_dict()
    found["alias"] = state is None or torch.equal(state["again.weight"], state["llm.model.embed_tokens.weight"])
    found["names"] = state is None or list(state) == list(model.state_dict())
    found["empty"] = [] if state is None else [name for name, value in state.items() if not value.numel()]
    engine.destroy()
    return found


def test_changes_after_the_engine_was_made(checkpoints: Path) -> None:
    path = builders.tiny_llama(checkpoints, torch.float32)
    for found in run_ranks(changed_later, str(path), timeout_s=120):
        for part, name in (("picture", "picture.patches.weight"), ("llm", "llm.model.embed_tokens.weight")):
            assert found[part].startswith(f"ConfigError: {name}")
            assert found[f"{part} hits"] == 2  # a step is a step: halves do not count
        assert (found["alias"], found["names"], found["empty"]) == (True, True, [])


def test_what_enters_needs_a_gradient_in_every_container() -> None:
    from collections import UserDict, namedtuple
    from dataclasses import dataclass

    from transformers.modeling_outputs import BaseModelOutput

    from lowmem_load.ds.engine import PartitionedPart

    @dataclass
    class Batch:
        embeds: torch.Tensor
        position_ids: torch.Tensor

    part = PartitionedPart.__new__(PartitionedPart)
    part._anchor = torch.zeros((), requires_grad=True)
    values, ids = torch.ones(2), torch.ones(2, dtype=torch.long)
    pair = namedtuple("pair", "embeds attention_mask")  # noqa: PYI024
    assert part._anchored(values).requires_grad and not values.requires_grad
    assert part._anchored({"embeds": values, "deep": [(values,)]})["deep"][0][0].requires_grad
    assert not part._anchored({"attention_mask": values})["attention_mask"].requires_grad
    assert part._anchored(UserDict(embeds=values))["embeds"].requires_grad
    output = part._anchored(BaseModelOutput(last_hidden_state=values))
    assert type(output) is BaseModelOutput and output.last_hidden_state.requires_grad
    batch = part._anchored(Batch(values, values))
    assert batch.embeds.requires_grad and not batch.position_ids.requires_grad
    assert part._anchored(pair(values, values)).embeds.requires_grad
    assert part._anchored(ids) is ids


def composites(llm: str, bert: str) -> dict[str, Any]:
    """Rank function."""
    from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM

    from lowmem_load import DistributedInterface, initialize, load_model, load_report, streaming
    from lowmem_load.ds.partition import is_partitioned

    DistributedInterface()

    def flags(model: nn.Module) -> set[tuple[bool, str]]:
        return {(is_partitioned(p), str(p.dtype)) for p in model.parameters()}

    with streaming(BF16, partition=LlamaForCausalLM):
        inside = AutoModelForCausalLM.from_pretrained(llm, dtype="auto")
        encoder = AutoModel.from_pretrained(bert, dtype=torch.float32)
    torch.manual_seed(0)
    asked = load_model(bert, BF16, auto_class="AutoModel", partition=(), dtype=torch.float32)
    default = load_model(bert, BF16, auto_class="AutoModel", partition=())
    some = load_model(llm, BF16, partition=["model.layers.*", "lm_head"], dtype="float32")
    torch.manual_seed(0)  # the checkpoint has no pooler: it is initialised
    ordinary = AutoModel.from_pretrained(bert, dtype=torch.float32)
    same = all(torch.equal(a, b) for a, b in zip(asked.parameters(), ordinary.parameters(), strict=True))
    model = Multimodal(inside).train().to(dtype=torch.float32)
    model.bert = encoder
    engine = initialize(model, BF16)
    losses = train(engine, 0, 3)
    state = engine.consolidated_state_dict()
    return {
        "inside": flags(inside),
        "encoder": flags(encoder),
        "asked": flags(asked),
        "default": flags(default),
        "some": {
            name.split(".")[0 if "lm_head" in name else 1] for name, p in some.named_parameters() if is_partitioned(p)
        },
        "some flags": flags(some),
        "some bytes": load_report(some).whole_bytes == 4 * (128 * 32 + 32),
        "same": same,
        "finite": all(torch.tensor(losses).isfinite()),
        "kept dtype": state is None or str(state["picture.project.weight"].dtype),
        "names": state is None or set(state) == set(model.state_dict()),
    }


def test_parts_loaded_in_several_ways(checkpoints: Path) -> None:
    llm, bert = builders.tiny_llama(checkpoints, torch.bfloat16), builders.tiny_bert(checkpoints)
    for rank, found in enumerate(run_ranks(composites, str(llm), str(bert), timeout_s=120)):
        assert found["inside"] == {(True, "torch.bfloat16")}
        assert found["encoder"] == found["asked"] == {(False, "torch.float32")}
        assert found["default"] == {(False, "torch.bfloat16")}
        assert found["some"] == {"layers", "lm_head"}
        assert found["some flags"] == {(True, "torch.bfloat16"), (False, "torch.float32")}
        assert found["some bytes"] and found["same"] and found["finite"] and found["names"]
        assert rank or found["kept dtype"] == "torch.float32"


def given(config: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """What cannot be followed, and what is said of it."""
    groups = [{"params": []}, {"params": []}]
    lamb = {**config, "optimizer": {"type": "Lamb", "params": {"lr": LR}}}
    unknown = {**config, "optimizer": {"type": "AdamW", "params": {"lr": LR, "beta": 1}}}
    return [
        ("UnsupportedError: training_data", {"config": config, "training_data": [1]}),
        ("UnsupportedError: mpu, collate_fn", {"config": config, "mpu": object(), "collate_fn": list}),
        ("UnsupportedError: mesh_param", {"config": config, "mesh_param": (2, 1)}),
        ("UnsupportedError: args.device_rank", {"config": config, "args": Namespace(device_rank=0)}),
        ("ConfigError: 2 ds_configs", {"config": config, "args": Namespace(deepspeed_config=config)}),
        ("ConfigError: 0 ds_configs", {"args": Namespace(deepspeed_config=None)}),
        ("ConfigError: no optimizer", {"config": WITHOUT_OPTIMIZER, "model_parameters": groups}),
        ("UnsupportedError: Lamb", {"config": lamb, "model_parameters": groups}),
        ("ConfigError: 'beta'", {"config": unknown, "model_parameters": groups}),
    ]


def through_deepspeed(path: str) -> dict[str, Any]:
    """Rank function: what `deepspeed.initialize` follows, refuses and leaves to DeepSpeed inside the block."""
    import deepspeed
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, DummyOptim
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

    from lowmem_load import DistributedInterface, PartialEngine, load_model, partial_zero3

    ranks = DistributedInterface()
    found: dict[str, Any] = {}
    stand_in_for_an_accelerator(ranks.rank, ranks.world_size)

    expected_of = {groups: reference(path, ranks.world_size, 4, groups=groups)[0] for groups in (None, two_rates)}

    def difference(engine: Any, groups: Any = None) -> float | None:
        train(engine, 0, 4)
        state, expected = engine.consolidated_state_dict(), expected_of[groups]
        engine.destroy()
        return None if state is None else max((state[name] - expected[name]).abs().max().item() for name in expected)

    def loaded() -> Multimodal:
        return Multimodal(load_model(path, CONFIG)).train()

    with partial_zero3():
        model = loaded()
        engine, optimizer, loader, _ = deepspeed.initialize(
            model=model, config=CONFIG, model_parameters=two_rates(model), dist_init_required=True
        )
        found["groups"] = [group["lr"] for group in optimizer.param_groups], loader, difference(engine, two_rates)

        model = loaded()  # in host memory torch's optimizer steps, too
        config = {**CONFIG, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
        engine = deepspeed.initialize(model=model, config=config, model_parameters=two_rates(model))[0]
        found["offload"] = difference(engine, two_rates)

        model = loaded()
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG))
        engine, _ = accelerator.prepare(model, DummyOptim(two_rates(model), lr=LR))
        found["accelerate"] = difference(engine, two_rates)
        unset_hf_deepspeed_config()

        model = loaded()
        arguments = Namespace(deepspeed_config=WITHOUT_OPTIMIZER, local_rank=ranks.rank)
        listed = (p for p in model.llm.parameters())
        engine = deepspeed.initialize(arguments, model, torch.optim.AdamW, listed)[0]
        before = {name: p.detach().clone() for name, p in model.picture.named_parameters()}
        train(engine, 0, 4)
        found["unlisted"] = all(torch.equal(p, before[name]) for name, p in model.picture.named_parameters())
        engine.destroy()

        model = loaded()
        listed = list(model.parameters())
        engine = deepspeed.initialize(model=model, config=CONFIG, model_parameters=listed)[0]
        found["all"] = difference(engine)

        model = loaded()
        own = torch.optim.AdamW(model.llm.parameters())
        refused = [*given(CONFIG), ("ConfigError: not the optimizer's", {"config": CONFIG, "optimizer": own})]
        refused[-1][1]["model_parameters"] = list(model.parameters())
        for groups in (kwargs.get("model_parameters") for _, kwargs in refused[:-1]):
            for group, part in zip(groups or (), (model.llm, model.picture), strict=False):
                group["params"] = list(part.parameters())
        found["refused"] = []
        for said, kwargs in refused:
            try:
                deepspeed.initialize(model=model, **kwargs)
                found["refused"].append((said, "nothing"))
            except Exception as error:
                found["refused"].append((said, f"{type(error).__name__}: {error}"))

        alive = HfDeepSpeedConfig(WITHOUT_OPTIMIZER)
        stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        del alive
        engine = deepspeed.initialize(model=Multimodal(stock), config=CONFIG)[0]
        found["stock in part"] = type(engine), engine._part._shell.llm is stock
        engine.destroy()
        found["wholly partitioned"] = type(deepspeed.initialize(model=stock, config=WITHOUT_OPTIMIZER)[0])
        lora = get_peft_model(load_model(path, CONFIG), LoraConfig(r=2, target_modules=["q_proj"]))
        found["adapters"] = type(deepspeed.initialize(model=lora, config=CONFIG)[0])
    with partial_zero3("llm"), partial_zero3("llm"):
        found["nested"] = type(deepspeed.initialize(model=plain(path), config=CONFIG)[0])
        found["wholly partitioned, others not"] = type(deepspeed.initialize(model=stock, config=WITHOUT_OPTIMIZER)[0])
    found["expected"] = PartialEngine, deepspeed.DeepSpeedEngine
    return found


def test_what_deepspeed_initialize_is_given(checkpoints: Path) -> None:
    path = builders.tiny_llama(checkpoints, torch.float32)
    for rank, found in enumerate(run_ranks(through_deepspeed, str(path), timeout_s=180)):
        ours, theirs = found["expected"]
        rates, loader, off = found["groups"]
        assert rates == [5 * LR, LR, LR / 2] and loader is None
        for value in (off, found["offload"], found["accelerate"], found["all"]):
            assert rank or value < TOLERANCE, found
        assert found["unlisted"]
        for said, error in found["refused"]:
            kind, text = said.split(": ")
            assert kind in error and text in error, (said, error)
        assert found["stock in part"] == (ours, True)
        assert found["nested"] is ours
        for case in ("wholly partitioned", "adapters", "wholly partitioned, others not"):
            assert found[case] is theirs, case


def test_the_trainer_hook_restores_deepspeed() -> None:
    import deepspeed

    from lowmem_load import install, partial_zero3, uninstall

    ordinary = deepspeed.initialize
    with partial_zero3():
        assert deepspeed.initialize is not ordinary
        with pytest.raises(AssertionError, match="requires a model"):  # DeepSpeed's own answer
            deepspeed.initialize()
        kept = deepspeed.initialize
        assert kept is not ordinary
    assert deepspeed.initialize is ordinary
    with pytest.raises(AssertionError, match="requires a model"):
        kept()
    assert deepspeed.initialize is ordinary

    with partial_zero3():
        install()
        checked = deepspeed.initialize
    assert deepspeed.initialize is checked  # blocks may end in any order
    uninstall()
    assert deepspeed.initialize is ordinary
