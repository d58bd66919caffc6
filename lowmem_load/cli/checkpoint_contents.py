"""What a checkpoint holds, and what loading does to it: the answer of `lowmem-load inspect`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch

from lowmem_load.api.plan_model import describe_checkpoint
from lowmem_load.errors import CheckpointError, LowMemLoadError, UnsupportedError
from lowmem_load.formats.index import base_of_adapter, check_index, read_json
from lowmem_load.formats.safetensors import Safetensors
from lowmem_load.formats.torch_zip import TorchZip
from lowmem_load.hf import names
from lowmem_load.hf.quantizers import dequantizing, is_four_bit, quantization_method
from lowmem_load.io.hub_checkpoint import OpenCheckpoint
from lowmem_load.io.source import Opener
from lowmem_load.pipeline.describe import Described
from lowmem_load.planning.expression import (
    IN_MEMORY,
    Computed,
    Elementwise,
    Expression,
    Held,
    Permute,
    Pick,
    Source,
    children,
    held,
)
from lowmem_load.symbolic.quantized import QuantizedTensor
from lowmem_load.symbolic.tensor import SymbolicTensor

CHOICES = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("adapter_model.safetensors", ""),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ("adapter_model.bin", ""),
)
"""A single file of weights and the index of several, in the order in which `from_pretrained` looks for them."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        name, file: of the tensor and of its file.
        dtype: as torch prints it, without "torch."; "unknown to this torch" if torch lacks it.
        shape: in elements.
        nbytes: of the data; 0 for an unknown dtype.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(slots=True)
class Conversion:
    """What loading does to some parameters: in words, their number, their bytes in the model, and an example."""

    kind: str
    num_parameters: int
    nbytes: int
    example: str


@dataclass(slots=True)
class Inspection:
    """What a checkpoint holds.

    Attributes:
        name, revision: of the checkpoint; the revision is the commit of a Hub id.
        architectures, model_type, dtype: as in config.json; dtype without "torch.".
        quantization: the method in config.json; None without one.
        base_of_adapter: the base model of an adapter; None for other checkpoints.
        files: bytes of each weight file.
        tensors: stored in these files.
        num_elements: of all distinct parameters of the model; 0 if it was not described.
        tied: names of each parameter that has several.
        missing_keys, unexpected_keys, mismatched_keys: as transformers reports them.
        conversions: what loading does to the parameters, most bytes first.
        read_to_describe: see `LoadPlan`.
        not_described: the reason if the model could not be described; else None.
    """

    name: str
    revision: str | None
    architectures: Sequence[str] = ()
    model_type: str = ""
    dtype: str = ""
    quantization: str | None = None
    base_of_adapter: str | None = None
    files: dict[str, int] = field(default_factory=dict)
    tensors: list[StoredTensor] = field(default_factory=list)
    num_elements: int = 0
    tied: Sequence[Sequence[str]] = ()
    missing_keys: Sequence[str] = ()
    unexpected_keys: Sequence[str] = ()
    mismatched_keys: Sequence[str] = ()
    conversions: Sequence[Conversion] = ()
    read_to_describe: Sequence[tuple[str, int]] = ()
    not_described: str | None = None

    @property
    def by_dtype(self) -> dict[str, tuple[int, int]]:
        """Number and bytes of the stored tensors of each dtype."""
        found: dict[str, tuple[int, int]] = {}
        for tensor in self.tensors:
            number, nbytes = found.get(tensor.dtype, (0, 0))
            found[tensor.dtype] = number + 1, nbytes + tensor.nbytes
        return found


def inspect_checkpoint(
    checkpoint: OpenCheckpoint, subfolder: str = "", auto_class: str | None = None, *, trust_remote_code: bool = False
) -> Inspection:
    """Return what a checkpoint holds. Reads headers, and the values that transformers needs to describe the model.

    Raises:
        CheckpointError: the checkpoint has no weights, or a file is malformed.
    """
    found = Inspection(checkpoint.name, checkpoint.revision)
    for path in weight_files(checkpoint.folder, subfolder):
        found.files[os.path.basename(path)], tensors = stored_tensors(path, checkpoint.open_source)
        found.tensors += tensors
    adapter = os.path.join(checkpoint.folder, subfolder, "adapter_config.json")
    if os.path.isfile(adapter):
        found.base_of_adapter = base_of_adapter(adapter)
        found.not_described = "it is an adapter: what its weights become depends on the base model"
    else:
        try:
            _describe(found, checkpoint, auto_class, subfolder=subfolder, trust_remote_code=trust_remote_code)
        except LowMemLoadError as error:
            found.not_described = str(error)
    return found


def _describe(found: Inspection, checkpoint: OpenCheckpoint, auto_class: str | None, **keywords: Any) -> None:
    config = names.model_config(checkpoint.folder, keywords)
    found.architectures, found.model_type = list(config.architectures or ()), str(config.model_type)
    dtype = getattr(config, names.DTYPE_KEYWORD, None) or torch.float32
    found.dtype = _spelled(dtype)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        found.quantization = quantization_method(quantization)
        if not is_four_bit(quantization):
            keywords["quantization_config"] = dequantizing(checkpoint.folder, keywords)
    described = describe_checkpoint(
        checkpoint.folder, dtype, open_source=checkpoint.open_source, auto_class=auto_class, **keywords
    )
    found.read_to_describe = described.read_to_describe
    found.missing_keys = sorted(described.info["missing_keys"])
    found.unexpected_keys = sorted(described.info["unexpected_keys"])
    found.mismatched_keys = [str(key) for key in described.info["mismatched_keys"]]
    _take_parameters(found, described)


