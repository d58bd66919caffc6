"""A vision-language model of transformers: language model partitioned, tower and projector whole, by name."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, Trainer, TrainingArguments

from lowmem_load import get_load_report, initialize_partial, load_model, partial_zero3
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.engines.parameters import is_partitioned
from lowmem_load.partial.partial_engine import PartialEngine
from tests import builders
from tests.multi_rank.test_partial_training import TOLERANCE, WITHOUT_OPTIMIZER
from tests.multimodal import CLIP, LR
from tests.parity import differences
from tests.ranks import run_ranks

PARTITION = ["model.language_model", "lm_head"]
IMAGE_TOKEN, IMAGE_TOKENS, STEPS = 127, 4, 8

EPS = 1e-5
"""Of Adam. With its default, 1e-8, gradients that are zero but for rounding (key biases of CLIP) move parameters."""
ADAM = {"type": "AdamW", "params": {"lr": LR, "eps": EPS, "torch_adam": True}}
CONFIG = {**WITHOUT_OPTIMIZER, "optimizer": ADAM}


def sample(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Returns one with a picture or, on changing ranks, without."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(3, 120, (1, 5 + (step + 2 * rank) % 4), generator=generator)
    if (step * 7 + rank * 3) % 4 < 2:
        return {"input_ids": ids, "labels": ids.clone()}
    ids = torch.cat([torch.full((1, IMAGE_TOKENS), IMAGE_TOKEN), ids], dim=1)
    pixels = torch.randn(1, 3, 16, 16, generator=generator)
    return {"input_ids": ids, "pixel_values": pixels, "labels": ids.masked_fill(ids == IMAGE_TOKEN, -100)}


def stage_one(model: Any) -> None:
    model.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(True)


def trained_in_one_process(path: str, world_size: int) -> dict[str, torch.Tensor]:
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).train()
    stage_one(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, eps=EPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world_size):
            loss = model(**sample(step, rank)).loss / world_size
            if loss.requires_grad:
                loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_vision_language(path: str) -> None:
    """Rank function: the first stage of LLaVA, with reentrant checkpointing."""
    ranks = DistributedInterface()
    model = load_model(path, CONFIG, partition=PARTITION)
    report = get_load_report(model)
    ordinary = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    parts = {name: is_partitioned(p) for name, p in model.named_parameters()}
    assert {name.split(".")[1] for name, flag in parts.items() if flag} == {"language_model", "weight"}
    others = {name.split(".")[1] for name, flag in parts.items() if not flag}
    assert others == {"multi_modal_projector", "vision_tower"}
    whole = {name: p for name, p in model.named_parameters() if not parts[name]}
    assert [name for name, p in whole.items() if not torch.equal(p, ordinary.get_parameter(name))] == []
    llm_numel = sum(p.numel() for name, p in ordinary.named_parameters() if parts[name])
    assert report.partition_bytes == llm_numel * 4 // 2
    assert report.whole_bytes == sum(p.numel() * 4 for p in whole.values())
    # the partitioned part, compared as everywhere else: partitions, dtypes, ties
    language = differences(model.model.language_model, ordinary.model.language_model)
    assert [line for line in language if not line.startswith("training")] == []
    model.train()
    stage_one(model)
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    engine = initialize_partial(model, CONFIG)
    assert get_load_report(engine) is report
    assert engine.get_input_embeddings() is model.get_input_embeddings() and engine.lm_head is model.lm_head
    for step in range(STEPS):
        loss = engine(**sample(step, ranks.rank)).loss
        engine.backward(loss)
        engine.step()
    engine.eval()
    with torch.no_grad():  # evaluation calls the model itself, as Trainer does; then training goes on
        model(**sample(99, ranks.rank))
        model(**sample(98, ranks.rank))
    state = engine.consolidated_state_dict()
    if state is not None:
        expected = trained_in_one_process(path, ranks.world_size)
        assert list(state) == list(expected)
        off = {name: (state[name] - expected[name]).abs().max().item() for name in expected}
        assert {name: value for name, value in off.items() if not value < TOLERANCE} == {}


def test_training_as_in_one_process(checkpoints: Path) -> None:
    run_ranks(train_vision_language, str(builders.tiny_llava(checkpoints)), timeout_s=120)


def stand_in_for_an_accelerator(rank: int, world_size: int) -> None:
    """Tells accelerate what it finds out by itself where there is an accelerator: with DeepSpeed it looks for one.

    On CPU it would take each rank for the only one, though the process group and DeepSpeed know better.
    """
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    from accelerate.utils import DistributedType

    state = PartialState()
    state.distributed_type, state.backend = DistributedType.DEEPSPEED, "gloo"
    state.num_processes, state.process_index, state.local_process_index = world_size, rank, rank


def train_with_trainer(path: str, out: str) -> None:
    """Rank function: Trainer, two lines more than ever; then a resumed Trainer, whose last steps must be equal."""
    ranks = DistributedInterface()
    assert ranks.world_size == 2
    stand_in_for_an_accelerator(ranks.rank, ranks.world_size)
    config = {
        **WITHOUT_OPTIMIZER,
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "gradient_clipping": CLIP,
    }
    config.pop("train_micro_batch_size_per_gpu")

    def make_trainer() -> Any:
        arguments = TrainingArguments(
            out,
            deepspeed=config,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            gradient_accumulation_steps=2,
            max_steps=4,
            save_steps=2,
            logging_steps=1,
            learning_rate=LR,
            adam_epsilon=EPS,
            weight_decay=0.0,
            lr_scheduler_type="linear",
            max_grad_norm=CLIP,
            report_to=[],
            disable_tqdm=True,
            accelerator_config={"use_configured_state": True},
            remove_unused_columns=False,
            seed=3,
        )
        # each sample is a batch of one, with a picture or without
        data = [{key: value[0] for key, value in sample(number, number % 2).items()} for number in range(32)]
        model = load_model(path, config, partition=PARTITION)
        return Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], data_collator=stack)

    trainer = make_trainer()
    with partial_zero3():
        trainer.train()
    assert isinstance(trainer.deepspeed, PartialEngine)
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.save_model(f"{out}/final")
    log = [(entry["loss"], entry["learning_rate"]) for entry in trainer.state.log_history if "loss" in entry]
    assert [rate for _, rate in log] == pytest.approx([LR * share for share in (1, 0.75, 0.5, 0.25)])
    trainer.deepspeed.destroy()
    AcceleratorState._reset_state()  # accelerate refuses a second Accelerator in one process
    again = make_trainer()
    with partial_zero3():
        again.train(resume_from_checkpoint=f"{out}/checkpoint-2")
    assert [(entry["loss"], entry["learning_rate"]) for entry in again.state.log_history if "loss" in entry] == log
    if ranks.rank == 0:
        saved, before = load_file(f"{out}/final/model.safetensors"), load_file(f"{path}/model.safetensors")
        assert saved.keys() == before.keys()
        # the tower's last norm is behind the features that LLaVA takes; a bias of all keys changes no attention
        unchanged = [key for key in saved if torch.equal(saved[key], before[key])]
        assert [key for key in unchanged if "post_layernorm" not in key and "k_proj.bias" not in key] == []


def stack(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    assert len(samples) == 1
    return {key: value[None] for key, value in samples[0].items()}


def test_trainer(checkpoints: Path, tmp_path: Path) -> None:
    path = builders.tiny_llava(checkpoints)
    run_ranks(train_with_trainer, str(path), str(tmp_path), timeout_s=180)
