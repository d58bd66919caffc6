"""Weights under the names of files on the Hub: those of models in transformers 4. Version 5 converts them on load."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import torch

from lowmem_load.errors import LowMemLoadError
from lowmem_load.hf.load_lock import inside_load
from lowmem_load.hf.loader import TransformersCall
from lowmem_load.io.executor import Executor
from lowmem_load.io.fill import read_whole
from lowmem_load.planning.expression import Expression
from lowmem_load.planning.regions import FlatRange
from lowmem_load.symbolic.constructor import Context
from lowmem_load.symbolic.initialise import Initialiser
from lowmem_load.symbolic.tensor import SymbolicTensor
from lowmem_load.training_checkpoints.open_model import Values
from lowmem_load.training_checkpoints.saved_state import TiledTensor


def as_loaded(
    model: Any, config: str | os.PathLike[str], tensors: Mapping[str, Values], executor: Executor
) -> dict[str, Values] | str:
    """Return tensors under the names of a model, as transformers' own loader makes them; else why it does not.

    All elements are in the result: a loader leaves out without a word what its class does not want.
    """
    floating = {tensor.dtype for tensor in tensors.values() if tensor.dtype.is_floating_point}
    if len(floating) != 1:  # else the loader would cast some
        return "weights of several dtypes"
    (dtype,) = floating
    symbols = {id(tensor): SymbolicTensor(tensor.whole, _reader(executor)) for tensor in tensors.values()}
    weights = {name: symbols[id(tensor)] for name, tensor in tensors.items()}
    # A checkpoint may have both names of a tied weight, whose values are to be compared.
    reason = "weights of which the model has no part"
    for is_tied in sorted({False, bool(model.config.get_text_config().tie_word_embeddings)}):
        values = copy.deepcopy(model.config)
        values.tie_word_embeddings = values.get_text_config().tie_word_embeddings = is_tied
        try:
            loaded = _load(type(model), config, values, weights, dtype, executor)
        except LowMemLoadError as error:
            reason = str(error).partition(" says: ")[2] or "other shapes"
            continue
        found = {name: _values(tensor) for name, tensor in loaded.items()}
        distinct = {id(tensor): tensor.numel() for tensor in loaded.values()}
        if None not in found.values() and sum(distinct.values()) == sum(tensor.numel for tensor in tensors.values()):
            return {name: tensor for name, tensor in found.items() if tensor is not None}
    return reason


def _load(
    cls: Any,
    config: str | os.PathLike[str],
    values: Any,
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    executor: Executor,
) -> dict[str, torch.Tensor]:
    read = _reader(executor)

    def all_of(_: Any) -> Any:
        return lambda parameter: FlatRange(0, parameter.numel())

    context = Context(read, Initialiser(read), all_of, lambda _: None, executor.sources.reading)
    context.weights, context.is_quiet, context.is_partitioned = weights, True, False
    options = {"config": values, "dtype": dtype}
    call = TransformersCall(cls.from_pretrained.__func__, cls, (os.fspath(config),), options)
    with inside_load():
        loaded, _ = call.describe(context)
    return dict(loaded.state_dict(keep_vars=True))


def _reader(executor: Executor) -> Any:
    return lambda expression, _: read_whole(executor, expression)


def _values(tensor: torch.Tensor) -> Values | None:
    if not isinstance(tensor, SymbolicTensor):
        return None
    expression: Expression = tensor.expression
    return TiledTensor(expression.shape, expression.dtype, (0,), (expression,))
