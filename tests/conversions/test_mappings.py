"""Every converter of transformers' mapping: the plan of every rank of worlds 1 to 8 gives transformers' own bytes."""

import inspect
from copy import deepcopy
from pathlib import Path

import pytest
from transformers import core_model_loading as loading

from tests.conversions import mappings
from tests.conversions.mappings import DTYPES, Chain

RUNS = "runs"
"""Every copy is one run of the file into one run of the partition; exactly the needed bytes are read."""

RUNS_READ = "runs read"
"""Exactly the needed bytes are read, in runs that are scattered over the partition."""

STRIDED = "strided"
"""Elements or rows are picked out of the file; small gaps between them are read along."""

EXPECTED = {
    "MergeModulelist(0)": RUNS,
    "MergeModulelist(0)+Concatenate(1)": RUNS,
    "Concatenate(0)": RUNS,
    "Chunk(0)": RUNS,
    "Split(0)": RUNS,
    "ErnieFuseAndSplitTextVisionExperts()": RUNS,
    "Inkling2UnpadVocab()": RUNS,
    "Inkling2LoopMergeMessageQueries()": STRIDED,
    "Inkling2LoopDequantizeExperts()": RUNS,
    "Inkling2LoopDequantizeExperts()+Interleave(1)": STRIDED,
    "Concatenate(1)": RUNS_READ,
    "Interleave(0)+Chunk(0)": STRIDED,
    "Interleave(1)": STRIDED,
    "Interleave(1)+Chunk(1)": STRIDED,
    "PermuteForRope()": STRIDED,
    "Chunk(0)+PermuteForRope(some)": STRIDED,
    "Transpose(0,1)": STRIDED,
    "Transpose(1,2)": STRIDED,
    "Transpose(1,2,check)": STRIDED,
}
"""How the chains are read; a chain that is not here is new and fails its test."""

CHAINS = mappings.chains()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("chain", CHAINS, ids=[chain.id for chain in CHAINS])
def test_all_partitions_have_transformers_bytes(chain: Chain, path: Path) -> None:
    outcomes = [
        outcome
        for case in mappings.cases(chain.converter)
        for dtypes in DTYPES.values()
        for outcome in mappings.check(chain.converter, case, dtypes, path)
    ]
    assert outcomes
    expected = EXPECTED[chain.operations]
    assert not any(outcome.computed for outcome in outcomes)
    for outcome in outcomes:
        if expected == STRIDED:  # no byte is read twice for one copy
            assert outcome.needed_bytes <= outcome.read_bytes <= outcome.span_bytes
        else:
            assert outcome.read_bytes == outcome.needed_bytes
    assert all(outcome.contiguous for outcome in outcomes) == (expected == RUNS)


@pytest.mark.parametrize(
    ("name", "at_most"),
    [("Interleave(1)", 2.0), ("PermuteForRope()", 2.0), ("Transpose(1,2)", 8.0), ("Transpose(0,1)", 3 * 8.0)],
)
def test_over_read_is_bounded(name: str, at_most: float, path: Path) -> None:
    """Narrow rows, where gaps are read along: rows at most twice; a transpose at most the matrix, once per copy.

    A partition is at most three copies: the rest of a row, whole rows, the start of a row.
    """
    shapes = {"Interleave(1)": (3, 64, 96), "PermuteForRope()": (6 * 32, 96), "Transpose(1,2)": (12, 40, 56)}
    chain = next(chain for chain in CHAINS if chain.operations == name)
    case = mappings.cases(chain.converter)[0]
    (key,) = case.shapes
    case.shapes[key] = shapes.get(name, (96, 56))
    (outcome,) = mappings.check(chain.converter, case, DTYPES["bf16"], path)
    ratio = outcome.read_bytes / outcome.needed_bytes
    assert ratio <= at_most


def test_every_operation_is_covered() -> None:
    """Here or in test_reverse.py, but for those that no model has, forwards or backwards."""
    defined = {
        name
        for name, operation in inspect.getmembers(loading, inspect.isclass)
        if issubclass(operation, loading.ConversionOps) and not inspect.isabstract(operation)
    }
    converters = [each for chain in CHAINS for each in (chain.converter, deepcopy(chain.converter).reverse_transform())]
    run = {type(operation).__name__ for converter in converters for operation in converter.operations}
    assert defined - run <= {
        *("_IdentityOp", "Conv3dToLinear", "LinearToConv3d"),
        *("VisionFuseAndPermuteForRope", "VisionUnfuseAndPermuteForRope"),  # deprecated
    }
