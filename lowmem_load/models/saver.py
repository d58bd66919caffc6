"""The files that `save_pretrained` of transformers and PEFT would write.

`save_pretrained` runs on a state dict of symbolic tensors. Only the function that writes a file of weights is replaced.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from torch import nn
from transformers.utils import logging as hf_logging

from lowmem_load import foreign_names
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.foreign_names import ForeignName
from lowmem_load.models import diffusion
from lowmem_load.models.active import quiet
from lowmem_load.models.model_class import model_class, model_config
from lowmem_load.models.wrappers import plain_class
from lowmem_load.planning.expression import Expression, Source, cast, numel
from lowmem_load.replaced import Handler, replaced
from lowmem_load.symbolic.tensor import SymbolicTensor
from lowmem_load.training_checkpoints.saved_state import own_files

OURS = ("state_dict", "is_main_process", "safe_serialization", "push_to_hub", "distributed_checkpoint", "save_function")
"""Keywords that are not passed on to `save_pretrained`: a save sets them."""

NO_CONFIG = "config=False (on the command line --config none)"
"""How `consolidate` is told to keep names, for messages."""

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes to which weights can be cast. Integers and fp8 would need scales."""


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One file of weights; `name` is its path in the folder, with "/".

    Leaves of the expressions are `Source`s with the name of a parameter or buffer of the model and no path.
    """

    name: str
    tensors: Mapping[str, Expression]
    metadata: Mapping[str, str]


def describe_save_pretrained(
    model: nn.Module,
    scratch: Path,
    tensors: Mapping[int, Source],
    *,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    kwargs: Mapping[str, Any],
    has_configs: bool = True,
) -> list[SavedFile]:
    """Return the files of weights that `save_pretrained` would write; write all its other files to `scratch`.

    The model is one of transformers, PEFT or diffusers. `tensors` has the source of each parameter and buffer, by `id`.
    With a dtype of None they keep theirs. Without `has_configs` no configuration is checked or written.
    """
    refuse_arguments(dtype, kwargs)
    is_of_diffusers = diffusion.is_model(model)
    _refuse_unknown(model)
    is_whole_model = is_of_diffusers or isinstance(model, transformers.PreTrainedModel)  # and not an adapter
    if is_whole_model and getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedError(
            "a quantized model cannot be saved from its partitions; save the adapter that was trained on it, or "
            "dequantize it on load"
        )
    files: list[SavedFile] = []

    def record(_: Any, tensors: Mapping[str, Any], filename: Any, metadata: Any = None, *__: Any, **___: Any) -> None:
        files.append(_saved_file(Path(filename).relative_to(scratch).as_posix(), tensors, metadata or {}))

    num_elements = sum(numel(tensors[id(parameter)]) for parameter in model.parameters())
    handlers: dict[ForeignName, Handler] = {
        # transformers counts the elements of parameters, of which partitioned ones have none.
        foreign_names.NUM_PARAMETERS: lambda *_, **__: num_elements,
        foreign_names.SHOULD_SAVE: lambda *_, **__: True,  # else False on all ranks but the first
        foreign_names.WRITE_WEIGHTS: record,
    }
    if foreign_names.WRITE_ADAPTER.module in sys.modules:
        handlers[foreign_names.WRITE_ADAPTER] = record
    state, arguments = symbolic_state(model, tensors, dtype), {**kwargs, "is_main_process": True}
    if is_whole_model:
        arguments["max_shard_size"] = max_shard_size
    if is_of_diffusers:
        handlers = {foreign_names.DIFFUSERS_WRITE: record}
    if not has_configs:
        for name in (foreign_names.SAVE_CONFIG, foreign_names.SAVE_GENERATION_CONFIG):
            handlers[name] = lambda *_, **__: None
    # What a library logs of files names `scratch`, not the folder of the user.
    library_logs = diffusion.logs() if is_of_diffusers else hf_logging
    with replaced(handlers), quiet(logging.WARNING, library_logs), _as_plain_model(model):
        if is_of_diffusers:
            diffusion.save_state(model, scratch, state, **arguments)
        else:
            cls: Any = type(model)  # the save_pretrained of a lazy model calls this function
            cls.save_pretrained(model, scratch, state_dict=state, **arguments)
    if dtype is not None and has_configs and (scratch / "config.json").is_file():  # an adapter has none
        _note_dtype(scratch / "config.json", dtype)
    if not files:
        raise UnsupportedError(f"{type(model).__name__}.save_pretrained wrote no safetensors file; save it with torch")
    return files


def _saved_file(name: str, weights: Mapping[str, Any], metadata: Mapping[str, str]) -> SavedFile:
    for tensor, value in weights.items():
        if not isinstance(value, SymbolicTensor):
            raise UnsupportedError(
                f"{name}: {tensor}: save_pretrained of this model saves a {type(value).__name__} that is none of its "
                "parameters and buffers, so it is not known how it is partitioned"
            )
    return SavedFile(name, {tensor: value.expression for tensor, value in weights.items()}, dict(metadata))


@contextlib.contextmanager
def _as_plain_model(model: nn.Module) -> Iterator[None]:
    """Let `save_pretrained` take a sharded model for one that is not: it would gather it, and name FSDP's class."""
    config: Any = getattr(model, "config", None)
    sharding = vars(config).pop("distributed_config", None) if config is not None else None
    sharded = {module: type(module) for module in model.modules() if plain_class(module) is not type(module)}
    try:
        for module in sharded:
            module.__class__ = plain_class(module)
        yield
    finally:
        for module, cls in sharded.items():
            module.__class__ = cls
        if sharding is not None:
            config.distributed_config = sharding


