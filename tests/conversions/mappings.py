"""Every converter of transformers' conversion mapping, with sources to run it on, and what it must give.

A *chain* is a distinct converter: its operations with their arguments, its source and its target patterns. It stands
for all model types that have it. A *case* of a chain is a set of source tensors with the model and configuration that
the operations ask for. Sizes are small and odd, so that partition borders fall everywhere.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightTransform, dot_natural_key, spawn_materialize

from lowmem_load.files.executor import Executor
from lowmem_load.files.safetensors import Safetensors
from lowmem_load.files.source import LocalFile
from lowmem_load.models.loader import SymbolicFile
from lowmem_load.planning import expression as ex
from lowmem_load.planning.nest import Copy, extent, plan_copies
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.reads import ReadLimits
from lowmem_load.planning.regions import FlatRange, partition_range
from lowmem_load.symbolic.tensor import SymbolicTensor, expression_of

Shape = tuple[int, ...]

WORLD_SIZES = range(1, 9)
PREFIX = "model.layers.0."
NUM_HEADS = 3
PADDED_VOCAB, VOCAB = 16, 13
UNWRITTEN = 0xA5
"""Byte that destinations are full of before they are filled."""


class NoCaseError(Exception):
    """A converter that this file does not know how to feed."""


# -- the registry ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """A distinct converter, and the first model type that has it."""

    converter: WeightConverter
    model_type: str

    @property
    def operations(self) -> str:
        """The operations as text, without arguments that are at their defaults."""
        return "+".join(map(operation_text, self.converter.operations))

    @property
    def id(self) -> str:
        """Name of the chain for a test."""
        source = self.converter.source_patterns[0].replace("\\", "").strip(".")
        return f"{self.operations}-{self.model_type}-{source}"


def registry() -> dict[str, list[WeightTransform]]:
    """Return transformers' conversion mapping: model type, or class name, -> transforms."""
    conversion_mapping.get_checkpoint_conversion_mapping("")  # builds the mapping on first use
    return dict(conversion_mapping._checkpoint_conversion_mapping_cache)


def chains() -> list[Chain]:
    """Return the distinct converters of the registry in order of first appearance."""
    found: dict[object, Chain] = {}
    for model_type, transforms in registry().items():
        for transform in transforms:
            if isinstance(transform, WeightConverter):
                found.setdefault(_identity(transform), Chain(transform, model_type))
    return list(found.values())


def _identity(converter: WeightConverter) -> object:
    operations = tuple((type(operation).__name__, repr(vars(operation))) for operation in converter.operations)
    return operations, tuple(converter.source_patterns), tuple(converter.target_patterns)


def operation_text(operation: Any) -> str:
    """Return an operation as it would be written."""
    shown = {
        "dim0": str,
        "dim1": str,
        "dim": str,
        "inverse": lambda value: "inverse" if value else "",
        "check_dims": lambda value: "check" if value else "",
        "permute_layer_names": lambda value: "some" if value else "",
    }
    texts = [shown[name](value) for name, value in vars(operation).items() if name in shown]
    return f"{type(operation).__name__}({','.join(text for text in texts if text)})"


# -- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One run of a converter: what its source tensors are, and parameters for operations that ask the model."""

    name: str
    shapes: dict[str, Shape]
    patterns: dict[str, str]
    parameters: dict[str, Shape] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        """A stand-in for the model's configuration."""
        part = SimpleNamespace(num_attention_heads=NUM_HEADS, vocab_size=PADDED_VOCAB, unpadded_vocab_size=VOCAB)
        return SimpleNamespace(num_attention_heads=NUM_HEADS, vision_config=part, get_text_config=lambda: part)

    @property
    def model(self) -> Any:
        """A stand-in for the model."""
        return SimpleNamespace(get_parameter=lambda name: torch.empty(self.parameters[name], device="meta"))


def cases(converter: WeightConverter) -> list[Case]:
    """Return the cases of a converter.

    Raises:
        NoCaseError: its operations, or its names, are none that this function knows.
    """
    names = tuple(type(operation).__name__ for operation in converter.operations)
    build = _CASES.get(names)
    if build is None:
        raise NoCaseError(f"no sources are known for {' + '.join(names)}: {converter}")
    found = list(build(converter))
    for case in found:
        for key, pattern in case.patterns.items():
            matched = deepcopy(converter).rename_source_key(key)[1]
            if matched != pattern:
                raise NoCaseError(f"{key} matches {matched}, not {pattern}, of {converter}")
    return found


