"""The Python code of the pages and docstrings runs as it is written, on two ranks, with small checkpoints.

Of the other blocks, test_docs.py parses the commands, because they install, compile or start a framework: the examples
run in pipelines/test_examples.py, the frameworks in tests/frameworks. `text` shows output, and `diff` a proposal.
"""

import contextlib
import gc
import importlib
import inspect
import io
import json
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

import lowmem_load.llamafactory
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.integrations.install import uninstall
from tests import builders
from tests.hub import hub
from tests.model_digest import differing
from tests.multi_rank import test_diffusers as diffusion
from tests.multi_rank import test_parts as parts
from tests.multi_rank.test_partial_vision_language import PARTITION, sample
from tests.multi_rank.test_push_weights import Taker
from tests.multi_rank.test_remote_loads import S3
from tests.parity import ADAM, BF16, FP32
from tests.pipelines.pipeline import import_example
from tests.ranks import REPO, run_ranks
from tests.remote.range_server import range_server
from tests.unit.test_docs import DOCUMENTS, blocks

DS_CONFIG = {**FP32, **ADAM}
PATH, LLM, VISION = "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-8B", "google/siglip-so400m-patch14-384"
QWEN = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-Embedding-8B")
LLAVA = "llava-hf/llava-1.5-7b-hf"
OWN, STORES = "docs/howto/own_module.md", "docs/howto/stores.md"

WORDS = {
    '"cuda"': '"cpu"',
    '"/models/': '"meta-llama/',
    "/tmp/small": "small",
    "/dev/shm/": "",
    "500": "2",  # steps
    ", bf16=True": "",
    'output_dir="out"': 'output_dir="out", bf16=False, accelerator_config=on_cpus()',
}
"""What stands in the code, and what runs in its place."""

GIVEN: dict[str, list[str]] = {
    "README.md": [""],
    "docs/quickstart.md": ["", ""],
    "docs/howto/fsdp2.md": ["batches", "", "name=path", ""],
    "docs/howto/other_frameworks.md": [
        "deepspeed",
        "torch lowmem_load AutoConfig AutoModelForCausalLM path config apply_fsdp2 fsdp_kwargs engine_config device",
        "installed on_cpus SentenceTransformer SentenceTransformerTrainingArguments",
        "lowmem_load LightningModule path ds_config",
    ],
    "docs/howto/own_module.md": [
        "Policy config=width",
        "",
        "model=seeing",
        "model=empty_policy",
        "mesh",
        "DiffusionPipeline",
        "model=with_lora rank FluxPipeline",
    ],
    "docs/howto/partial_zero3.md": [
        "ds_config batches=pictures",
        "on_cpus Trainer TrainingArguments PARTS path=llava ds_config=stage_3 dataset",
    ],
    "docs/howto/plan.md": [""],
    "docs/howto/quantized.md": [
        "deepspeed torch load_model get_peft_model LoraConfig path ds_config=in_bf16",
        "nn module=linear_4bit",
    ],
    "docs/howto/rlhf.md": [
        "path TRAINED REFERENCE REWARD",
        "engine client",
        "inference_model",
        "save_model engine=lora_engine llm LoRARequest prompts",
        "engine state",
        "vllm llm",
        "vllm",
    ],
    "docs/howto/saving.md": ["engine"],
    "docs/howto/stores.md": ["load_model ds_config", "lowmem_load AutoTokenizer AutoModelForCausalLM installed zero3"],
    "docs/howto/trainer_accelerate_trl.md": [
        "on_cpus dataset",
        "on_cpus=on_cpus_fsdp2",
        "",
        "on_cpus path loader",
        "on_cpus",
        "path",
    ],
    "docs/howto/training_checkpoints.md": ["deepspeed load_model saved ds_config mesh model", ""],
}
"""What a reader's script has by then, for each block: names of `Script` or of a package, or `name=name of Script`."""


RUNS_ALONE = ("consolidate",)
"""Examples of one process: on two ranks one would replace the folder that the other reads."""

PRINTS_ITS_ERROR = ("ConfigError", "CheckpointError", "UnsupportedError")


def examples() -> dict[str, str]:
    """Returns the code of the docstring of each public name, "" where there is none. It is the last section."""
    modules = (lowmem_load, lowmem_load.llamafactory)
    docs = {name: inspect.getdoc(getattr(module, name)) or "" for module in modules for name in module.__all__}
    return {name: textwrap.dedent(doc.partition("\nExample:\n")[2]) for name, doc in docs.items()}


