"""All that `lowmem-load inspect` says of a checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowmem_load.errors import LowMemLoadError
from lowmem_load.formats.index import base_of_adapter
from lowmem_load.hf import names
from lowmem_load.hf.quantizers import dequantizing
from lowmem_load.inspection.conversions import Conversion, conversions_of, loaded
from lowmem_load.inspection.files import StoredFile, StoredTensor, stored
from lowmem_load.load.plan import plan_ranks
from lowmem_load.planning.alike import Alike
from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.remote.checkpoint import OpenCheckpoint


@dataclass(slots=True)
class Inspection:
    """What a checkpoint is.

    Attributes:
        name, revision: of it; the commit of a Hub id.
        architectures, model_type, dtype: as its config.json says; dtype without "torch.".
        quantization: the method that its config names; None without one.
        base_of_adapter: name of the model that it is an adapter of; None if it is none.
        files, tensors: that are stored.
        num_elements: of all distinct parameters of the model, if it could be described.
        largest: parameters of most elements, as (name, elements).
        tied: names of each parameter that has several.
        missing_keys, unexpected_keys, mismatched_keys: as transformers reports them.
        conversions: what becomes of the tensors on load.
        read_to_describe: see `LoadPlan`.
        not_described: why the model could not be described; None if it was.
        fetched_bytes, num_requests: of weight files on the Hub.
        seconds: that this took.
    """

    name: str
    revision: str | None
    architectures: Sequence[str] = ()
    model_type: str = ""
    dtype: str = ""
    quantization: str | None = None
    base_of_adapter: str | None = None
    files: Sequence[StoredFile] = ()
    tensors: Sequence[StoredTensor] = ()
    num_elements: int = 0
    largest: Sequence[tuple[str, int]] = ()
    tied: Sequence[Sequence[str]] = ()
    missing_keys: Sequence[str] = ()
    unexpected_keys: Sequence[str] = ()
    mismatched_keys: Sequence[str] = ()
    conversions: Sequence[Conversion] = ()
    read_to_describe: Sequence[tuple[str, int]] = ()
    not_described: str | None = None
    fetched_bytes: int = 0
    num_requests: int = 0
    seconds: float = 0.0

    @property
    def by_dtype(self) -> dict[str, tuple[int, int]]:
        """Tensors and bytes of each dtype that is stored."""
        found: dict[str, tuple[int, int]] = {}
        for tensor in self.tensors:
            number, nbytes = found.get(tensor.dtype, (0, 0))
            found[tensor.dtype] = number + 1, nbytes + tensor.nbytes
        return found


@dataclass(frozen=True, slots=True)
class Asked:
    """Keywords of `from_pretrained` that decide what is loaded."""

    subfolder: str = ""
    auto_class: str | None = None
    trust_remote_code: bool = False
    keywords: Mapping[str, Any] = field(default_factory=dict)


def inspect_checkpoint(checkpoint: OpenCheckpoint, asked: Asked) -> Inspection:
    """Return what a checkpoint is. Reads headers, and what transformers must know to describe the model.

    Raises:
        CheckpointError: it has no weights, or a file of it is malformed.
    """
    start = time.perf_counter()
    found = Inspection(checkpoint.name, checkpoint.revision)
    found.files, found.tensors = stored(checkpoint.folder, asked.subfolder, checkpoint.open_source)
    adapter = os.path.join(checkpoint.folder, asked.subfolder, "adapter_config.json")
    if os.path.isfile(adapter):
        found.base_of_adapter = base_of_adapter(adapter)
        found.not_described = "it is an adapter: what its weights become depends on the base model"
    else:
        _describe(found, checkpoint, asked)
    found.fetched_bytes, found.num_requests = checkpoint.fetched_bytes, checkpoint.num_requests
    found.seconds = time.perf_counter() - start
    return found


def _describe(found: Inspection, checkpoint: OpenCheckpoint, asked: Asked) -> None:
    keywords = {"subfolder": asked.subfolder, "trust_remote_code": asked.trust_remote_code, **asked.keywords}
    try:
        config = names.model_config(checkpoint.folder, keywords)
        found.architectures, found.model_type = list(config.architectures or ()), str(config.model_type)
        dtype = getattr(config, names.DTYPE_KEYWORD, None) or torch.float32
        found.dtype = str(dtype).removeprefix("torch.")
        quantization = getattr(config, "quantization_config", None)
        if quantization is not None:
            found.quantization = names.quantization_method(quantization)
            if not names.is_four_bit(quantization):
                keywords["quantization_config"] = dequantizing(checkpoint.folder, keywords)
        ds_config = {
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": dtype == torch.bfloat16},
            "fp16": {"enabled": dtype == torch.float16},
        }
        alike = Alike()
        (plan,) = plan_ranks(
            *(checkpoint.folder, ds_config),
            ranks=[0],
            world_size=1,
            device=torch.device("cpu"),
            open_source=checkpoint.open_source,
            alike=alike,
            auto_class=asked.auto_class,
            **keywords,
        )
    except LowMemLoadError as error:
        found.not_described = str(error)
        return
    _take_plan(found, plan, alike)


def _take_plan(found: Inspection, plan: LoadPlan, alike: Alike) -> None:
    parameters = loaded(plan, alike)
    found.num_elements = sum(each.target.numel for each in parameters)
    by_size = sorted(parameters, key=lambda each: -each.target.numel)
    found.largest = [(each.names[0], each.target.numel) for each in by_size[:3]]
    found.tied = [each.names for each in parameters if len(each.names) > 1]
    found.missing_keys, found.unexpected_keys = plan.missing_keys, plan.unexpected_keys
    found.mismatched_keys = [str(key) for key in plan.mismatched_keys]
    found.conversions, found.read_to_describe = conversions_of(plan, parameters), plan.read_to_describe