def _key(pattern: str, number: int = 0, suffix: str = "") -> str:
    """Return a checkpoint key that `pattern` matches."""
    text = pattern.replace("\\.", ".").strip(".").replace("*", str(number))
    if re.search(r"[^\w.]", text):
        raise NoCaseError(f"no key is known for the pattern {pattern}")
    return f"{PREFIX}{text}{suffix}"


def _suffixes(converter: WeightConverter) -> list[str]:
    """Return what follows the pattern in checkpoint keys: a pattern that names a module has weights and biases."""
    names_parameter = re.search(r"weight|bias|embedding|experts", converter.source_patterns[0])
    return [""] if names_parameter else [".weight", ".bias"]


def _case(name: str, converter: WeightConverter, shapes: list[list[Shape]], suffix: str = "") -> Case:
    """Return a case with `shapes[i]` for the tensors of source pattern `i`."""
    by_key, patterns = {}, {}
    for pattern, of_pattern in zip(converter.source_patterns, shapes, strict=True):
        for number, shape in enumerate(of_pattern):
            by_key[_key(pattern, number, suffix)] = shape
            patterns[_key(pattern, number, suffix)] = pattern
    return Case(name, by_key, patterns)


def _rows_cases(converter: WeightConverter, rows: dict[str, int], dim: int = 0) -> Iterator[Case]:
    """Yield cases with one source whose size along `dim` is each of `rows`; biases have nothing behind it."""
    (pattern,) = converter.source_patterns
    for suffix in _suffixes(converter):
        is_bias = (pattern + suffix).endswith("bias") and "moe_statics" not in pattern
        for name, size in rows.items():
            shape = (*[3][:dim], size, *([] if is_bias else [5]))
            yield _case(f"{name}{suffix}", converter, [[shape]], suffix)


def _merge_cases(converter: WeightConverter) -> Iterator[Case]:
    for name, count, shape in (("11 experts", 11, (3, 5)), ("2 experts", 2, (6, 4)), ("1 expert", 1, (7, 3))):
        yield _case(name, converter, [[shape] * count for _ in converter.source_patterns])


def _concatenate_cases(converter: WeightConverter) -> Iterator[Case]:
    dim, sources = converter.operations[0].dim, converter.source_patterns
    if "*" in sources[0]:  # the rows of one large table, the last piece shorter
        yield _case("pieces", converter, [[(5, 4)] * 11 + [(3, 4)]])
    elif "conv1d" in sources[0]:
        yield _case("conv1d", converter, [[(5 + 2 * i, 1, 4)] for i in range(len(sources))])
    elif dim == 0:
        yield _case("rows", converter, [[(6 - 2 * i, 5)] for i in range(len(sources))])
    else:
        yield _case("experts", converter, [[(3, 5, 7)] for _ in sources])
        yield _case("matrices", converter, [[(5, 7 - 3 * i)] for i in range(len(sources))])


def _chunk_cases(converter: WeightConverter) -> Iterator[Case]:
    count = len(converter.target_patterns)
    yield from _rows_cases(converter, {"even": 7 * count, "uneven": 7 * count - 1, "tiny": count})


def _split_cases(converter: WeightConverter) -> Iterator[Case]:
    sizes = (8, 3, 3, 2)[: len(converter.target_patterns)]
    for case in _rows_cases(converter, {"grouped heads": sum(sizes)}):
        (key,) = case.shapes
        suffix = key[len(_key(converter.source_patterns[0])) :]
        case.parameters.update(
            {f"{PREFIX}{name}{suffix}": (size,) for name, size in zip(converter.target_patterns, sizes, strict=True)}
        )
        yield case


def _rope_cases(converter: WeightConverter) -> Iterator[Case]:
    count = len(converter.target_patterns)
    yield from _rows_cases(converter, {"3 heads of 4": 12 * count, "3 heads of 10": 30 * count})


def _interleave_cases(converter: WeightConverter) -> Iterator[Case]:
    dim = converter.operations[0].dim
    yield from _rows_cases(converter, {"even": 20, "tiny": 2 * len(converter.target_patterns)}, dim)
    if dim == 1:
        yield _case("matrix", converter, [[(5, 8)]])


def _transpose_cases(converter: WeightConverter) -> Iterator[Case]:
    operation = converter.operations[0]
    shape = (3, 5, 7)[-1 - operation.dim1 :]
    case = _case("transposed", converter, [[shape]])
    if operation.check_dims:
        (key,) = case.shapes
        case.parameters[key] = (*shape[:-2], shape[-1], shape[-2])
        same = _case("as in the model", converter, [[shape]])
        same.parameters[key] = shape
        yield same
    yield case