class Policy(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


def policy() -> Policy:
    torch.manual_seed(0)
    return Policy(8)


def empty_policy() -> Policy:
    """Returns one in shards that nothing has filled."""
    model = fully_shard(policy().to("meta"))
    return model.to_empty(device="cpu")


def seeing() -> nn.Module:
    model = parts.on_meta({"llm": LLM, "vision": VISION})
    torch.manual_seed(0)  # the projector is initialised
    return model


class LightningModule(nn.Module):
    """Stands in for Lightning's, which is not installed: a class of it is used as soon as it is there."""

    def __init_subclass__(cls) -> None:
        cls().configure_model()


def on_cpus(config: str) -> Callable[[], Any]:
    """Returns what examples on CPU ranks pass as `accelerator_config`, after it has told accelerate of the ranks."""
    uninstall()
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    found = getattr(import_example("common"), config)()
    return lambda: found


def engine(model: Any = None) -> Any:
    model = model or lowmem_load.load_model(PATH, DS_CONFIG)
    return deepspeed.initialize(model=model.train(), config=DS_CONFIG)[0]


def lora_engine() -> Any:
    from peft import LoraConfig, get_peft_model

    return engine(get_peft_model(lowmem_load.load_model(PATH, DS_CONFIG), LoraConfig(target_modules=["q_proj"])))


def save_training() -> None:
    trained = engine()
    for folder in ("out", "checkpoints", "output/checkpoint-2"):
        trained.save_checkpoint(folder)


def linear_4bit() -> nn.Module:
    import bitsandbytes

    return bitsandbytes.nn.Linear4bit(8, 8, quant_storage=torch.bfloat16, device="meta")


def serve(request: Any) -> None:
    assert Path(request.lora_path, "adapter_model.safetensors").exists()


def dataset() -> Any:
    from datasets import Dataset

    tokens = list(range(3, 11))
    return Dataset.from_list([{"input_ids": tokens, "labels": tokens}] * 8)


SCRIPT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "path": lambda _: PATH,
    "llava": lambda _: LLAVA,
    "device": lambda _: "cpu",
    "rank": lambda _: torch.distributed.get_rank(),
    "mesh": lambda _: init_device_mesh("cpu", (2,)),
    "init_device_mesh": lambda _: lambda *_: init_device_mesh("cpu", (2,)),
    "fully_shard": lambda _: fully_shard,
    "nn": lambda _: nn,
    "ds_config": lambda _: DS_CONFIG,
    "in_bf16": lambda _: {**BF16, **ADAM},
    "stage_3": lambda _: {"zero_optimization": {"stage": 3}},
    "config": lambda _: AutoConfig.from_pretrained(PATH),
    "model": lambda _: lowmem_load.load_model(PATH, DS_CONFIG),
    "engine": lambda _: engine(),
    "lora_engine": lambda _: lora_engine(),
    "saved": lambda _: save_training(),
    "installed": lambda _: lowmem_load.install(),
    "zero3": lambda _: HfDeepSpeedConfig(DS_CONFIG),
    "HfDeepSpeedConfig": lambda _: HfDeepSpeedConfig,
    "on_cpus": lambda _: on_cpus("accelerator_config"),
    "on_cpus_fsdp2": lambda _: on_cpus("fsdp2_config"),
    "dataset": lambda _: dataset(),
    "loader": lambda _: torch.utils.data.DataLoader(dataset().with_format("torch"), batch_size=2),
    "batch": lambda _: sample(3, 1),
    "batches": lambda _: [sample(3, 1)] * 2,
    "pictures": lambda _: [sample(step, torch.distributed.get_rank()) for step in range(4)],
    # verl, Lightning
    "apply_fsdp2": lambda _: lambda module, *_: fully_shard(module),
    **dict.fromkeys(("fsdp_kwargs", "engine_config"), lambda _: {}),
    "LightningModule": lambda _: LightningModule,
    # modules of one's own, and diffusers
    "Policy": lambda _: Policy,
    "width": lambda _: 8,
    "empty_policy": lambda _: fully_shard(policy().to("meta")).to_empty(device="cpu"),
    "seeing": lambda _: seeing(),
    "with_lora": lambda values: diffusion.adapted(values["model"]),
    "PARTS": lambda _: PARTITION,
    "linear_4bit": lambda _: linear_4bit(),
    # reinforcement learning
    **{name: lambda _, name=name: getattr(import_example("rlhf"), name) for name in ("TRAINED", "REFERENCE", "REWARD")},
    "client": lambda _: dict,
    "vllm": lambda _: vllm_patches(),
    "state": lambda script: {
        name: tensor.clone() for bucket in lowmem_load.iter_weights(script["engine"]) for name, tensor in bucket
    },
    "VLLMClient": lambda _: lambda *_, **__: Taker(),
    "send_to_inference": lambda _: lambda *_: None,
    "inference_model": lambda _: SimpleNamespace(load_weights=dict),
    "LoRARequest": lambda _: SimpleNamespace,
    "llm": lambda _: SimpleNamespace(
        llm_engine=SimpleNamespace(add_lora=serve), generate=lambda *_, **__: None, reset_prefix_cache=lambda: True
    ),
    "prompts": lambda _: ["What is"],
}
"""Makes what a reader's script has. What needs a package that is not installed has a stand-in."""

