"""Weights that transformers dequantizes on load: the plan of every rank gives the bytes of its own dequantization."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations import mxfp4 as integration

from lowmem_load import foreign_names
from lowmem_load.errors import IncompatibleVersionError
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import read_whole
from lowmem_load.foreign_names import ForeignName
from lowmem_load.planning import expression as ex
from lowmem_load.planning.reads import ReadLimits
from lowmem_load.quantized.dequantized import FineGrainedFp8, Mxfp4
from lowmem_load.replaced import replaced
from lowmem_load.symbolic.tensor import SymbolicTensor
from tests.conversions import mappings

BF16, FP32 = torch.bfloat16, torch.float32
SMALL = ReadLimits(staging_bytes=64, direct_bytes=64, max_gap_bytes=16)


@contextlib.contextmanager
def described_tensors(
    folder: Path, handlers: Mapping[ForeignName, Any], **tensors: torch.Tensor
) -> Iterator[Callable[[str], SymbolicTensor]]:
    """Writes a file; inside, the handlers of a format are at work, and what is yielded gives its tensors, described.

    Values in memory may be read, those of the file may not.
    """
    path = folder / "model.safetensors"
    save_file(tensors, path)
    file = mappings.symbolic_file(path)
    with Executor() as executor, replaced(handlers):

        def read_now(expression: ex.Expression, reason: str) -> torch.Tensor:
            assert not any(isinstance(leaf, ex.Source) for leaf in ex.leaves(expression)), reason
            return read_whole(executor, expression)

        yield lambda name: SymbolicTensor(file.get_tensor(name).expression, read_now)


def value_of(tensor: SymbolicTensor) -> torch.Tensor:
    with Executor() as executor:
        return read_whole(executor, tensor.expression)


def random_bytes(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


# -- fp8 -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def dequantize_fp8() -> Any:
    """transformers' `Fp8Dequantize`."""
    reason = "transformers 5.6 imports triton for fp8, which torch for CPUs lacks"
    found = pytest.importorskip("transformers.integrations.finegrained_fp8", reason=reason).Fp8Dequantize
    if not hasattr(found, "_dequantize_one"):
        pytest.skip("transformers before 5.8 takes whole blocks alone")
    return found


