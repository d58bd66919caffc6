"""What stands in for what transformers has: alike to it, and gone afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers.integrations.deepspeed as hf_deepspeed
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from lowmem_load.formats.safetensors import Safetensors
from lowmem_load.hf.active import deepspeed_config
from lowmem_load.hf.collecting import SymbolicFile
from lowmem_load.hf.loader import Call
from lowmem_load.io.source import LocalFile
from lowmem_load.planning.expression import Expression, hold
from lowmem_load.symbolic.lazy import assigned_data_is_real
from lowmem_load.symbolic.tensor import SymbolicTensor
from tests import builders

ZERO_3 = {"zero_optimization": {"stage": 3}}
X = torch.arange(12, dtype=torch.bfloat16).view(3, 4)


def read_nothing(expression: Expression, reason: str) -> torch.Tensor:
    raise AssertionError(f"{reason} read {expression}")


# -- the global DeepSpeed configuration ------------------------------------------------------------------------------


@pytest.fixture
def outer() -> Iterator[HfDeepSpeedConfig]:
    """One that a user has made."""
    before = hf_deepspeed._hf_deepspeed_config_weak_ref
    yield HfDeepSpeedConfig({"zero_optimization": {"stage": 3, "reduce_bucket_size": 5}})
    hf_deepspeed._hf_deepspeed_config_weak_ref = before


def test_a_dict_is_visible_and_neither_kept_nor_changed(outer: HfDeepSpeedConfig) -> None:
    config = {**ZERO_3, "bf16": {"enabled": True}}
    with deepspeed_config(config) as inner:
        assert inner is not None and inner.config == config and inner.config is not config
        assert hf_deepspeed.deepspeed_config() is inner.config
    assert hf_deepspeed.deepspeed_config() is outer.config
    assert config == {**ZERO_3, "bf16": {"enabled": True}}


def test_blocks_nest_and_an_error_restores_too(outer: HfDeepSpeedConfig) -> None:
    def fail_inside() -> None:
        with deepspeed_config(ZERO_3) as first:
            with deepspeed_config(None):
                pass
            assert first is not None and hf_deepspeed.deepspeed_config() is first.config
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert hf_deepspeed.deepspeed_config() is outer.config


# -- imports ---------------------------------------------------------------------------------------------------------

NEEDED_BY_SOME = (
    *(
        "formats.torch_zip",
        "formats.inert_pickle",
        "formats.plain_values",
        "hf.dequantize",
        "frameworks",
        "hf.saver",
    ),
    *("dtensor",),
    *(
        "resume",
        "saving",
        "partial",
        "lazy_weights",
        "integrations.accelerate",
        "integrations.llamafactory",
        "cli",
    ),
)


PROGRAM = """
import sys, lowmem_load
lowmem_load.load_model, lowmem_load.streaming
print(*sys.modules)
import torch, transformers.modeling_utils
planned = lowmem_load.plan(sys.argv[1], {"zero_optimization": {"stage": 3}}, rank=511, world_size=512)
assert planned.costs.read_bytes == planned.costs.needed_bytes < 1000
lowmem_load.install()
assert not torch.distributed.is_initialized()
if hasattr(transformers.PreTrainedModel, "maybe_distribute_model"):  # else transformers shards no model
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    lowmem_load.load_model(sys.argv[1], torch.distributed.init_device_mesh("cpu", (1,)))
assert "deepspeed" not in sys.modules, "deepspeed was imported"
import deepspeed
assert deepspeed.initialize.__code__.co_filename == lowmem_load.replaced.__file__, "deepspeed is not hooked"
"""


def test_a_plain_process_imports_only_what_it_needs(tmp_path: Path) -> None:
    """Each module costs every process that loads a model. Digests and plans need no group, shards no DeepSpeed."""
    command = [sys.executable, "-c", PROGRAM, str(builders.tiny_llama(tmp_path))]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    ours = {name for name in run.stdout.splitlines()[0].split() if name.startswith("lowmem_load.")}
    assert not ours & {f"lowmem_load.{name}" for name in NEEDED_BY_SOME}
    assert len(ours) <= 92  # half of all


# -- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs", "name"),
    [
        (("folder",), {}, "folder"),
        ((Path("some/folder"),), {}, "some/folder"),
        ((), {"pretrained_model_name_or_path": "folder"}, "folder"),
        ((None,), {"config": 1}, "Linear"),
        ((), {}, "Linear"),
    ],
)
def test_a_call_is_named_by_what_it_loads(args: tuple[object, ...], kwargs: dict[str, object], name: str) -> None:
    assert Call(print, nn.Linear, args, kwargs).name == name


def test_a_call_asks_for_the_loading_info_whatever_the_caller_did() -> None:
    model = nn.Linear(1, 1)

    def ordinary(cls: type, *args: object, **kwargs: object) -> object:
        return model, {"cls": cls, "args": args, **kwargs}

    kwargs = {"output_loading_info": False, "dtype": "auto"}
    found, info = Call(ordinary, nn.Linear, ("folder",), kwargs).run()
    assert found is model
    assert info == {"cls": nn.Linear, "args": ("folder",), "output_loading_info": True, "dtype": "auto"}
    assert kwargs == {"output_loading_info": False, "dtype": "auto"}


def test_an_ordinary_call_gets_what_was_taken_out_for_describing() -> None:
    """A load that is left to stock under accelerate's FSDP2, which is described without `device_map`."""
    call = Call(lambda *_, **kwargs: (nn.Linear(1, 1), kwargs), nn.Linear, ("folder",), {"device_map": "meta"})
    call.kwargs.pop("device_map")
    assert call.run()[1]["device_map"] == "meta"


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({"x": X, "count": torch.tensor(3)}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    return tmp_path / "a.safetensors"


def symbolic(path: Path) -> SymbolicFile:
    source = LocalFile(str(path))
    try:
        return SymbolicFile(Safetensors().describe(source), read_nothing)
    finally:
        source.close()


def test_a_symbolic_file_says_what_safe_open_says(path: Path) -> None:
    with symbolic(path) as ours, safe_open(path, "pt") as theirs:
        assert sorted(ours.keys()) == sorted(theirs.keys()) == ["count", "x"]
        assert ours.metadata() == theirs.metadata() == {"format": "pt"}
        for name in ("x", "count"):
            found, expected = ours.get_slice(name), theirs.get_slice(name)
            assert (found.get_shape(), found.get_dtype()) == (expected.get_shape(), expected.get_dtype())
        tensor = ours.get_tensor("x")
        assert isinstance(tensor, SymbolicTensor)
        assert (tensor.shape, tensor.dtype) == (X.shape, X.dtype)


# -- symbolic values as data of real parameters ----------------------------------------------------------------------


def test_symbolic_data_of_a_real_parameter_is_read() -> None:
    reasons: list[str] = []

    def read_now(expression: Expression, reason: str) -> torch.Tensor:
        reasons.append(reason)
        assert expression is value.expression
        return X.float()

    value = SymbolicTensor(hold(X.float()), read_now)
    parameter = nn.Parameter(torch.zeros(3, 4))
    with assigned_data_is_real():
        parameter.data = value
    assert reasons == ["assigning to data"]
    assert type(parameter) is nn.Parameter
    assert torch.equal(parameter.detach(), X.float())


def test_other_assignments_to_data_read_nothing() -> None:
    parameter, real = nn.Parameter(torch.zeros(2)), torch.ones(2)
    described = nn.Parameter(SymbolicTensor(hold(torch.zeros(2)), read_nothing))
    with assigned_data_is_real():
        parameter.data = real
        described.data = SymbolicTensor(hold(real), read_nothing)
    assert parameter.data_ptr() == real.data_ptr()
    assert isinstance(described, SymbolicTensor)
