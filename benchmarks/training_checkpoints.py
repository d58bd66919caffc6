"""Checkpoints of training programs as folders of models: `python -m benchmarks.training_checkpoints`.

transformers' Trainer, accelerate, TRL, transformers' distributed save and verl train tiny models on two CPU
ranks, and save their checkpoints and, at the same step, the gathered model. `consolidate` makes a folder of each
checkpoint, which is compared with the gathered one byte for byte. verl 0.9.1 is left out where it is not installed.
accelerate chooses FSDP on GPUs; `benchmarks.frameworks.stand_ins` has it do so on CPU ranks.
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.util
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.frameworks import stand_ins
from benchmarks.frameworks.rank import tell_the_backend
from benchmarks.launch import run_on_ranks
from benchmarks.pipelines import import_example
from benchmarks.results import log, show_table
from lowmem_load import consolidate
from lowmem_load.errors import listed

REPO = Path(__file__).resolve().parents[1]
SHARDED = "SHARDED_STATE_DICT"
WHOLE = "whole"
"""Folder of the gathered model, beside the checkpoints of a program."""


def as_on_gpus() -> None:
    """Have accelerate choose FSDP on CPU ranks."""
    import accelerate.state

    os.environ[stand_ins.FSDP_ON_CPU] = "1"
    tell_the_backend(stand_ins.fsdp_on_cpu, accelerate.state)


def train(model: Any, optimizer: Any = None) -> None:
    """Change all trainable values by one step."""
    import torch

    optimizer = optimizer or torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    tokens = torch.arange(8).reshape(1, 8) + torch.distributed.get_rank()
    model(input_ids=tokens).logits.float().square().mean().backward()
    optimizer.step()


def rows_of(model: str) -> list[Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = (REPO / "examples/data/sft.jsonl").read_text(encoding="utf-8").splitlines()[:8]
    return [dict(tokenizer(row["prompt"] + row["completion"])) for row in map(json.loads, lines)]


# -- programs: functions of a rank -------------------------------------------------------------------------------------


def arguments_for(out: str) -> dict[str, Any]:
    return {
        "output_dir": out,
        "fsdp": True,
        "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": SHARDED},
        "per_device_train_batch_size": 2,
        "max_steps": 2,
        "save_steps": 2,
        "learning_rate": 1e-2,
        "report_to": "none",
    }


def save_whole(accelerator: Any, model: Any, folder: str) -> None:
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        f"{folder}/{WHOLE}", state_dict=state, is_main_process=accelerator.is_main_process
    )


def with_trainer(models: dict[str, str], out: str) -> None:
    as_on_gpus()
    ((name, model),) = models.items()
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(model),
        TrainingArguments(**arguments_for(f"{out}/{name}")),
        DataCollatorForLanguageModeling(tokenizer, mlm=False),
        train_dataset=rows_of(model),
        processing_class=tokenizer,
    )
    trainer.train()
    save_whole(trainer.accelerator, trainer.model, f"{out}/{name}")


def with_trl(models: dict[str, str], out: str) -> None:
    as_on_gpus()
    ((name, model),) = models.items()
    from datasets import load_dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        model,
        SFTConfig(**arguments_for(f"{out}/{name}"), bf16=False),
        train_dataset=load_dataset("json", data_files=str(REPO / "examples/data/sft.jsonl"), split="train"),
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    save_whole(trainer.accelerator, trainer.model, f"{out}/{name}")


def with_accelerate(models: dict[str, str], out: str) -> None:
    as_on_gpus()
    import torch
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, save_fsdp_model
    from transformers import AutoModelForCausalLM

    for name, path in models.items():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type=SHARDED, auto_wrap_policy="transformer_based_wrap"
        )
        accelerator = Accelerator(fsdp_plugin=plugin)
        loaded = AutoModelForCausalLM.from_pretrained(path)
        model, optimizer = accelerator.prepare(loaded, torch.optim.AdamW(loaded.parameters(), lr=1e-2))
        train(model, optimizer)
        accelerator.save_state(f"{out}/{name}/save_state")
        save_fsdp_model(plugin, accelerator, model, f"{out}/{name}/use_dcp=False", use_dcp=False)
        save_whole(accelerator, model, f"{out}/{name}")
        accelerator.state._reset_state(reset_partial_state=True)
        accelerator.gradient_state._reset_state()


def with_transformers(models: dict[str, str], out: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    torch.distributed.init_process_group("gloo")
    for name, path in models.items():
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(fsdp_size=2))
        train(model)
        model.save_pretrained(f"{out}/{name}/distributed", distributed_checkpoint=True)
        model.save_pretrained(f"{out}/{name}/{WHOLE}")


def with_verl(models: dict[str, str], out: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    from verl.utils.fsdp_utils import get_fsdp_full_state_dict

    torch.distributed.init_process_group("gloo")
    for kind, path in models.items():
        folder, is_adapted = f"{out}/{kind}", kind.startswith("LoRA")
        model = _model_of_verl(kind, path)
        train(model)
        settings = {"save_contents": ["model"] if is_adapted else ["model", "hf_model"]}
        FSDPCheckpointManager(
            model, checkpoint_config={**settings, "save_lora_only": kind == "LoRA alone"}
        ).save_checkpoint(f"{folder}/saved")
        if not is_adapted and torch.distributed.get_rank() == 0:  # verl has gathered the model itself
            shutil.copytree(f"{folder}/saved/huggingface", f"{folder}/{WHOLE}")
        # verl's gathered model of an adapted one has PEFT's names, and nothing loads it.
        state = get_fsdp_full_state_dict(model) if is_adapted else {}
        if state and kind == "LoRA":
            AutoModelForCausalLM.from_pretrained(path).save_pretrained(f"{folder}/{WHOLE}")
            model.save_pretrained(f"{folder}/{WHOLE}/adapter", state_dict=state)
        elif state:
            model.save_pretrained(f"{folder}/{WHOLE}", state_dict=state)


def _model_of_verl(kind: str, path: str) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
    from verl.utils.fsdp_utils import apply_fsdp2

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    if kind == "critic":
        model = AutoModelForTokenClassification.from_pretrained(path, num_labels=1)
    else:
        model = AutoModelForCausalLM.from_pretrained(path)
    if kind.startswith("LoRA"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    apply_fsdp2(model, {"mesh": mesh}, {})
    return model


class Program(NamedTuple):
    """A program, the models that it trains, and the folders of its checkpoints.

    `config` is the folder beside them whose configuration is passed on; "" that of the model that was trained.
    """

    name: str
    run: Callable[..., None]
    models: Mapping[str, str]
    saved: tuple[str, ...]
    config: str = ""


OF_VERL = {"actor": "llama", "tied": "qwen2", "critic": "llama", "LoRA": "llama", "LoRA alone": "llama"}
KINDS = {name: name for name in ("llama", "mixtral", "qwen2")}
PROGRAMS = (
    Program("Trainer, FSDP2", with_trainer, {"llama": "example"}, ("checkpoint-2",)),
    Program("TRL SFT, LoRA, FSDP2", with_trl, {"llama": "example"}, ("checkpoint-2",), config=WHOLE),
    Program("accelerate, FSDP2", with_accelerate, KINDS, ("save_state", "use_dcp=False")),
    Program("transformers, distributed save", with_transformers, KINDS, ("distributed",)),
    Program("verl, FSDP2", with_verl, OF_VERL, ("saved",), "saved/huggingface"),
)


def models_in(folder: Path) -> dict[str, Path]:
    from tests import builders

    import_example("make_model").main([str(folder / "example")])
    return {
        "example": folder / "example",
        "llama": builders.tiny_llama(folder),
        "mixtral": builders.tiny_mixtral(folder),
        "qwen2": builders.tiny_qwen2_tied(folder),
    }


def compare(made: Path, whole: Path) -> str:
    """Return in words what differs between two folders."""
    ours, theirs = (
        {str(each.relative_to(root)) for each in root.rglob("*") if each.is_file()} for root in (made, whole)
    )
    differing = {name for name in ours & theirs if not filecmp.cmp(made / name, whole / name, shallow=False)}
    lines = [f"{name}: {content_differences(made / name, whole / name)}" for name in sorted(differing)]
    alone = (("ours", ours - theirs), ("theirs", theirs - ours))
    lines += [f"only {whose}: {', '.join(sorted(names))}" for whose, names in alone if names]
    return f"equal: {', '.join(sorted((ours & theirs) - differing)) or 'none'}" + "".join(f"; {line}" for line in lines)


def content_differences(ours: Path, theirs: Path) -> str:
    """Return what differs in two files of tensors or JSON, by name."""
    if ours.suffix == ".safetensors":
        import torch
        from safetensors.torch import load_file

        one, other = load_file(ours), load_file(theirs)
        values = [name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name])]
    else:
        one, other = json.loads(ours.read_text()), json.loads(theirs.read_text())
        values = [name for name in one.keys() & other.keys() if one[name] != other[name]]
    parts = (("other values", values), ("only ours", one.keys() - other), ("only theirs", other.keys() - one))
    return ", ".join(f"{what} {listed(sorted(names), 4)}" for what, names in parts if names) or "in order alone"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training_checkpoints", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--only", default="", help="programs whose name has this text")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/measured.md")
    options = parser.parse_args()
    has_verl = importlib.util.find_spec("verl") is not None
    rows: list[tuple[str, ...]] = [("program", "model", "checkpoint", "beside the gathered model")]
    with tempfile.TemporaryDirectory() as scratch:
        folders = models_in(Path(scratch))
        for number, program in enumerate(PROGRAMS):
            if options.only not in program.name or (program.run is with_verl and not has_verl):
                continue
            models = {name: str(folders[folder]) for name, folder in program.models.items()}
            out = Path(scratch, str(number))
            run_on_ranks(program.run, models, str(out), out=out / "logs", world_size=2)
            for name, saved in itertools.product(models, program.saved):
                place, made = out / name, out / "made" / name / saved
                consolidate(place / saved, made, config=place / program.config if program.config else models[name])
                rows.append((program.name, name, saved, compare(made, place / WHOLE)))
                log("  ".join(rows[-1]))
    show_table("benchmarks.training_checkpoints", rows, docs=options.docs)


if __name__ == "__main__":
    main()