def by_blocks(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Dequantizes in fp32, element by element: its scale is that of the block that it lies in."""
    rows, columns = (torch.arange(size) // each for size, each in zip(weight.shape[-2:], block, strict=True))
    return (weight.float() * scales.float()[..., rows, :][..., columns]).to(BF16)


@pytest.mark.parametrize("limits", [None, SMALL], ids=["default limits", "small limits"])
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((9, 8), (2, 4)),  # as kv_a_proj: 4.5 blocks, so that 9 rows do not divide by 5 scales
        ((6, 8), (4, 4)),  # 1.5 blocks, and yet 6 rows divide by 2 scales
        ((8, 9), (4, 4)),
        ((7, 5), (4, 3)),
        ((1, 3), (4, 2)),  # less than a block
        ((8, 6), (4, 3)),  # whole blocks
        ((3, 7, 5), (4, 3)),  # experts
    ],
)
def test_the_last_block_of_fp8_may_be_partial(
    shape: tuple[int, ...], block: tuple[int, int], limits: ReadLimits | None, dequantize_fp8: Any, tmp_path: Path
) -> None:
    grid = [-(-size // each) for size, each in zip(shape[-2:], block, strict=True)]
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(shape, generator=generator) * 100).to(torch.float8_e4m3fn)
    scales = torch.rand(*shape[:-2], *grid, generator=generator)
    operation = dequantize_fp8(SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=block)))
    with described_tensors(tmp_path, FineGrainedFp8().handlers(), weight=weight, scales=scales) as get:
        described = operation._dequantize_one(get("weight"), get("scales"), output_dtype=BF16)
    outcome = mappings.fill_all_ranks("w", described, by_blocks(weight, scales, block), None, limits=limits)
    assert not outcome.computed


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_fp8_with_one_scale_for_a_tensor_is_read_by_ranges(
    shape: tuple[int, ...], dequantize_fp8: Any, tmp_path: Path
) -> None:
    weight = (torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) * 100).to(torch.float8_e4m3fn)
    scale = torch.full(shape, 0.37)
    operation = dequantize_fp8(SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=None)))
    expected = operation._dequantize_one(weight, scale, output_dtype=BF16)
    assert torch.equal(expected, (weight.float() * 0.37).to(BF16))
    with described_tensors(tmp_path, FineGrainedFp8().handlers(), weight=weight, scale=scale) as get:
        described = operation._dequantize_one(get("weight"), get("scale"), output_dtype=BF16)
    outcome = mappings.fill_all_ranks("w", described, expected, None)
    assert not outcome.computed


def test_two_quantizers_of_one_model_do_not_share_what_is_described(dequantize_fp8: Any, tmp_path: Path) -> None:
    class Doubled(dequantize_fp8):
        def _dequantize_one(self, quantized: Any, scales: Any, **kwargs: Any) -> Any:
            factor = self.hf_quantizer.quantization_config.factor
            return super()._dequantize_one(quantized, scales, **kwargs) * factor

    weight, scales = torch.arange(16.0).reshape(4, 4).to(torch.float8_e4m3fn), torch.rand(2, 2)
    handlers = {foreign_names.FP8_DEQUANTIZE.of(Doubled): next(iter(FineGrainedFp8().handlers().values()))}
    with described_tensors(tmp_path, handlers, weight=weight, scales=scales) as get:
        for factor in (1, 2):
            config = SimpleNamespace(weight_block_size=(2, 2), factor=factor)
            described = Doubled(SimpleNamespace(quantization_config=config))._dequantize_one(
                get("weight"), get("scales"), output_dtype=BF16
            )
            assert torch.equal(value_of(described), by_blocks(weight, scales, (2, 2)) * factor)


def test_scales_of_other_blocks_than_the_configuration_says_are_left_to_transformers(
    dequantize_fp8: Any, tmp_path: Path
) -> None:
    weight = torch.arange(24.0).reshape(6, 4).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 1)
    operation = dequantize_fp8(SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(4, 4))))
    with described_tensors(
        tmp_path, FineGrainedFp8().handlers(), weight=weight, scales=scales, odd=torch.rand(4, 1)
    ) as get:
        value = value_of(operation._dequantize_one(get("weight"), get("scales"), output_dtype=BF16))
        with pytest.raises(ValueError, match="not divisible by scale grid"):
            operation._dequantize_one(get("weight"), get("odd"))
    assert torch.equal(value, by_blocks(weight, scales, (2, 4)))


# -- mxfp4 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [None, SMALL], ids=["default limits", "small limits"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("shape", [(3, 5, 3, 4), (1, 2, 1, 16), (2, 7, 1, 1)])
def test_mxfp4_is_read_by_ranges(
    shape: tuple[int, ...], dtype: torch.dtype, limits: ReadLimits | None, tmp_path: Path
) -> None:
    """All bytes and all scales, those included whose power of two is no finite number."""
    blocks, scales = random_bytes(*shape), random_bytes(*shape[:-1])
    expected = integration.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    with described_tensors(tmp_path, Mxfp4().handlers(), blocks=blocks, scales=scales) as get:
        described = integration.convert_moe_packed_tensors(get("blocks"), get("scales"), dtype=dtype)
    assert described.stride() == expected.stride()
    outcome = mappings.fill_all_ranks("w", described, expected, None, limits=limits)
    assert not outcome.computed


def test_mxfp4_in_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ordinary = integration.convert_moe_packed_tensors
    monkeypatch.setattr(integration, "convert_moe_packed_tensors", lambda *a, **k: ordinary(*a, **k).transpose(1, 2))
    tensors = {"blocks": random_bytes(1, 4, 1, 2), "scales": random_bytes(1, 4, 1)}
    with (
        described_tensors(tmp_path, Mxfp4().handlers(), **tensors) as get,
        pytest.raises(IncompatibleVersionError, match=r"unpacks codes in another way .*transformers=="),
    ):
        integration.convert_moe_packed_tensors(get("blocks"), get("scales"))


def test_mxfp4_that_does_not_fit_is_transformers_error(tmp_path: Path) -> None:
    tensors = {"blocks": random_bytes(2, 3, 2, 4), "scales": random_bytes(2, 3, 1)}
    with (
        described_tensors(tmp_path, Mxfp4().handlers(), **tensors) as get,
        pytest.raises(AssertionError, match="does not match scales"),
    ):
        integration.convert_moe_packed_tensors(get("blocks"), get("scales"))
