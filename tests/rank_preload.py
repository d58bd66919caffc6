"""What every rank needs, imported once in the forkserver that the ranks of the tests are forked from.

Makes no threads and no process group: neither survives a fork. Loading shm_comm here does three things: it compiles it
outside any test's timeout, it saves each rank the load, and no rank that is killed can leave torch's build lock behind,
on which all later ranks would wait for ever.
"""

import contextlib
import os
import time
from pathlib import Path

import accelerate  # noqa: F401
import deepspeed
import pytest
import torch
import torch._dynamo
import torch.distributed
import transformers.integrations.deepspeed
import transformers.modeling_utils
import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama  # noqa: F401
from _pytest.assertion import util as assertion
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401  seconds: each engine asks for it

STALE_LOCK_S = 600
"""Seconds after which torch's build lock is taken to be left over; the build itself takes 30 to 90."""


def load_shm_comm() -> None:
    """Loads DeepSpeed's shm_comm extension, compiled first if need be."""
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None or not deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
        return
    lock = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / builder.name / "lock"
    with contextlib.suppress(FileNotFoundError):
        if time.time() - lock.stat().st_mtime > STALE_LOCK_S:
            lock.unlink()
    builder.load(verbose=False)


def rewrite_asserts() -> None:
    """Has pytest rewrite the asserts of test modules, which each rank imports: a failure names the values, in full."""
    options = ["-vv", "--capture=no", "-Wignore::pytest.PytestAssertRewriteWarning"]  # plugins are imported by now
    assertion._config = pytest.Config.fromdictargs({}, [*options, str(Path(__file__).parent)])


torch.set_num_threads(1)
rewrite_asserts()
load_shm_comm()
with contextlib.suppress(ImportError, RuntimeError):  # TRL's lazy imports raise the latter, on older transformers
    from datasets import Dataset  # noqa: F401
    from trl import DPOTrainer, SFTTrainer  # noqa: F401
READY = True
