"""load_model works under each launcher, and without one."""

import sys
from pathlib import Path

import pytest

from tests import builders
from tests.ranks import REPO, reserved_port, run_command

SCRIPT = """
import os, sys
sys.path.insert(0, {repo!r})
import torch
from lowmem_load import get_load_report, load_model
from lowmem_load.distributed.process_group import DistributedInterface
from tests.parity import BF16, differences
from transformers import AutoModelForCausalLM
model = load_model({path!r}, BF16)
reference = AutoModelForCausalLM.from_pretrained({path!r}, dtype=torch.bfloat16)
group = DistributedInterface()
assert differences(model, reference) == []
assert get_load_report(model).world_size == group.world_size
group.barrier()
open(os.path.join({out!r}, f"{{group.rank}}-of-{{group.world_size}}"), "w").close()
"""
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "none": [sys.executable],
    "torchrun": [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", "{port}"],
    "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", "{port}"],
    "accelerate": [
        *(str(BIN / "accelerate"), "launch", "--use_deepspeed", "--num_processes", "2", "--num_machines", "1"),
        *("--zero_stage", "3", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "{port}"),
    ],
}


@pytest.mark.release  # the ordinary tests load in ranks, and in their own process, which no launcher started
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_load_model_under_a_launcher(launcher: str, checkpoints: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    path = builders.tiny_llama(checkpoints)
    script.write_text(SCRIPT.format(repo=str(REPO), path=str(path), out=str(tmp_path)))
    with reserved_port() as port:
        run_command([*(word.format(port=port) for word in LAUNCHERS[launcher]), str(script)], cwd=tmp_path)
    expected = ["0-of-1"] if launcher == "none" else ["0-of-2", "1-of-2"]
    assert sorted(file.name for file in tmp_path.glob("*-of-*")) == expected
