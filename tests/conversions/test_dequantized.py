"""Weights that transformers dequantizes on load: the plan of every rank gives the bytes of its own dequantization."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers.core_model_loading", reason="transformers before 5 has no operations of its own")

from safetensors.torch import save_file

from lowmem_load.describe.tensor import SymbolicTensor
from lowmem_load.errors import IncompatibleVersionError
from lowmem_load.hf import mxfp4
from lowmem_load.planning import expression as ex
from lowmem_load.planning.reads import ReadLimits
from lowmem_load.read.executor import Executor
from lowmem_load.read.whole import read_whole
from tests.conversions import mappings

BF16, FP32 = torch.bfloat16, torch.float32
SMALL = ReadLimits(staging_bytes=64, direct_bytes=64, max_gap_bytes=16)

Symbolic = Callable[[str], SymbolicTensor]


@contextlib.contextmanager
def standing_in(replacements: Callable[[], Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, function in replacements():
            patch.setattr(owner, name, function)
        yield


def symbolic(path: Path, executor: Executor) -> Symbolic:
    """Returns what gives the tensors of a file, described; values in memory may be read, those of the file may not."""
    file = mappings.symbolic_file(path)

    def read_now(expression: ex.Expression, reason: str) -> torch.Tensor:
        assert not any(isinstance(leaf, ex.Source) for leaf in ex.leaves(expression)), reason
        return read_whole(executor, expression)

    return lambda name: SymbolicTensor(file.get_tensor(name).expression, read_now)


def random_bytes(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


# -- mxfp4 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [None, SMALL], ids=["default limits", "small limits"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("shape", [(3, 5, 3, 4), (1, 2, 1, 16), (2, 7, 1, 1)])
def test_mxfp4_is_read_by_ranges(
    shape: tuple[int, ...], dtype: torch.dtype, limits: ReadLimits | None, tmp_path: Path
) -> None:
    """All bytes and all scales, those included whose power of two is no finite number."""
    from transformers.integrations import mxfp4 as integration

    tensors = {"blocks": random_bytes(*shape), "scales": random_bytes(*shape[:-1])}
    save_file(tensors, tmp_path / "model.safetensors")
    expected = integration.convert_moe_packed_tensors(tensors["blocks"], tensors["scales"], dtype=dtype)
    with Executor() as executor, standing_in(mxfp4.replacements):
        get = symbolic(tmp_path / "model.safetensors", executor)
        described = integration.convert_moe_packed_tensors(get("blocks"), get("scales"), dtype=dtype)
    assert described.stride() == expected.stride()
    outcome = mappings.fill_all_ranks("w", described, expected, None, limits=limits)
    assert not outcome.computed


def test_mxfp4_in_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformers.integrations import mxfp4 as integration

    ordinary = integration.convert_moe_packed_tensors
    monkeypatch.setattr(integration, "convert_moe_packed_tensors", lambda *a, **k: ordinary(*a, **k).transpose(1, 2))
    save_file({"blocks": random_bytes(1, 4, 1, 2), "scales": random_bytes(1, 4, 1)}, tmp_path / "m.safetensors")
    with Executor() as executor, standing_in(mxfp4.replacements):
        get = symbolic(tmp_path / "m.safetensors", executor)
        with pytest.raises(IncompatibleVersionError, match=r"lays weights out in another way .*transformers=="):
            integration.convert_moe_packed_tensors(get("blocks"), get("scales"))


def test_mxfp4_that_does_not_fit_is_transformers_error(tmp_path: Path) -> None:
    from transformers.integrations import mxfp4 as integration

    tensors = {"blocks": random_bytes(2, 3, 2, 4), "scales": random_bytes(2, 3, 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    with Executor() as executor, standing_in(mxfp4.replacements):
        get = symbolic(tmp_path / "model.safetensors", executor)
        with pytest.raises(AssertionError, match="does not match scales"):
            integration.convert_moe_packed_tensors(get("blocks"), get("scales"))
