"""`lowmem-load run` says that a model is loaded before the arguments, before it is read, whatever hides warnings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lowmem_load.integrations.startup_hook import switched_on
from tests import builders

ALL = """
import os, sys, accelerate, transformers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, LlavaForConditionalGeneration
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config
path, llava, folder = sys.argv[1:]

def case(name):
    print("lowmem_load: case", name, file=sys.stderr, flush=True)

case("a file that is not there")
try:
    LlamaForCausalLM.from_pretrained(folder)
except OSError:
    case("nothing is read")
AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
LlavaForConditionalGeneration.from_pretrained(llava)

case("placed by hand")
LlamaForCausalLM.from_pretrained(path, device_map="cpu")
case("a ds_config of another stage")
kept = HfDeepSpeedConfig({"zero_optimization": {"stage": 2}})
LlamaForCausalLM.from_pretrained(path)
unset_hf_deepspeed_config()
launched = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
case("one rank")
LlamaForCausalLM.from_pretrained(path)
arguments = transformers.TrainingArguments(folder, use_cpu=True)
os.environ.update(launched)
case("TrainingArguments")
LlamaForCausalLM.from_pretrained(path)
case("no arguments any more")
del arguments
LlamaForCausalLM.from_pretrained(path)
case("an Accelerator")
accelerate.Accelerator(cpu=True)
model = LlamaForCausalLM.from_pretrained(path)

import deepspeed
try:
    deepspeed.initialize(model=model, config={"zero_optimization": {"stage": 3}}, dist_init_required=False)
except BaseException as error:
    print(type(error).__name__, error)
"""
TOLD = [
    *("case a file that is not there", "LlamaForCausalLM", "case nothing is read", "LlamaForCausalLM"),
    *("LlavaForConditionalGeneration", "case placed by hand", "case a ds_config of another stage", "case one rank"),
    *("case TrainingArguments", "case no arguments any more", "LlamaForCausalLM", "case an Accelerator"),
]
TRAIN = """
import os, sys, deepspeed, transformers
try:
    model = transformers.LlamaForCausalLM.from_pretrained(sys.argv[1])
except Exception as error:
    print(type(error).__name__, error)
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    model = transformers.LlamaForCausalLM.from_pretrained(sys.argv[1])
try:
    deepspeed.initialize(model=model, config={"zero_optimization": {"stage": 3}}, dist_init_required=False)
except Exception as error:
    print(type(error).__name__, error)
"""


def run(source: str, *args: str, strict: bool = False, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**switched_on(os.environ, strict=strict), "PYTHONWARNINGS": "ignore", **env}
    command = [sys.executable, "-c", source, *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_load_before_the_arguments_is_told_before_it_reads(checkpoints: Path, tmp_path: Path) -> None:
    paths = [str(builders.tiny_llama(checkpoints)), str(builders.tiny_llava(checkpoints)), str(tmp_path)]
    process = run(ALL, *paths, RANK="0", WORLD_SIZE="2")
    assert process.returncode == 0, process.stderr
    lines = [line for line in process.stderr.splitlines() if line.startswith("lowmem_load: ") and ": on:" not in line]
    told = "is loaded whole on every rank: nothing has asked for ZeRO-3 or FSDP2 yet. First make TrainingArguments(...)"
    assert [line.removeprefix("lowmem_load: ").partition(f" {told}")[0] for line in lines] == TOLD
    assert "LoadOrderWarning: LlamaForCausalLM: every rank holds" in process.stderr, process.stderr


def test_strict_raises_where_the_model_is_loaded_and_where_its_engine_is_made(checkpoints: Path) -> None:
    path = str(builders.tiny_llama(checkpoints))
    early, late = run(TRAIN, path, strict=True, RANK="1", WORLD_SIZE="2").stdout.splitlines()
    assert early.startswith("ConfigError LlamaForCausalLM is loaded whole") and "without --strict" in early
    assert late.startswith("LoadOrderWarning LlamaForCausalLM: every rank holds")
