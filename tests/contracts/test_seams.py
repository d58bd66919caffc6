"""The seams notice when DeepSpeed or transformers is not what they were written for, before they rely on it."""

import ast
import enum
import inspect
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.comm import comm as deepspeed_comm
from deepspeed.ops import op_builder
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper
from deepspeed.runtime.zero import linear, offload_config
from deepspeed.runtime.zero import partition_parameters as pp
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import groups
from torch import nn

from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.engines import engine as zero3_engine
from lowmem_load.engines import hooks, ops, parameters, zero3_target
from lowmem_load.engines import partition as zero3
from lowmem_load.errors import IncompatibleVersionError
from lowmem_load.models import loader as hf
from lowmem_load.partial import partial_engine

OF_DEEPSPEED = r"deepspeed \d\S* lacks .*{}.*; lowmem_load works with deepspeed 0\.18\.4 to \S+: install deepspeed==0\."
STAGE_3 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}


def check(seam: ModuleType, optimize: int = -1) -> None:
    """Checks what a seam needs, as it does when it is imported."""
    code = compile(Path(str(seam.__file__)).read_text(encoding="utf-8"), str(seam.__file__), "exec", optimize=optimize)
    exec(code, {"__name__": seam.__name__})


@pytest.mark.parametrize(
    ("owner", "name", "seam"),
    [
        (pp.Init, "_convert_to_deepspeed_param", zero3),
        (pp, "ZeroParamStatus", zero3),
        (linear, "zero3_linear_wrap", zero3),
        (groups, "_get_zero_param_intra_parallel_group", zero3),
        (op_builder, "AsyncIOBuilder", zero3),
        (AsyncPartitionedParameterSwapper, "swap_out_and_release", zero3),
        (zero_utils, "is_zero_param", parameters),
        (DeepSpeedEngine, "is_gradient_accumulation_boundary", zero3_engine),
        (DeepSpeedZeroOptimizer_Stage3, "_get_norm_groups", zero3_engine),
        (PartitionedParameterCoordinator, "reset_step", zero3_engine),
        (lr_schedules, "VALID_LR_SCHEDULES", zero3_engine),
        (DeepSpeedEngine, "_zero3_consolidated_16bit_state_dict", hooks),
    ],
)
def test_a_deepspeed_without_a_name_is_refused(
    owner: object, name: str, seam: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(IncompatibleVersionError, match=OF_DEEPSPEED.format(name)):
        check(seam)


def test_a_name_that_only_newer_releases_have_is_checked_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: package)
    assert zero3_target.fp32_rules() is None
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime/keep_in_fp32.py").write_text("keep_in_fp32_pattern = print")
    with pytest.raises(IncompatibleVersionError, match=OF_DEEPSPEED.format("buffers_to_keep_in_fp32")):
        zero3_target.fp32_rules()


@pytest.mark.parametrize(
    ("module", "name"), [(pp, "ZeroParamStatus"), (pp, "PartitionedParamStatus"), (offload_config, "OffloadDeviceEnum")]
)
def test_a_check_survives_the_optimisation_of_bytecode(
    module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under python -O, which drops asserts."""
    monkeypatch.setattr(module, name, enum.Enum(name, ["other"]))
    with pytest.raises(IncompatibleVersionError, match=OF_DEEPSPEED.format(name)):
        check(zero3, optimize=1)


@pytest.mark.parametrize(
    "name", ["dtype", "num_ranks_in_param_group", "param_swapper", "remote_device", "zero_param_process_group"]
)
def test_a_zero_init_that_does_not_set_an_attribute_is_refused(
    name: str, lone_process: DistributedInterface, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary = pp.Init.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        ordinary(self, *args, **kwargs)
        delattr(self, name)

    init.__wrapped__ = ordinary  # type: ignore[attr-defined]
    monkeypatch.setattr(pp.Init, "__init__", init)
    with pytest.raises(IncompatibleVersionError, match=OF_DEEPSPEED.format(rf"Init\.{name}")):
        zero3.Partitioner.from_config(STAGE_3)


def test_a_parameter_that_is_not_given_an_attribute_is_refused(
    lone_process: DistributedInterface, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitioner = zero3.Partitioner.from_config(STAGE_3)
    ordinary = pp.Init._convert_to_deepspeed_param

    def convert(self: Any, parameter: nn.Parameter) -> None:
        ordinary(self, parameter)
        del parameter.ds_numel

    monkeypatch.setattr(pp.Init, "_convert_to_deepspeed_param", convert)
    with pytest.raises(IncompatibleVersionError, match=OF_DEEPSPEED.format(r"Parameter\.ds_numel")):
        partitioner.new_parameter(torch.Size([2]), torch.float32, requires_grad=True, ds_id=0)


@pytest.mark.parametrize(
    ("of_engine", "name"),
    [
        *((True, name) for name in ("basic_optimizer", "client_optimizer", "device", "global_steps", "optimizer")),
        *((False, name) for name in ("inf_or_nan_tracker", "overflow", "parameter_offload")),
    ],
)
def test_an_engine_that_does_not_set_an_attribute_is_refused(of_engine: bool, name: str) -> None:
    optimizer = DeepSpeedZeroOptimizer_Stage3.__new__(DeepSpeedZeroOptimizer_Stage3)
    engine = SimpleNamespace(basic_optimizer=None, client_optimizer=None, device=None, global_steps=0)
    engine.optimizer = optimizer
    vars(optimizer).update(inf_or_nan_tracker=None, overflow=False, parameter_offload=None)
    zero3_engine.check_engine(engine)
    delattr(engine if of_engine else optimizer, name)
    with pytest.raises(IncompatibleVersionError, match=OF_DEEPSPEED.format(rf"\.{name}")):
        zero3_engine.check_engine(engine)


@pytest.mark.parametrize(("owner", "name"), [(deepspeed_comm, "cdb"), (groups, "_WORLD_GROUP")])
def test_a_comm_that_could_not_be_reset_is_not_brought_up(
    owner: object, name: str, lone_process: DistributedInterface, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(owner, name)
        with pytest.raises(IncompatibleVersionError, match=OF_DEEPSPEED.format(name)):
            ops.bring_up_comm("gloo", timedelta(minutes=1))


def test_an_installation_without_sources_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def getsource(_: object) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr(inspect, "getsource", getsource)
    for seam in (hf, zero3, zero3_engine, parameters):
        check(seam)


@pytest.mark.parametrize(
    ("module", "roots"),
    [
        (zero3, {"self._init", "init", "Init", "groups", "self._swapper", "swapper"}),
        (zero3_engine, {"self.engine", "self.engine.optimizer", "zero", "self.engine.optimizer.parameter_offload"}),
        (partial_engine, {"self.zero3"}),
    ],
)
def test_what_is_used_is_checked(module: ModuleType, roots: set[str]) -> None:
    """Whatever the seams reach through these names is named by a check."""
    checked = {
        node.value
        for seam in (zero3, zero3_engine)
        for call in ast.walk(ast.parse(inspect.getsource(seam)))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("require", "require_attributes")
        for node in ast.walk(call)
        if isinstance(node, ast.Constant)
    }
    assert "_aligned_size" in checked
    used = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in roots
    }
    of_every_module = set(dir(nn.Module)) if module is partial_engine else set()
    assert used
    assert used - checked - of_every_module == set()