def _ernie_cases(converter: WeightConverter) -> Iterator[Case]:
    text, vision = (6, 4), (3, 4)
    if len(converter.source_patterns) == 1:  # down projections
        text, vision = (4, 6), (4, 3)
    yield _case("4 experts", converter, [[text] * 2 + [vision] * 2 for _ in converter.source_patterns])
    yield _case("5 equal experts", converter, [[text] * 5 for _ in converter.source_patterns])


def _unpad_cases(converter: WeightConverter) -> Iterator[Case]:
    case = _case("padded", converter, [[(PADDED_VOCAB, 5)]])
    case.parameters[_key(converter.target_patterns[0])] = (VOCAB, 5)
    yield case


def _dequantized_cases(converter: WeightConverter) -> Iterator[Case]:
    """Yield what `save_pretrained` writes. A quantized original is refused: tests/unit/test_quantized.py."""
    pattern = converter.source_patterns[0]
    yield Case("not quantized", {_key(pattern): (3, 8, 5)}, {_key(pattern): pattern})


def _fixed(*shapes: list[Shape]) -> Callable[[WeightConverter], Iterator[Case]]:
    def build(converter: WeightConverter) -> Iterator[Case]:
        yield _case("one size", converter, list(shapes))

    return build


_CASES: dict[tuple[str, ...], Callable[[WeightConverter], Iterator[Case]]] = {
    ("MergeModulelist",): _merge_cases,
    ("MergeModulelist", "Concatenate"): _merge_cases,
    ("Concatenate",): _concatenate_cases,
    ("Chunk",): _chunk_cases,
    ("Split",): _split_cases,
    ("Chunk", "PermuteForRope"): _rope_cases,
    ("PermuteForRope",): _rope_cases,
    ("Interleave",): _interleave_cases,
    ("Interleave", "Chunk"): _interleave_cases,
    ("Transpose",): _transpose_cases,
    ("ErnieFuseAndSplitTextVisionExperts",): _ernie_cases,
    ("Inkling2UnpadVocab",): _unpad_cases,
    ("Inkling2LoopMergeMessageQueries",): _fixed([(6, 5)], [(6, 5)]),
    ("Inkling2LoopDequantizeExperts",): _dequantized_cases,
    ("Inkling2LoopDequantizeExperts", "Interleave"): _dequantized_cases,
}


# -- running a converter ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dtypes:
    """Where values are cast: `file` -> (as the loader materializes) `load` -> (as ZeRO-3 stores) `target`.

    Several `file` dtypes are dealt out to the source tensors in turn. None: no cast.
    """

    file: tuple[torch.dtype, ...]
    load: torch.dtype | None = None
    target: torch.dtype | None = None

    @property
    def casts(self) -> bool:
        """Whether anything is cast."""
        return len(self.file) > 1 or self.load is not None or self.target is not None


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

DTYPES = {
    "bf16": Dtypes((BF16,)),
    "fp32": Dtypes((FP32,)),
    "bf16 to fp32": Dtypes((BF16,), FP32),
    "fp32 to bf16": Dtypes((FP32,), BF16),
    "fp32 to bf16 afterwards": Dtypes((FP32,), None, BF16),
    "bf16 and fp32": Dtypes((BF16, FP32)),
    "fp32 to fp16 to fp32": Dtypes((FP32,), FP16, FP32),
}


def write_sources(case: Case, dtypes: Dtypes, path: Path) -> None:
    """Write random tensors for `case`. Uncast ones hold random bits, NaNs included."""
    generator = torch.Generator().manual_seed(len(case.shapes))
    tensors = {}
    for (key, shape), dtype in zip(case.shapes.items(), itertools.cycle(dtypes.file), strict=False):
        if dtypes.casts:
            tensors[key] = (torch.randn(shape, generator=generator) * 100).to(dtype)
        else:
            bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
            limits = torch.iinfo(bits)
            tensors[key] = torch.randint(limits.min, limits.max, shape, dtype=bits, generator=generator).view(dtype)
    save_file(tensors, path)


