"""What a checkpoint holds, and what loading does to it: the answer of `lowmem-load inspect`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowmem_load.api.plan_model import describe_checkpoint
from lowmem_load.errors import LowMemLoadError, UnsupportedError
from lowmem_load.families import diffusion
from lowmem_load.families.files import file_format, files_of
from lowmem_load.formats.index import base_of_adapter
from lowmem_load.hf import names
from lowmem_load.hf.quantizers import dequantizing, stays_packed
from lowmem_load.hf.remote_names import Checkpoint
from lowmem_load.io.executor import Executor
from lowmem_load.io.stand_ins import open_file
from lowmem_load.planning import expression as ex
from lowmem_load.quantized.format import method_of, packing_of
from lowmem_load.symbolic.tensor import SymbolicTensor
from lowmem_load.text import count, size
from lowmem_load.training_checkpoints.open_model import Values, find_state, open_model


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
        revision: the commit of a Hub id.
        architectures, model_type, dtype, quantization: as in config.json; dtype without "torch.".
        base_of_adapter: the base model of an adapter.
        files: bytes of each weight file.
        tensors: dtype, shape and bytes of each stored tensor; "unknown to this torch" if torch lacks the dtype.
        num_elements: of all distinct parameters of the model; 0 if it was not described.
        tied: names of each parameter that has several.
        conversions: what loading does to the parameters, most bytes first.
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
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = field(default_factory=dict)
    num_elements: int = 0
    tied: Sequence[Sequence[str]] = ()
    missing_keys: Sequence[str] = ()
    unexpected_keys: Sequence[str] = ()
    mismatched_keys: Sequence[str] = ()
    conversions: Sequence[Conversion] = ()
    not_described: str | None = None

    @property
    def by_dtype(self) -> dict[str, tuple[int, int]]:
        """Number and bytes of the stored tensors of each dtype."""
        return by_dtype((dtype, nbytes) for dtype, _, nbytes in self.tensors.values())


def by_dtype(sizes: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """Return number and bytes of the tensors of each dtype, given those of each tensor."""
    totals: dict[str, tuple[int, int]] = {}
    for dtype, nbytes in sizes:
        number, total = totals.get(dtype, (0, 0))
        totals[dtype] = number + 1, total + nbytes
    return totals


def inspect_checkpoint(checkpoint: Checkpoint, auto_class: str | None = None, **keywords: Any) -> Inspection:
    """Return what a checkpoint holds. Reads headers, and the values that transformers needs to describe the model.

    `keywords` are those of `from_pretrained`.
    """
    inspection, subfolder = Inspection(checkpoint.name, checkpoint.revision), keywords.get("subfolder", "")
    for path in files_of(checkpoint.folder, subfolder):
        with closing(open_file(path)) as source:
            described = file_format(path).describe(source)
            inspection.files[os.path.basename(path)] = described.nbytes
            inspection.tensors |= {name: _stored(name, described.expression) for name in described.names}
    adapter = os.path.join(checkpoint.folder, subfolder, "adapter_config.json")
    if os.path.isfile(adapter):
        inspection.base_of_adapter = base_of_adapter(adapter)
        inspection.not_described = "it is an adapter: what its weights become depends on the base model"
    else:
        try:
            _describe(inspection, checkpoint, auto_class, keywords)
        except LowMemLoadError as error:
            inspection.not_described = str(error)
    return inspection


def _stored(name: str, expression: Callable[[str], ex.Expression]) -> tuple[str, tuple[int, ...], int]:
    try:
        stored = expression(name)
    except UnsupportedError:
        return "unknown to this torch", (), 0
    return _dtype_text(stored.dtype), tuple(stored.shape), math.prod(stored.shape) * stored.dtype.itemsize


def _describe(inspection: Inspection, checkpoint: Checkpoint, auto_class: str | None, keywords: dict[str, Any]) -> None:
    if (cls := diffusion.model_class(checkpoint.folder, auto_class, keywords)) is not None:
        inspection.architectures, inspection.model_type = [cls.__name__], "diffusers"
        stored = max(inspection.by_dtype, key=lambda dtype: inspection.by_dtype[dtype][1], default="float32")
        dtype = getattr(torch, stored)
    else:
        config = names.model_config(checkpoint.folder, keywords)
        inspection.architectures, inspection.model_type = list(config.architectures or ()), str(config.model_type)
        dtype = getattr(config, "dtype", None) or torch.float32
        inspection.dtype = _dtype_text(dtype)
        quantization = getattr(config, "quantization_config", None)
        if quantization is not None:
            inspection.quantization = method_of(quantization)
            if not stays_packed(quantization):
                keywords["quantization_config"] = dequantizing(checkpoint.folder, keywords)
    described = describe_checkpoint(checkpoint.folder, dtype, auto_class=auto_class, **keywords)
    inspection.missing_keys = sorted(described.info["missing_keys"])
    inspection.unexpected_keys = sorted(described.info["unexpected_keys"])
    inspection.mismatched_keys = [str(key) for key in described.info["mismatched_keys"]]
    parameters: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in described.model.named_parameters(remove_duplicate=False):
        parameters.setdefault(id(parameter), (parameter, []))[1].append(name)
    inspection.num_elements = sum(parameter.numel() for parameter, _ in parameters.values())
    inspection.tied = [all_names for _, all_names in parameters.values() if len(all_names) > 1]
    ways: dict[str, Conversion] = {}
    for parameter, all_names in parameters.values():
        kind, tensors = conversion_of(all_names, parameter)
        made_of = ", ".join(tensors[:2]) + (f" and {len(tensors) - 2} more" if len(tensors) > 2 else "")
        example = f"{all_names[0]} <- {made_of or 'nothing in the files'}"
        way = ways.setdefault(kind, Conversion(kind, 0, 0, example))
        way.num_parameters += 1
        way.nbytes += parameter.numel() * parameter.dtype.itemsize
    inspection.conversions = sorted(ways.values(), key=lambda way: -way.nbytes)


def conversion_of(all_names: Sequence[str], parameter: torch.Tensor) -> tuple[str, list[str]]:
    """Return what loading does to a described parameter, in words, and the names of its source tensors."""
    nodes = _nodes(parameter)
    sources = [node for node in nodes if isinstance(node, ex.Source)]
    origins = [node.origin for node in nodes if isinstance(node, ex.Held)]
    parts = [origin for origin in origins if origin != ex.IN_MEMORY or not sources]
    if len(sources) > 1:
        parts.append(f"made of {len(sources)} tensors")
    elif sources and math.prod(sources[0].shape) > parameter.numel():
        parts.append("cut out of a larger one")
    elif sources and sources[0].name not in all_names:
        parts.append("renamed")
    computed = [node for node in nodes if isinstance(node, ex.Computed | ex.Elementwise)]
    for node in computed:
        parts.append(f"{node.operation} on {'ranges' if isinstance(node, ex.Elementwise) else 'whole tensors'}")
    if not computed and any(isinstance(node, ex.Permute | ex.Pick) for node in nodes):
        parts.append("rearranged")
    if not computed:
        others = [source.dtype for source in sources if source.dtype != parameter.dtype]
        parts += [f"cast from {_dtype_text(dtype)} to {_dtype_text(parameter.dtype)}" for dtype in others]
    if packing_of(parameter) is not None:
        parts.append("packed")
    return ", ".join(dict.fromkeys(parts)) or "unchanged", list(dict.fromkeys(source.name for source in sources))


def _nodes(parameter: torch.Tensor) -> list[ex.Expression]:
    """Return the distinct nodes of a parameter's expression."""
    nodes: list[ex.Expression] = [ex.hold(parameter)]
    if isinstance(parameter, SymbolicTensor):
        nodes = [parameter.initialised or parameter.expression]
    seen = {id(nodes[0])}
    for node in nodes:  # the list grows meanwhile
        for child in ex.children(node):
            if id(child) not in seen:
                seen.add(id(child))
                nodes.append(child)
    return nodes


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- checkpoints of training -------------------------------------------------------------------------------------------