MODULES = ("torch", "deepspeed", "lowmem_load", "sys", "warnings")
PACKAGES = ("lowmem_load", "lowmem_load.llamafactory", "transformers", "peft", "diffusers", "sentence_transformers")


def vllm_patches() -> ModuleType:
    """Enters stand-ins for vLLM's modules of patches, which is not installed here; returns its package."""
    found = {
        "vllm.model_executor.model_loader.checkpoint_weight_patch": (
            *("CheckpointWeightPatch", "load_checkpoint_weight_patches"),
        ),
        "vllm.distributed.weight_transfer.sparse_nccl_engine": ("SparseWeightPatch",),
    }
    for name, members in found.items():
        parts = name.split(".")
        for package in (".".join(parts[:depth]) for depth in range(1, len(parts) + 1)):
            sys.modules.setdefault(package, ModuleType(package))
        vars(sys.modules[name]).update(dict.fromkeys(members))
    return sys.modules["vllm"]


class Values(dict[str, Any]):
    """The names of a script; `has_all`: those of `SCRIPT` and of packages, too, once they are used."""

    has_all = False

    def give(self, name: str) -> Any:
        if name in SCRIPT:
            return SCRIPT[name](self)
        if name in MODULES:
            return importlib.import_module(name)
        for package in map(importlib.import_module, PACKAGES):
            if hasattr(package, name):
                return getattr(package, name)
        raise KeyError(name)

    def __missing__(self, name: str) -> Any:
        if not self.has_all or name.startswith("__"):
            raise KeyError(name)
        self[name] = self.give(name)
        return self[name]

    def run(self, code: str, title: str) -> None:
        for word, replacement in WORDS.items():
            code = code.replace(word, replacement)
        exec(compile(code, title, "exec"), self)


def run_page(page: str) -> None:
    values = Values()
    for number, (code, wanted) in enumerate(zip(blocks(REPO / page, "python"), GIVEN[page], strict=True)):
        for name in wanted.split():
            variable, _, what = name.partition("=")
            values[variable] = values.give(what or variable)
        values.run(code, f"{page}, block {number}")
        if page == OWN:
            check(number, values)


def check(number: int, values: dict[str, Any]) -> None:
    """Asserts what a block of the page of one's own modules, and of diffusers, has loaded, saved or sent."""
    if number < 4:
        expected = parts.loaded_by_default({"llm": LLM, "vision": VISION}) if number == 2 else policy()
        assert not differing(values["model"], expected), number
    flux = diffusion.diffusers.FluxTransformer2DModel
    if number == 5:
        expected = diffusion.diffusers.DiTTransformer2DModel.from_pretrained("pipeline/transformer")
        assert not differing(values["pipe"].transformer, expected)
    if number == 6:
        torch.distributed.barrier()
        whole, saved = (
            flux.from_pretrained(name, torch_dtype=torch.bfloat16) for name in ("folder/transformer", "out")
        )
        assert not differing(saved, whole)
        whole.load_lora_adapter("lora", adapter_name="default", weight_name="pytorch_lora_weights.safetensors")
        assert not differing(values["model"], whole)


def run_example(name: str) -> None:
    values, printed = Values(), io.StringIO()
    values.has_all = True
    if "checkpoints" in examples()[name]:
        values.give("saved")
    if name in RUNS_ALONE and torch.distributed.get_rank():
        return
    with contextlib.redirect_stdout(printed):
        values.run(examples()[name], f"the example of {name}")
    assert printed.getvalue() or name not in PRINTS_ITS_ERROR, "there was no error"