def convert(converter: WeightConverter, case: Case, file: Any, load: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Return target name -> value, collecting and converting as transformers' loader does; the converter stays.

    Source: transformers 5.23 `core_model_loading.py`, `convert_and_load_state_dict_in_model`.
    """
    mappings: dict[str, WeightConverter] = {}
    for key in sorted(case.shapes, key=dot_natural_key):
        renamed, pattern = converter.rename_source_key(key)
        mapping = mappings.setdefault(renamed, deepcopy(converter))
        mapping.add_tensor(renamed, key, pattern, spawn_materialize(None, file.get_slice(key), "cpu", load))
    results: dict[str, torch.Tensor] = {}
    for first_target, mapping in mappings.items():
        for name, value in mapping.convert(first_target, model=case.model, config=case.config).items():
            results[name] = value[0] if isinstance(value, list) else value
    return results


@dataclass
class Outcome:
    """What filling the partitions of one target took, over all ranks of all world sizes.

    `span_bytes` are those between the first and the last byte of each copy: what reading it in one go would fetch.
    """

    name: str
    computed: bool = False
    contiguous: bool = True
    needed_bytes: int = 0
    read_bytes: int = 0
    span_bytes: int = 0

    def add(self, copies: list[Copy], needed_bytes: int, read_bytes: int) -> None:
        """Count one partition."""
        self.computed = self.computed or any(isinstance(copy.leaf, ex.Computed) for copy in copies)
        self.contiguous = self.contiguous and all(copy.nest.is_run for copy in copies)
        self.needed_bytes += needed_bytes
        self.read_bytes += read_bytes
        self.span_bytes += sum(map(_span_bytes, copies))


def _span_bytes(copy: Copy) -> int:
    return extent(copy.nest.axes, "source") * copy.leaf.dtype.itemsize


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of `tensor` in row-major order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def symbolic_file(path: Path) -> SymbolicFile:
    """Return the file at `path` with symbolic tensors; describing a conversion may read none of them."""
    return SymbolicFile(Safetensors().describe(LocalFile(str(path))), _read_nothing)


def _read_nothing(expression: ex.Expression, reason: str) -> torch.Tensor:
    raise AssertionError(f"{reason} reads {expression}")


def fill_all_ranks(
    name: str,
    symbolic: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype | None,
    limits: ReadLimits | None = None,
) -> Outcome:
    """Fill the partition of every rank of every world size as a load would, and compare its bytes with `expected`.

    A `dtype` of None keeps that of `symbolic`.
    """
    expression = ex.cast(expression_of(symbolic), dtype or symbolic.dtype)
    value = flat_bytes(expected.to(expression.dtype))
    itemsize, numel = expression.dtype.itemsize, expected.numel()
    spans = {partition_range(numel, rank, world) for world in WORLD_SIZES for rank in range(world)}
    outcome = Outcome(name)
    with Executor() as executor:
        for span in sorted(spans, key=lambda span: (span.start, span.end)):
            planner, copies = Planner(limits), list(plan_copies(expression, span))
            fill = planner.plan_fill(name, expression, span)
            destination = torch.full((span.numel * itemsize,), UNWRITTEN, dtype=torch.uint8)
            before = executor.stats.read_bytes
            executor.fill(fill, destination.view(expression.dtype), planner.values, planner.constants)
            executor.finish()
            read_bytes, costs = executor.stats.read_bytes - before, planner.costs([fill])
            assert read_bytes == costs.read_bytes
            wanted = value[span.start * itemsize : span.end * itemsize]
            assert torch.equal(destination, wanted), _difference(name, span, destination, wanted, copies)
            outcome.add(copies, costs.needed_bytes, read_bytes)
    return outcome


def _difference(name: str, span: FlatRange, got: torch.Tensor, wanted: torch.Tensor, copies: list[Copy]) -> str:
    wrong = (got != wanted).nonzero().reshape(-1)
    return f"{name} {span}: {len(wrong)} of {len(got)} bytes differ, the first is {int(wrong[0])}; {copies}"


def check(converter: WeightConverter, case: Case, dtypes: Dtypes, path: Path) -> list[Outcome]:
    """Convert `case` for real and symbolically; compare names, shapes, dtypes, strides and every partition's bytes."""
    write_sources(case, dtypes, path)
    with safe_open(path, framework="pt") as file:
        expected = convert(converter, case, file, dtypes.load)
    symbolic = convert(converter, case, symbolic_file(path), dtypes.load)
    assert list(symbolic) == list(expected)
    outcomes = []
    for name, value in expected.items():
        described = symbolic[name]
        assert isinstance(described, SymbolicTensor)
        assert (described.shape, described.dtype) == (value.shape, value.dtype)
        assert described.stride() == value.stride()
        outcomes.append(fill_all_ranks(name, described, value, dtypes.target))
    return outcomes
