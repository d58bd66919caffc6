"""Trainer.save_model under install(): the files that Trainer writes, without gathering and the key that asks for it."""

import contextlib
import os
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import TrainerCallback

import lowmem_load
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.errors import ConfigError, RankError, UnsupportedError
from lowmem_load.integrations.install import uninstall
from tests import builders
from tests.multi_rank.test_resume import KEYS, whole_state
from tests.multi_rank.test_save import equal_folders
from tests.parity import assert_equal
from tests.ranks import run_ranks
from tests.zero_checkpoint import save_zero3

ZERO_3: dict[str, Any] = {
    "zero_optimization": {"stage": 3},
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


class Tokenizer:
    """What a Trainer saves in addition to the model."""

    def save_pretrained(self, folder: str) -> None:
        """Write a file."""
        Path(folder, "tokens.json").write_text("{}")


def make_trainer(path: str, out: Path, lora: bool = False, steps: int = 1, **zero: Any) -> Any:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

    AcceleratorState._reset_state()  # it knows one configuration of DeepSpeed per process
    config = {**ZERO_3, "zero_optimization": {"stage": 3, **zero}}
    arguments = TrainingArguments(
        str(out),
        deepspeed=config,
        per_device_train_batch_size=1,
        max_steps=steps,
        save_strategy="steps",
        save_steps=1,
        learning_rate=1e-3,
        report_to=[],
        disable_tqdm=True,
        accelerator_config={"use_configured_state": True},
    )
    model = AutoModelForCausalLM.from_pretrained(path)
    if lora:
        from peft import LoraConfig, get_peft_model

        set_seed(7)
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    row = {"input_ids": list(range(8)), "labels": list(range(8))}
    trainer = Trainer(model, arguments, train_dataset=[row] * 4)
    trainer.processing_class = Tokenizer()
    return trainer


class Holder(torch.nn.Module):
    """A model that is none of transformers'."""

    def __init__(self, held: torch.nn.Module) -> None:
        super().__init__()
        self.held = held


def save_twice(path: str, out: str) -> None:
    import accelerate

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    accelerate.PartialState(backend="gloo")
    lowmem_load.install()
    folder, rank = Path(out), os.environ["RANK"]
    for name, lora in (("full", False), ("lora", True)):
        trainer = make_trainer(path, folder / name / "run", lora, stage3_param_persistence_threshold=0)
        trainer.train()
        engine = trainer.deepspeed
        assert not engine.zero_gather_16bit_weights_on_model_save()
        trainer.save_model(folder / name / "ours")
        assert "_zero3_consolidated_16bit_state_dict" not in vars(engine)
        state = engine._zero3_consolidated_16bit_state_dict()
        if rank == "0":
            trainer._save(folder / name / "default", state_dict=state)
    trainer.save_model(folder / "again")
    trainer.save_model(folder / "again")
    refuse_what_would_be_empty(trainer, folder)
    trainer = make_trainer(path, folder / "run")
    trainer.train()
    save_otherwise(trainer, folder / "ours")
    resume_from_three_ranks(path, folder / "resumed")

    seen: list[str] = []

    def look(output_dir: Any = None, state_dict: Any = None) -> None:
        seen.extend(sorted(state_dict or []))  # rank 0 has them

    trainer.model = Holder(trainer.model)  # of neither transformers nor PEFT: Trainer writes its state dict itself
    trainer.deepspeed.zero_gather_16bit_weights_on_model_save = lambda: True
    trainer.save_model(folder / "plain")
    trainer.model = trainer.model.held
    del trainer.deepspeed.zero_gather_16bit_weights_on_model_save
    trainer.deepspeed._config.zero_config.gather_16bit_weights_on_model_save = True
    trainer._save = look  # a subclass that reads the weights gets them, as by default
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*gathers the weights")
        with pytest.raises(RankError, match=r"rank 0: UserWarning: Trainer\.save_model gathers"):
            trainer.save_model(folder / "looked into")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.save_model(folder / "looked into")
    told = [
        str(one.message)
        for one in caught
        if "gathers the weights, as without lowmem_load: this code looks into" in str(one.message)
    ]
    assert (len(told), len(seen) > 0) == ((1, True) if rank == "0" else (0, False))
    uninstall()

    with apart(trainer.deepspeed):
        save_otherwise(trainer, folder / "default")

    trainer.deepspeed._config.zero_config.gather_16bit_weights_on_model_save = False
    with pytest.raises(ValueError, match="Cannot get 16bit model weights"):
        trainer.accelerator.get_state_dict(trainer.deepspeed)
    torch.distributed.barrier()


def resume_from_three_ranks(path: str, folder: Path) -> None:
    """A Trainer goes on from a checkpoint that three ranks have saved, as the run that was not interrupted."""

    class Keeping(TrainerCallback):  # type: ignore[misc]
        """Keeps the state of the first checkpoint."""

        state: ClassVar[dict[str, torch.Tensor]] = {}
        scheduler: ClassVar[dict[str, Any]] = {}

        def on_save(self, *_: Any, **__: Any) -> None:
            if not self.state:
                self.state.update(whole_state(trainer.deepspeed))
                self.scheduler.update(trainer.deepspeed.lr_scheduler.state_dict())

    trainer = make_trainer(path, folder, steps=2)
    trainer.add_callback(Keeping)
    trainer.train()
    expected = whole_state(trainer.deepspeed)
    checkpoint = folder / "checkpoint-1"
    if os.environ["RANK"] == "0":
        shutil.rmtree(checkpoint / "global_step1")
        named = [name.split() for name in Keeping.state if " " in name]
        values = {key: {name: Keeping.state[f"{name} {key}"] for name, k in named if k == key} for key in KEYS}
        save_zero3(
            checkpoint,
            values.pop("fp32"),
            world_size=3,
            moments=values,
            steps=1,
            lr=Keeping.scheduler["_last_lr"][0],
            client_state={"lr_scheduler": Keeping.scheduler},
        )
    torch.distributed.barrier()
    trainer = make_trainer(path, folder, steps=2)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert (trainer.state.global_step, trainer.deepspeed.global_steps) == (2, 2)
    assert_equal(whole_state(trainer.deepspeed), expected)


def refuse_what_would_be_empty(trainer: Any, folder: Path) -> None:
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)  # of PEFT
    with pytest.raises(UnsupportedError, match=r"lora_A.*: is partitioned by ZeRO-3, .* with shape \[0\]; call "):
        model.save_pretrained(folder / "empty")
    with pytest.raises(UnsupportedError, match=r"^model\.embed_tokens\.weight: is partitioned by ZeRO-3"):
        model.get_base_model().save_pretrained(folder / "empty")
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    with pytest.raises(UnsupportedError, match="this code looks into the weights of a state dict"):
        len(state)
    for key, value in (("safe_serialization", False), ("push_to_hub", True), ("distributed_checkpoint", True)):
        with pytest.raises(UnsupportedError, match=f"{key}={value}: the weights are not gathered"):
            model.save_pretrained(folder / "empty", state_dict=state, **{key: value})
    assert not (folder / "empty").exists()
    for act in (
        lambda: trainer.save_model("s3://bucket/run"),
        lambda: trainer.save_model(output_dir="gs://bucket/run"),
    ):
        with pytest.raises(ConfigError, match=r"^(s3|gs)://bucket/run: is a URL that cannot be written to here"):
            act()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(trainer.args), "should_save", True)  # as on two nodes, with save_on_each_node
        with pytest.raises(RankError, match=r"rank 1: ConfigError: TrainingArguments\.save_on_each_node"):
            trainer.save_model(folder / "on each node")