def is_of_training(folder: str) -> bool:
    """Return whether a local folder holds a checkpoint of training, and no model to load by its name."""
    if not os.path.isdir(folder) or os.path.isfile(os.path.join(folder, "model.safetensors.index.json")):
        return False
    return os.path.isfile(os.path.join(folder, "latest")) or find_state(folder) is not None


def training_contents(folder: str) -> dict[str, str]:
    """Return what a training checkpoint holds, in words. No weights are read."""
    with Executor() as executor:
        model = open_model(folder, executor)
    distinct: dict[int, Values] = {id(tensor): tensor for tensor in model.tensors.values()}
    totals = by_dtype((_dtype_text(each.dtype), each.numel * each.dtype.itemsize) for each in distinct.values())
    dtypes = [f"{dtype}: {number:,} of {size(nbytes)}" for dtype, (number, nbytes) in totals.items()]
    num_files = len(model.files)
    return {
        "folder": model.folder,
        "written by": model.kind,
        "parameters": count(sum(tensor.numel for tensor in distinct.values())),
        "tensors": f"{len(distinct):,}; {', '.join(dtypes)}",
        "of an adapter": f"{len(model.adapter):,} tensors" if model.adapter else "",
        "files": f"{size(sum(file.nbytes for file in model.files))} in {num_files:,} file{'s' * (num_files != 1)}",
        "config.json": model.companion("config.json") or "none: name the model by --config when you consolidate it",
    }
