"""Which files `save_pretrained` would write, found out by running it. Part of the transformers seam, see `loader.py`.

[Note: the saver] transformers' own `save_pretrained` (of an adapter: PEFT's) does the work: it leaves out tied and
ignored weights, turns conversions back, cuts the rest into shards, and writes the configuration, code and index files.
It is given a state dict of symbolic tensors, and only the function that would write a file of weights is replaced
while it runs. So keys, shards and files are what it would write of the whole model, with any release, and nothing is
read, gathered or allocated.

Written for transformers 4.51 to 5.23, peft 0.15 to 0.21.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.utils import logging as hf_logging

from lowmem_load.contract import PEFT, TRANSFORMERS, require
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.hf.replaced import Replacement, replaced
from lowmem_load.planning.expression import Expression, Source
from lowmem_load.symbolic.tensor import SymbolicTensor

_WRITE_WEIGHTS = "safe_save_file"
"""What writes a file of weights, as transformers' and PEFT's modules name it."""

_WHETHER_TO_WRITE = "should_save_on_this_rank"
"""Method that answers False on all ranks but the first; transformers 5.23 and later have it."""

OURS = ("state_dict", "is_main_process", "safe_serialization", "push_to_hub", "distributed_checkpoint", "save_function")
"""Keywords of `save_pretrained` that are decided here."""

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""To which weights can be cast: integers and fp8 mean nothing without scales."""


