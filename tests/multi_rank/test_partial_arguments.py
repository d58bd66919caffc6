"""What initialize refuses, on every rank alike; and composites whose parts were loaded in several ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import builders
from tests.multi_rank.test_partial_training import CONFIG, WITHOUT_OPTIMIZER, train
from tests.multimodal import Multimodal
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

    from lowmem_load.zero3_engine import PartitionedPart

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
    from lowmem_load.zero3 import is_partitioned

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


def test_the_trainer_hook_restores_deepspeed() -> None:
    import deepspeed

    from lowmem_load import partial_zero3

    ordinary = deepspeed.initialize
    with partial_zero3():
        assert deepspeed.initialize is not ordinary
        with pytest.raises(AssertionError, match="requires a model"):  # DeepSpeed's own answer
            deepspeed.initialize()
        assert deepspeed.initialize is not ordinary
    assert deepspeed.initialize is ordinary
