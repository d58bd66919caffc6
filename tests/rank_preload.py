"""What every rank needs, imported once in the forkserver that the ranks of the tests are forked from.

Makes no threads and no process group: neither survives a fork. Loading shm_comm here saves each rank the load and,
where `tests.build_extensions` did not run, compiles it outside any test's timeout.
"""

import contextlib
import gc
from pathlib import Path

import accelerate  # noqa: F401
import deepspeed  # noqa: F401
import pytest
import torch
import torch._dynamo
import torch.distributed
import transformers.integrations.deepspeed
import transformers.modeling_utils
import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral
import transformers.models.qwen2.modeling_qwen2  # noqa: F401
from _pytest.assertion import util as assertion
from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401  seconds: each engine asks for it
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from benchmarks.methods import wait_for_all_gathers
from lowmem_load.engines.ops import load_shm_comm
from lowmem_load.load.load_model import load_model  # noqa: F401
from tests import builders  # noqa: F401
from tests.own_configs import copy_configs


def rewrite_asserts() -> None:
    """Has pytest rewrite the asserts of test modules, which each rank imports: a failure names the values, in full."""
    options = ["-vv", "--capture=no", "-Wignore::pytest.PytestAssertRewriteWarning"]  # plugins are imported by now
    assertion._config = pytest.Config.fromdictargs({}, [*options, str(Path(__file__).parent)])


torch.set_num_threads(1)
rewrite_asserts()
load_shm_comm()
wait_for_all_gathers()
copy_configs()
get_checkpoint_conversion_mapping("llama")  # a thousand patterns, which each rank would compile
with contextlib.suppress(ImportError, RuntimeError):  # TRL's lazy imports raise the latter, on older transformers
    from datasets import Dataset  # noqa: F401
    from trl import DPOTrainer, SFTTrainer  # noqa: F401
# DeepSpeed collects garbage at each step of an engine's start, on rank 0, and so do tests: not what is imported.
gc.freeze()
READY = True
