"""Quantized weights: settings that would destroy packed ones, quantizers of transformers, functions described once."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.quantizers.auto import AutoHfQuantizer

from lowmem_load.config.settings import Settings, read_settings
from lowmem_load.engines.zero3_target import check_packed
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import read_whole
from lowmem_load.models.quantizers import described_quantizers
from lowmem_load.planning import expression as ex
from lowmem_load.quantized.dequantized import Patterns
from lowmem_load.quantized.format import Packing, QuantizedTensor
from lowmem_load.symbolic.tensor import SymbolicTensor, expression_of
from tests.described import described, write_file

BF16 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_file(tmp_path)


def quantized(tensors: Mapping[str, Any]) -> QuantizedTensor:
    """Stands for x packed; z goes with it."""
    packing = Packing(
        "halves", {"scales": tensors["z"].expression}, pytest.fail, storage_option="bnb_4bit_quant_storage"
    )
    return QuantizedTensor.of(tensors["x"], tensors["x"].expression, packing, blocks=8)


def module(w: torch.Tensor) -> nn.Module:
    made = nn.Module()
    made.register_parameter("w", w if isinstance(w, nn.Parameter) else nn.Parameter(w))
    return made


# -- settings --------------------------------------------------------------------------------------------------------


def settings_of(config: Mapping[str, Any], **options: Any) -> Settings:
    return read_settings({**BF16, **config}, world_size=2, **options)


def zero(**section: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **section}}


NVME = zero(offload_param={"device": "nvme", "nvme_path": "/nowhere"})


def packed_as(file: Path, dtype: torch.dtype) -> nn.Module:
    return described(file, lambda tensors, _: module(quantized({**tensors, "x": tensors["x"].to(dtype)}))).model


LOSSY = (
    *("zero_quantized_weights", "zero_quantized_nontrainable_weights"),
    *("use_all_reduce_for_fetch_params", "stage3_use_all_reduce_for_fetch_params"),
)


@pytest.mark.parametrize(
    ("config", "options", "dtype", "error", "words"),
    [
        ({}, {}, torch.float32, ConfigError, "w: its packed values are stored as torch.float32, and DeepSpeed"),
        ({}, {}, torch.float16, ConfigError, "use bnb_4bit_quant_storage=torch.bfloat16"),
        *((zero(**{name: True}), {}, torch.bfloat16, ConfigError, f"^{name}: ") for name in LOSSY),
        ({}, {"partition": "w"}, torch.bfloat16, UnsupportedError, "^partition= with packed weights"),
        (NVME, {}, torch.uint8, UnsupportedError, "writes to nvme are of torch.bfloat16"),
    ],
)
def test_a_setting_that_takes_the_bytes_for_numbers_is_refused(
    config: dict[str, Any], options: dict[str, Any], dtype: torch.dtype, error: type[Exception], words: str, file: Path
) -> None:
    settings = settings_of(config, **options)
    with pytest.raises(error, match=words):
        check_packed(packed_as(file, dtype), settings)
    check_packed(described(file, lambda t, _: module(t["x"])).model, settings)  # no packed weight, no matter


@pytest.mark.parametrize(("config", "dtype"), [({}, torch.bfloat16), ({}, torch.uint8), (NVME, torch.bfloat16)])
def test_storage_that_deepspeed_leaves_alone_is_not(config: dict[str, Any], dtype: torch.dtype, file: Path) -> None:
    check_packed(packed_as(file, dtype), settings_of(config))


class CompressedTensorsDequantize:
    """By its name, as it has many: it needs a package that is not installed."""


class Quantizer:
    def __init__(self, conversions: list[Any]) -> None:
        self.quantization_config = SimpleNamespace(quant_method="compressed-tensors", dequantize=True)
        self._conversions = conversions

    def validate_environment(self) -> None:
        pass

    def update_weight_conversions(self, *_: Any) -> list[Any]:
        return self._conversions


@pytest.mark.parametrize("is_partitioned", [True, False])
@pytest.mark.parametrize("is_stacked", [True, False])
def test_experts_that_would_be_dequantized_whole_are_refused(
    is_partitioned: bool, is_stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations: list[object] = [CompressedTensorsDequantize(), *([object()] if is_stacked else [])]
    conversions = [SimpleNamespace(), SimpleNamespace(operations=[]), SimpleNamespace(operations=operations)]
    monkeypatch.setattr(AutoHfQuantizer, "from_config", lambda *_, **__: Quantizer(conversions))
    with described_quantizers(is_partitioned=is_partitioned):
        quantizer: Any = AutoHfQuantizer.from_config(None)
        quantizer.validate_environment()
        if is_partitioned and is_stacked:
            with pytest.raises(UnsupportedError, match=r"compressed-tensors.*the experts of this model in full"):
                quantizer.update_weight_conversions([], None)
        else:
            assert quantizer.update_weight_conversions([], None) is conversions


@pytest.mark.parametrize("is_partitioned", [True, False])
@pytest.mark.parametrize("method", ["nvfp4", "mxfp8", None])
def test_experts_without_a_quantizer_are_refused_when_quantized(is_partitioned: bool, method: str | None) -> None:
    import transformers.core_model_loading as loading

    owner = getattr(loading, "Inkling2LoopDequantizeExperts", None)
    if owner is None:
        pytest.skip("transformers before 5.24")
    names = ["w", "scale", "amax", "denominator"][: {"nvfp4": 4, "mxfp8": 2, None: 1}[method]]
    shapes = {"w": (2, 3, 32), "scale": (2, 3, 4 if method == "nvfp4" else 1), "amax": (2,), "denominator": (2,)}
    tensors = {name: torch.ones(shapes[name]) for name in names}
    with described_quantizers(is_partitioned=is_partitioned):
        if is_partitioned and method:
            with pytest.raises(UnsupportedError, match=f"{method}.*dequantizes the experts of this model in full"):
                owner().convert(tensors, names, ["experts"])
        else:
            wide = 64 if method == "nvfp4" else 32
            sources = [*names, None, None, None][:4]
            assert owner().convert(tensors, sources, ["experts"])["experts"].shape == (2, 3, wide)


def read(expression: ex.Expression, reason: str = "") -> torch.Tensor:
    with Executor() as executor:
        return read_whole(executor, expression)


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    return read(expression_of(tensor))


def symbolic(tensor: torch.Tensor) -> SymbolicTensor:
    return SymbolicTensor(ex.hold(tensor, str(float(tensor.sum()))), read)


def scaled(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows = torch.cat([weight, weight[:1]]).reshape(-1, 2)
    return (rows.to(torch.float64) * scale[:, None]).flip(0).t()[:, 1:]


def test_each_gets_its_own_values_and_torch_is_asked_once() -> None:
    patterns, calls = Patterns(), []

    def counted(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return scaled(weight, scale)

    experts = [(torch.rand(3, 4), torch.rand(8)) for _ in range(5)]
    found = [patterns.applied(counted, tuple(map(symbolic, expert)), "scaled") for expert in experts]
    assert len(calls) == 1
    assert len({id(each.expression.pattern) for each in found if isinstance(each.expression, ex.Instance)}) == 1
    for made, expert in zip(found, experts, strict=True):
        expected = scaled(*expert)
        assert (made.shape, made.stride(), made.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert torch.equal(value_of(made), expected)
    stacked = torch.stack(found)[:, 1]
    assert torch.equal(value_of(stacked), torch.stack([scaled(*expert) for expert in experts])[:, 1])


def test_other_shapes_strides_dtypes_and_settings_are_described_again() -> None:
    patterns, calls = Patterns(), []

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor.shape)
        return tensor + 1

    x = torch.rand(2, 2)
    arguments = [(x, 0), (x[:1], 0), (x.double(), 0), (x, 1), (x, 0)]
    for tensor, settings in arguments:
        assert torch.equal(value_of(patterns.applied(counted, (symbolic(tensor),), settings)), tensor + 1)
    assert torch.equal(value_of(patterns.applied(counted, (symbolic(x).t(),), 0)), x.t() + 1)
    assert len(calls) == 5


def test_a_function_that_asks_for_values_is_called_each_time() -> None:
    patterns = Patterns()
    for x in (torch.tensor([-1.0, 2.0]), torch.tensor([3.0, -4.0])):
        made = patterns.applied(lambda tensor: tensor * 2 if tensor[0] > 0 else tensor, (symbolic(x),), None)
        assert torch.equal(value_of(made), x * 2 if x[0] > 0 else x)


def test_leaves_are_those_of_the_inputs_and_of_the_pattern() -> None:
    """Not its placeholders; so ranks with other files have other fingerprints, and reports name the operation."""
    patterns = Patterns()
    for x in (torch.tensor([1.0]), torch.tensor([2.0])):
        found = ex.leaves(expression_of(patterns.applied(lambda tensor: tensor * 2, (symbolic(x),), None)))
        assert [type(leaf) for leaf in found] == [ex.Held, ex.Elementwise]
        assert isinstance(found[0], ex.Held)
        assert found[0].origin == str(float(x))