require(
    TRANSFORMERS,
    {"transformers.modeling_utils": (_WRITE_WEIGHTS,), "transformers:PreTrainedModel": ("num_parameters",)},
    arguments={"transformers:PreTrainedModel.save_pretrained": ("is_main_process", "max_shard_size", "state_dict")},
)


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One file of weights.

    Attributes:
        name: its path in the folder, with "/".
        tensors: what each tensor in it is made of, by its name in the file. Leaves are `Source`s whose `path` is "" and
            whose `name` is that of a parameter or buffer of the model.
        metadata: of its header.
        is_zip: whether it is one of torch.save's, not of safetensors'.
    """

    name: str
    tensors: Mapping[str, Expression]
    metadata: Mapping[str, str]
    is_zip: bool = False


def describe_save(
    model: nn.Module,
    scratch: Path,
    tensors: Mapping[int, Source],
    *,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    kwargs: Mapping[str, Any],
) -> list[SavedFile]:
    """Return the files of weights that `save_pretrained` would write; write all its other files to `scratch`.

    `scratch` is an empty folder of this rank's own. `tensors` has what stands for each parameter and buffer of the
    model, by `id`. A dtype of None leaves tensors as they are.

    Raises:
        ConfigError: a keyword or dtype that cannot be used here.
        UnsupportedError: the model has no `save_pretrained`, is quantized, or saves what is none of its tensors.
    """
    _refuse(model, dtype, kwargs)
    files: list[SavedFile] = []

    def record(
        _: Any, weights: Mapping[str, Any], path: str | os.PathLike[str], metadata: Any = None, **__: Any
    ) -> None:
        files.append(recorded(scratch, weights, path, metadata or {}))

    numel = sum(_numel(tensors[id(parameter)]) for parameter in model.parameters())
    arguments = {**kwargs, "state_dict": symbolic_state(model, tensors, dtype), "is_main_process": True}
    if isinstance(model, transformers.PreTrainedModel):
        arguments["max_shard_size"] = max_shard_size
    # It counts elements, of which the parameters themselves have none where they are partitioned.
    replacements: list[Replacement] = [(transformers.PreTrainedModel, "num_parameters", lambda *_, **__: numel)]
    replacements += [(module, _WRITE_WEIGHTS, record) for module in _modules_that_write(model)]
    if hasattr(transformers.PreTrainedModel, _WHETHER_TO_WRITE):
        replacements.append((transformers.PreTrainedModel, _WHETHER_TO_WRITE, lambda *_: True))
    with replaced(*replacements), _without_progress():
        save: Any = model.save_pretrained
        save(scratch, **arguments)
    if dtype is not None:
        _note_dtype(scratch / "config.json", dtype)
    if not files:
        raise UnsupportedError(f"{type(model).__name__}.save_pretrained wrote no safetensors file; save it with torch")
    return files


@contextlib.contextmanager
def logged_as(scratch: Path, folder: str) -> Iterator[None]:
    """Inside, what transformers logs of files in `scratch` names the folder that the user gave."""

    def rename(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if str(scratch) in message:
            record.msg, record.args = message.replace(str(scratch), folder), ()
        return True

    known = logging.Logger.manager.loggerDict
    loggers = [logging.getLogger(name) for name in list(known) if name.startswith("transformers.")]
    for logger in loggers:
        logger.addFilter(rename)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(rename)


def _refuse(model: nn.Module, dtype: torch.dtype | None, kwargs: Mapping[str, Any]) -> None:
    """Raise for what cannot be saved so."""
    wrong = sorted({*kwargs}.intersection(OURS))
    if wrong:
        raise ConfigError(f"save_model: {', '.join(wrong)}: not among the keywords that are passed on; drop it")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"save_model: dtype: {dtype!r} would destroy the weights; name one of {DTYPES}, or none")
    if not hasattr(model, "save_pretrained"):
        raise UnsupportedError(f"{type(model).__name__} has no save_pretrained: it is no model of transformers or PEFT")
    if getattr(getattr(model, "config", None), "distributed_config", None) is not None:
        raise UnsupportedError("the model is also distributed by transformers itself; save it with its save_pretrained")
    if isinstance(model, transformers.PreTrainedModel) and getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedError(
            "a quantized model cannot be saved from its partitions; save the adapter that was trained on it, or "
            "dequantize it on load"
        )


def _modules_that_write(model: nn.Module) -> list[Any]:
    """Return the modules of transformers and PEFT whose function writes files of weights."""
    modules: list[Any] = [transformers.modeling_utils]
    if "peft.peft_model" in sys.modules:
        require(PEFT, {"peft.peft_model": (_WRITE_WEIGHTS,)})
        modules.append(sys.modules["peft.peft_model"])
    return modules


def recorded(
    scratch: Path,
    weights: Mapping[str, Any],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str],
    *,
    is_zip: bool = False,
) -> SavedFile:
    """Return the file that somebody wants to write below `scratch`.

    Raises:
        UnsupportedError: something in it is none of the model's tensors.
    """
    name = Path(path).relative_to(scratch).as_posix()
    expressions = {key: _expression(name, key, value) for key, value in weights.items()}
    return SavedFile(name, expressions, dict(metadata), is_zip)


def symbolic_state(model: nn.Module, tensors: Mapping[int, Source], dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the model's state dict with a symbolic tensor for each tensor: the same one for all names of a tie."""
    symbols: dict[int, torch.Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in tensors:  # it is refused when it is to be written: an adapter's save leaves most out
            state[name] = value
            continue
        if id(value) not in symbols:
            symbol: torch.Tensor = SymbolicTensor(tensors[id(value)], _no_values)
            symbols[id(value)] = symbol.to(dtype) if dtype is not None and symbol.is_floating_point() else symbol
        state[name] = symbols[id(value)]
    return state


def _no_values(part: Expression, operation: str) -> torch.Tensor:
    raise UnsupportedError(
        f"saving needs the result of {operation} at once, for which a whole parameter of shape {part.shape} would have "
        "to be gathered; save this model with stage3_gather_16bit_weights_on_model_save"
    )


def _expression(file: str, name: str, value: Any) -> Expression:
    if not isinstance(value, SymbolicTensor):
        raise UnsupportedError(
            f"{file}: {name}: save_pretrained of this model saves a {type(value).__name__} that is none of its "
            "parameters and buffers, so it is not known how it is partitioned"
        )
    return value.expression


def _numel(source: Source) -> int:
    return torch.Size(source.shape).numel()


def _note_dtype(path: Path, dtype: torch.dtype) -> None:
    """Have the configuration name the dtype that the files have, not the one that the model has."""
    if not path.is_file():  # an adapter's
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _without_progress() -> Iterator[None]:
    """Hide transformers' bar of shards, of which none is written here."""
    shown = hf_logging.is_progress_bar_enabled()
    if shown:
        hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
