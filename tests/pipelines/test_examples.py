"""The examples on 2 CPU ranks: they equal the default loader with less memory, and resuming changes nothing."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.pipelines.pipeline import LLAMAFACTORY, PipelineResult, import_example, run_pipeline
from tests.ranks import run_ranks

TIMEOUT_S = 150


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for size in ("tiny", "mini"):
        import_example("make_model").main([str(folder / size), "--size", size])
    return {size: folder / size for size in ("tiny", "mini")}


def rank_result(script: str, argv: list[str]) -> PipelineResult:
    return run_pipeline(script, argv, int(os.environ["RANK"]))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Returns what the example left in its folder: a model, or an adapter."""
    [file] = (folder / "final").glob("*.safetensors")
    return load_file(file)


def assert_same_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.slow
def test_results_equal_the_default_loaders_with_less_memory(models: dict[str, Path], tmp_path: Path) -> None:
    """The other examples are run by `test_resume...`; `make frameworks` compares them with the default loader."""
    default, ours = (tmp_path / way for way in ("default", "ours"))
    losses, peaks = [], []
    for output in (default, ours):
        argv = ["--model", str(models["mini"]), "--output", str(output), "--steps", "2", "--save-steps", "2"]
        argv += ["--default-loader"] * (output == default)
        ranks = run_ranks(rank_result, "hf_trainer", argv, timeout_s=TIMEOUT_S)
        losses.append([rank.losses for rank in ranks])
        peaks.append(max(rank.load_peak for rank in ranks))
    assert losses[0] == losses[1] and all(losses[0])
    assert peaks[1] < peaks[0]
    assert_same_weights(weights(default), weights(ours))


def train_fsdp2(argv: list[str]) -> list[float]:
    losses: list[float] = import_example("trainer_fsdp2").main(argv)
    return losses


@pytest.mark.slow
def test_fsdp2_equals_the_default_loader(models: dict[str, Path], tmp_path: Path) -> None:
    losses = {}
    for switches in ([], ["--default-loader"]):
        folder = tmp_path / "-".join(["out", *switches])
        argv = ["--model", str(models["tiny"]), "--output", str(folder), "--steps", "3", *switches]
        losses[folder] = run_ranks(train_fsdp2, argv, timeout_s=TIMEOUT_S)
    (ours, default) = losses
    assert losses[ours] == losses[default] and len(losses[default][0]) == 3
    assert_same_weights(weights(ours), weights(default))


def train_in_parts(script: str, switches: list[str], model: str, out: str) -> None:
    """Rank function: 4 steps at once; 2 steps, then 2 more after a resume."""
    main = import_example(script).main
    losses: dict[str, list[float]] = {}
    for name, steps, resume in (("whole", 4, False), ("parts", 2, False), ("parts", 4, True)):
        folder = str(Path(out) / name)
        if script == LLAMAFACTORY:
            config = str(Path(import_example(script).__file__).with_name("train.yaml"))
            argv = [config, f"model={model}", f"output_dir={folder}", f"max_steps={steps}", "save_steps=2"]
            argv += ["resume_from_checkpoint=auto"] * resume
        else:
            argv = ["--model", model, "--output", folder, "--steps", str(steps), "--save-steps", "2", *switches]
            argv += ["--resume"] * resume
        AcceleratorState._reset_state(reset_partial_state=True)  # one accelerator per script
        losses[f"{name} resumed" if resume else name] = main(argv)
    assert len(losses["whole"]) == 4
    assert losses["parts"] == losses["whole"][:2]
    assert losses["parts resumed"][-2:] == losses["whole"][2:]
    assert losses["whole"][-1] < losses["whole"][0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(
    ("script", "lora"),
    [
        pytest.param("hf_trainer", False, marks=pytest.mark.release),
        ("hf_trainer", True),
        ("accelerate_loop", False),
        (LLAMAFACTORY, False),
    ],
)
def test_resume_goes_on_and_the_result_loads_elsewhere(
    script: str, lora: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    model = models["tiny"]
    switches = ["--lora"] * lora
    run_ranks(train_in_parts, script, switches, str(model), str(tmp_path), timeout_s=TIMEOUT_S)
    assert_same_weights(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    assert_loads(tmp_path / "whole" / "final", model, lora)


def assert_loads(final: Path, base: Path, lora: bool) -> None:
    """Checks that plain transformers, and PEFT, load the folder, and that training has changed what it was to."""
    from peft import PeftModel

    before = AutoModelForCausalLM.from_pretrained(base)
    loaded: Any
    if lora:
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), final).merge_and_unload()
    else:
        loaded, info = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    changed = {
        name
        for (name, old), new in zip(before.named_parameters(), loaded.parameters(), strict=True)
        if not torch.equal(old, new)
    }
    assert changed == {
        name for name, _ in before.named_parameters() if not lora or "q_proj" in name or "v_proj" in name
    }
    text = AutoTokenizer.from_pretrained(final)("What is", return_tensors="pt")
    assert loaded(**{key: text[key] for key in ("input_ids", "attention_mask")}).logits.isfinite().all()