@contextlib.contextmanager
def apart(engine: Any) -> Iterator[None]:
    """Have what the engine gathers be tensors of their own, as they are where `.cpu()` copies from a device.

    On the CPU parameters of one module are views of one buffer, which accelerate takes for ties and leaves out.
    """
    ordinary = engine._zero3_consolidated_16bit_state_dict

    def cloned(**kwargs: Any) -> Any:
        state = ordinary(**kwargs)
        return state and OrderedDict((name, value.clone()) for name, value in state.items())

    engine._zero3_consolidated_16bit_state_dict = cloned
    yield
    del engine._zero3_consolidated_16bit_state_dict


def save_otherwise(trainer: Any, folder: Path) -> None:
    """Save as scripts do that have an engine or an accelerator."""
    engine, accelerator = trainer.deepspeed, trainer.accelerator
    if Path(folder).name == "ours":
        save_on_one_rank(accelerator, engine, folder / "alone")
    accelerator.unwrap_model(engine).save_pretrained(
        folder / "script",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(engine),
        max_shard_size="30KB",
    )


def save_on_one_rank(accelerator: Any, engine: Any, folder: Path) -> None:
    state = accelerator.get_state_dict(engine)
    if accelerator.is_main_process:
        text = r"to be called on all ranks .*\nrank 1: has not come to this point in 0\.5 s"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOWMEM_LOAD_SILENCE_S", "0.5")
            with pytest.raises(RankError, match=text):
                accelerator.unwrap_model(engine).save_pretrained(folder, state_dict=state)
    assert not folder.exists()
    torch.distributed.barrier()
    if not accelerator.is_main_process:
        with pytest.raises(RankError, match="rank 1: has not come"), DistributedInterface().step("the next one"):
            pass


def test_trainer_saves_what_it_saves_by_default(checkpoints: Path, tmp_path: Path) -> None:
    path = builders.tiny_mixtral(checkpoints, torch.float32)
    run_ranks(save_twice, str(path), str(tmp_path), timeout_s=240)
    for name in ("full", "lora"):
        for folder in ("ours", "default"):
            (tmp_path / name / folder / "training_args.bin").unlink()
            assert (tmp_path / name / folder / "tokens.json").exists()
        equal_folders(tmp_path / name / "ours", tmp_path / name / "default")
        checkpoint = tmp_path / name / "run" / "checkpoint-1"
        equal_folders_of_weights(checkpoint, tmp_path / name / "ours")
        assert (checkpoint / "latest").exists(), "the optimizer's part of the checkpoint is there as well"
    equal_folders(tmp_path / "ours" / "script", tmp_path / "default" / "script")
    assert len(list((tmp_path / "ours" / "script").glob("*.safetensors"))) > 1
    assert len(load_file(tmp_path / "plain" / "model.safetensors")) > 0
    assert {path.name for path in (tmp_path / "again").iterdir()} >= {"adapter_model.safetensors", "tokens.json"}


def equal_folders_of_weights(ours: Path, other: Path) -> None:
    names = [{path.name for path in folder.glob("*.safetensors")} for folder in (ours, other)]
    assert names[0] == names[1] != set()
    assert all((ours / name).read_bytes() == (other / name).read_bytes() for name in names[0])