def refuse_arguments(dtype: torch.dtype | None, kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError for a dtype that would destroy weights, and for keywords that are not passed on."""
    if wrong := sorted({*kwargs}.intersection(OURS)):
        raise ConfigError(f"save_model: {', '.join(wrong)}: not among the keywords that are passed on; drop it")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"save_model: dtype: {dtype!r} would destroy the weights; name one of {DTYPES}, or none")


def _refuse_unknown(model: Any) -> None:
    taken = inspect.signature(model.save_pretrained).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())
    if not (takes_any or {"state_dict", "is_main_process"} <= taken.keys()):
        inside = [name for name, module in model.named_modules() if isinstance(module, transformers.PreTrainedModel)]
        todo = f"save the model inside of it, {inside[0]}" if inside else "write what model.state_dict() returns"
        raise UnsupportedError(
            f"{type(model).__name__}: has a save_pretrained of its own, which does not take state_dict, so it is not a "
            f"model of transformers or PEFT; {todo}"
        )


def symbolic_state(model: nn.Module, tensors: Mapping[int, Source], dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the model's state dict with symbolic tensors. Tied names share one."""
    symbols: dict[int, torch.Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in tensors:  # refused only if it is to be written: saves of adapters leave most out
            state[name] = value
            continue
        if id(value) not in symbols:
            symbol: torch.Tensor = SymbolicTensor(tensors[id(value)], _no_values)
            symbols[id(value)] = symbol.to(dtype) if dtype is not None and symbol.is_floating_point() else symbol
        state[name] = symbols[id(value)]
    return state


def _no_values(part: Expression, operation: str) -> torch.Tensor:
    raise UnsupportedError(
        f"saving needs the result of {operation} at once, for which a full parameter of shape {part.shape} would have "
        "to be gathered; save this model with stage3_gather_16bit_weights_on_model_save"
    )


def _note_dtype(path: Path, dtype: torch.dtype) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def model_of(config: str | os.PathLike[str]) -> transformers.PreTrainedModel:
    """Return the model of a configuration, on the meta device."""
    values = model_config(os.fspath(config), {"config": os.fspath(config)})
    try:
        kind = model_class(None, values, trust_remote_code=False)
    except ConfigError as error:
        raise ConfigError(
            f"config {config}: {error}; or pass {NO_CONFIG}, which writes the parameters under the names that the "
            "checkpoint has"
        ) from error
    with torch.device("meta"):
        model: transformers.PreTrainedModel = kind(values)
    model.tie_weights()
    if own_files(os.fspath(config), ["generation_config.json"]):
        model.generation_config = transformers.GenerationConfig.from_pretrained(os.fspath(config))
    return model


def give_dtypes(model: transformers.PreTrainedModel, dtypes: Mapping[int, torch.dtype]) -> None:
    """Give parameters and buffers of a model on meta their dtypes, by `id`; name these in its configurations, too.

    Source: transformers 5.24 `modeling_utils.py`, `_get_dtype`.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(dtypes.get(id(tensor), tensor.dtype))
    floating = {dtype for dtype in dtypes.values() if dtype.is_floating_point}
    if len(floating) == 1:
        parts = (getattr(model.config, key, None) for key in getattr(model.config, "sub_configs", ()))
        for config in (model.config, *parts):
            if config is not None:
                config.dtype = next(iter(floating))


def describe_plain(
    tensors: Mapping[str, Source], scratch: Path, *, dtype: torch.dtype | None, max_shard_size: int | str
) -> list[SavedFile]:
    """Return the files of weights for tensors that keep their names. Write the index, if there is one, to `scratch`."""
    expressions = plain_file("", tensors, dtype).tensors
    empty = {name: torch.empty(part.shape, dtype=part.dtype, device="meta") for name, part in expressions.items()}
    split = huggingface_hub.split_torch_state_dict_into_shards(
        empty, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (scratch / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return [
        SavedFile(file, {name: expressions[name] for name in names}, {"format": "pt"})
        for file, names in split.filename_to_tensors.items()
    ]


def plain_file(name: str, tensors: Mapping[str, Source], dtype: torch.dtype | None) -> SavedFile:
    """Return one file of tensors that keep their names; floating-point ones are cast, if a dtype is given."""

    def in_file(source: Source) -> Expression:
        is_plain = source.dtype in DTYPES  # fp8 has scales
        return cast(source, dtype) if dtype is not None and is_plain else source

    return SavedFile(name, {key: in_file(source) for key, source in tensors.items()}, {"format": "pt"})


def default_shard_size() -> int | str:
    """Return the default size of shards in `save_pretrained`, which depends on the release."""
    save = inspect.signature(transformers.PreTrainedModel.save_pretrained)
    size: int | str = save.parameters["max_shard_size"].default
    return size
