"""The example in the docstring of each public name runs, on one rank, with a small checkpoint."""

import contextlib
import gc
import inspect
import io
import json
import os
import sys
import textwrap
import traceback
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import lowmem_load.llamafactory
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.integrations.install import uninstall
from tests import builders
from tests.ranks import run_ranks
from tests.remote.range_server import range_server

NAME, URL = "Qwen/Qwen3-8B", "s3://bucket/models/Llama-3.1-70B"
DS_CONFIG = {
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
PRINTS_ITS_ERROR = ("ConfigError", "CheckpointError", "UnsupportedError")


def examples() -> dict[str, str]:
    """Returns the code of each, "" where there is none. It is the last section of a docstring."""
    modules = (lowmem_load, lowmem_load.llamafactory)
    docs = {name: inspect.getdoc(getattr(module, name)) or "" for module in modules for name in module.__all__}
    return {name: textwrap.dedent(doc.partition("\nExample:\n")[2]) for name, doc in docs.items()}


@pytest.mark.parametrize("name", examples())
def test_each_has_one_of_three_to_six_lines(name: str) -> None:
    assert 3 <= len(examples()[name].splitlines()) <= 6


class VLLMClient:
    """Stands in for TRL's, which needs a server."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def update_named_params(self, metadata: list[Any], named_params: Any) -> None:
        assert [name for name, _ in named_params] == [name for name, *_ in metadata]


def names_for(code: str) -> dict[str, Any]:
    """Returns what an example may name: public names, other packages', and what a script has by then."""
    names: dict[str, Any] = {"deepspeed": deepspeed, "torch": torch, "warnings": warnings, "sys": sys}
    names |= {name: getattr(transformers, name) for name in ("AutoConfig", "AutoModelForCausalLM")}
    names |= {name: getattr(lowmem_load, name) for name in lowmem_load.__all__}
    names |= {name: getattr(lowmem_load.llamafactory, name) for name in lowmem_load.llamafactory.__all__}
    mesh = init_device_mesh("cpu", (1,))
    tokens = torch.arange(8)[None].expand(8, -1)
    names |= {
        "fully_shard": fully_shard,
        "ds_config": DS_CONFIG,
        "mesh": mesh,
        "batch": {"input_ids": tokens, "labels": tokens},
    }
    names |= {"HfDeepSpeedConfig": HfDeepSpeedConfig, "VLLMClient": VLLMClient}
    names |= {"init_device_mesh": lambda *_: mesh, "send_to_inference": lambda *_: None}
    names["model"] = lowmem_load.load_model(NAME, DS_CONFIG)
    if "engine" in code or "checkpoints" in code:
        names["engine"] = deepspeed.initialize(model=lowmem_load.load_model(NAME, DS_CONFIG), config=DS_CONFIG)[0]
    if "consolidate(" in code:
        names["engine"].save_checkpoint("checkpoints")
    return names


def run_examples(path: str, root: str, url: str) -> dict[str, str]:
    """Rank function: returns the error of each that fails."""
    DistributedInterface()
    failures = {}
    for name, code in examples().items():
        folder = Path(root, name)
        (folder / NAME).parent.mkdir(parents=True)
        (folder / NAME).symlink_to(path)
        os.chdir(folder)
        Path("ds_z3.json").write_text(json.dumps({**DS_CONFIG, "bf16": {"enabled": "auto"}}))
        said = io.StringIO()
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(said):
                exec(compile(code.replace(URL, url), f"the example of {name}", "exec"), names_for(code))
            assert said.getvalue() or name not in PRINTS_ITS_ERROR, "there was no error"
        except (Exception, SystemExit):
            failures[name] = traceback.format_exc()
        uninstall()
        unset_hf_deepspeed_config()
        gc.collect()
    return failures


def test_each_runs(checkpoints: Path, tmp_path: Path) -> None:
    path = builders.tiny_llama(checkpoints)
    with range_server(path) as server:
        [failures] = run_ranks(run_examples, str(path), str(tmp_path), server.url, world_size=1, timeout_s=120)
    assert not failures, "\n".join(failures.values())