def _take_parameters(found: Inspection, described: Described) -> None:
    parameters = {id(parameter): parameter for parameter in described.model.parameters()}
    all_names: dict[int, list[str]] = {key: [] for key in parameters}
    for name, parameter in described.model.named_parameters(remove_duplicate=False):
        all_names[id(parameter)].append(name)
    found.num_elements = sum(parameter.numel() for parameter in parameters.values())
    found.tied = [each for each in all_names.values() if len(each) > 1]
    ways: dict[str, Conversion] = {}
    for key, parameter in parameters.items():
        kind, tensors = conversion_of(all_names[key], parameter)
        made_of = ", ".join(tensors[:2]) + (f" and {len(tensors) - 2} more" if len(tensors) > 2 else "")
        example = f"{all_names[key][0]} <- {made_of or 'nothing in the files'}"
        way = ways.setdefault(kind, Conversion(kind, 0, 0, example))
        way.num_parameters += 1
        way.nbytes += parameter.numel() * parameter.dtype.itemsize
    found.conversions = sorted(ways.values(), key=lambda way: -way.nbytes)


def conversion_of(all_names: Sequence[str], parameter: torch.Tensor) -> tuple[str, list[str]]:
    """Return what loading does to a described parameter, in words, and the names of its source tensors."""
    nodes = _nodes(_expression(parameter))
    sources = [node for node in nodes if isinstance(node, Source)]
    operations = dict.fromkeys(_operation(node) for node in nodes if isinstance(node, Computed | Elementwise))
    origins = dict.fromkeys(node.origin for node in nodes if isinstance(node, Held))
    parts = [origin for origin in origins if origin != IN_MEMORY or not sources]
    parts += _choice(all_names, parameter, sources)
    parts += operations or _moves(nodes, parameter, sources)
    if isinstance(parameter, QuantizedTensor):
        parts.append("packed")
    return ", ".join(parts) or "as it lies", list(dict.fromkeys(source.name for source in sources))


def _expression(parameter: torch.Tensor) -> Expression:
    if isinstance(parameter, SymbolicTensor):
        return parameter.initialised or parameter.expression
    return held(parameter)


def _nodes(expression: Expression) -> list[Expression]:
    """Return the distinct nodes of an expression."""
    found, seen = [expression], {id(expression)}
    for node in found:  # the list grows meanwhile
        for child in children(node):
            if id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def _operation(leaf: Computed | Elementwise) -> str:
    return f"{leaf.operation} on {'ranges' if isinstance(leaf, Elementwise) else 'whole tensors'}"


def _choice(all_names: Sequence[str], parameter: torch.Tensor, sources: Sequence[Source]) -> Iterator[str]:
    if len(sources) > 1:
        yield f"made of {len(sources)} tensors"
    elif sources and math.prod(sources[0].shape) > parameter.numel():
        yield "cut out of a larger one"
    elif sources and sources[0].name not in all_names:
        yield "renamed"


def _moves(nodes: Sequence[Expression], parameter: torch.Tensor, sources: Sequence[Source]) -> Iterator[str]:
    if any(isinstance(node, Permute | Pick) for node in nodes):
        yield "rearranged"
    for dtype in dict.fromkeys(source.dtype for source in sources):
        if dtype != parameter.dtype:
            yield f"cast from {_spelled(dtype)} to {_spelled(parameter.dtype)}"


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def weight_files(folder: str, subfolder: str = "") -> Sequence[str]:
    """Return the paths of the weight files that `from_pretrained` would choose.

    Raises:
        CheckpointError: the folder has no weight files.
    """
    where = os.path.join(folder, subfolder)
    there = set(os.listdir(where)) if os.path.isdir(where) else set()
    for single, index in CHOICES:
        if single in there:
            return [os.path.join(where, single)]
        if index in there:
            path = os.path.join(where, index)
            check_index(path)
            return [os.path.join(where, file) for file in sorted(set(read_json(path)["weight_map"].values()))]
    loose = sorted(file for file in there if file.endswith(".safetensors"))  # a variant, or free names
    if not loose:
        raise CheckpointError(f"{where}: holds no weights: no safetensors files, no pytorch_model*.bin")
    return [os.path.join(where, file) for file in loose]


def stored_tensors(path: str, open_source: Opener) -> tuple[int, list[StoredTensor]]:
    """Return the bytes of a weight file, and its tensors.

    Raises:
        CheckpointError: the file is malformed.
    """
    with closing(open_source(path)) as source:
        described = (Safetensors() if path.endswith(".safetensors") else TorchZip()).describe(source)
        file = os.path.basename(path)
        return described.nbytes, [_tensor(name, file, described.expression) for name in described.names]


def _tensor(name: str, file: str, expression: Callable[[str], Expression]) -> StoredTensor:
    try:
        found = expression(name)
    except UnsupportedError:
        return StoredTensor(name, file, "unknown to this torch", (), 0)
    nbytes = math.prod(found.shape) * found.dtype.itemsize
    return StoredTensor(name, file, str(found.dtype).removeprefix("torch."), tuple(found.shape), nbytes)