def run_all(folder: str) -> None:
    """Rank function: one process group serves all."""
    DistributedInterface()
    for category in (lowmem_load.FallbackWarning, lowmem_load.LoadOrderWarning):
        warnings.simplefilter("error", category)
    for name in (*GIVEN, *examples()):
        os.chdir(Path(folder, name))
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            stack.enter_context(patch.object(sys, "argv", ["first_load.py", "small", "small-trained"]))
            for function in ("init_process_group", "destroy_process_group"):
                stack.enter_context(patch.object(torch.distributed, function, lambda *_: None))
            if name == STORES:
                stack.enter_context(hub(Path(folder, "made/tiny"), PATH))
            run_page(name) if name in GIVEN else run_example(name)
        torch.distributed.barrier()
        uninstall()
        unset_hf_deepspeed_config()
        gc.collect()


def write_diffusers(made: Path) -> None:
    from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel

    flux = diffusion.diffusers.FluxTransformer2DModel(**diffusion.SETTINGS["FluxTransformer2DModel"])
    flux.save_pretrained(made / "flux")
    sizes = {"num_attention_heads": 2, "attention_head_dim": 4, "out_channels": 8, "num_layers": 1, "sample_size": 8}
    transformer = DiTTransformer2DModel(**sizes, num_embeds_ada_norm=8)
    vae = AutoencoderKL(**diffusion.SETTINGS["AutoencoderKL"])
    DiTPipeline(transformer, vae, DDIMScheduler()).save_pretrained(made / "pipeline")


def write(folder: Path, made: Path, checkpoints: Path) -> None:
    """Writes the files that the pages name; links to models."""
    import_example("make_model").main([str(made / "tiny")])
    write_diffusers(made)
    of_parts = parts.write(made, checkpoints)
    links: dict[str, Any] = dict.fromkeys((PATH, *QWEN, "small"), made / "tiny")
    links |= {LLM: of_parts["llm"], VISION: of_parts["vision"], LLAVA: builders.tiny_llava(checkpoints)}
    links |= {"folder/transformer": made / "flux", "pipeline": made / "pipeline"}
    for name, path in links.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(path)
    (folder / "checkpoint").mkdir()
    state = policy().state_dict()
    save_file(state, folder / "checkpoint" / "model.safetensors")
    gamma = {f"net.{name}".replace(".weight", ".gamma"): tensor for name, tensor in state.items()}
    torch.save(gamma, folder / "last.pth")
    (folder / "ds_config.json").write_text(json.dumps(DS_CONFIG))
    shutil.copy(REPO / "examples" / "ds_z3.json", folder)
    [settings] = blocks(REPO / "docs" / "howto" / "other_frameworks.md", "yaml")
    (folder / "train.yaml").write_text(settings)


def test_no_block_is_left_out() -> None:
    """A new block needs an entry of `GIVEN`, which may be empty. api.md has the examples of the docstrings."""
    code = {str(page.relative_to(REPO)): len(blocks(page, "python")) for page in DOCUMENTS if page.name != "api.md"}
    assert {page: number for page, number in code.items() if number} == {page: len(GIVEN[page]) for page in GIVEN}


@pytest.mark.parametrize("name", examples())
def test_each_docstring_has_an_example_of_three_to_six_lines(name: str) -> None:
    assert 3 <= len(examples()[name].splitlines()) <= 6


def test_the_code_of_each_page_and_docstring_runs(tmp_path: Path, checkpoints: Path) -> None:
    for package in ("bitsandbytes", "peft", "trl"):
        pytest.importorskip(package)
    files, made = tmp_path / "files", tmp_path / "made"
    files.mkdir(), made.mkdir()
    write(files, made, checkpoints)
    for name in (*GIVEN, *examples()):
        shutil.copytree(files, tmp_path / name, symlinks=True)
    (tmp_path / STORES / PATH).unlink()  # it is on the Hub
    shutil.copytree(made / "tiny", tmp_path / "bucket/models/Llama-3.1-70B")
    with range_server({"bucket": tmp_path / "bucket"}) as server:
        run_ranks(run_all, str(tmp_path), timeout_s=400, env={**S3, "AWS_ENDPOINT_URL": server.url})
