"""TRL's weights under `install`: in buckets to vLLM, where TRL gathers.

GRPO, RLOO and other trainers of trl 1.16 have a `VLLMGeneration`, whose `sync_weights` hands what `_iter_named_params`
yields to the server's client, or to vLLM in the same process. Here it runs unchanged, but gets the tensors of
`iter_weights`. With these come the names of the checkpoint, which vLLM loads by.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from lowmem_load import foreign_names
from lowmem_load.errors import UnsupportedError, outside_level
from lowmem_load.replaced import Handlers, holding, warn_of_missing
from lowmem_load.weights_out.iter_weights import Arguments, metadata_of, plan_weights
from lowmem_load.weights_out.rank_shards import group_of
from lowmem_load.weights_out.send import Sending, delivery, name_tensor_pairs

logger = logging.getLogger(__name__)

BUCKET_BYTES = 1 << 28
"""Enough for the bandwidth of a network. TRL by itself takes the memory of one parameter."""

_METADATA = "_weight_metadata"
"""Attribute of a `VLLMGeneration`: what the server is told of the weights."""

_PAIRS: ContextVar[Iterator[tuple[str, torch.Tensor]] | None] = ContextVar("lowmem_load_pairs", default=None)
"""What the running `sync_weights` sends."""


def sync(ordinary: Callable[..., None], generation: Any, *args: Any, **kwargs: Any) -> None:
    """Do what `VLLMGeneration.sync_weights` does. Collective: all ranks, as that is."""
    if not hasattr(generation, _METADATA):
        warn_of_missing([foreign_names.WEIGHT_METADATA])
        ordinary(generation, *args, **kwargs)
        return
    weights = _planned(generation.model, generation.mode)
    if weights is None:
        ordinary(generation, *args, **kwargs)
        return
    # Otherwise TRL takes all weights twice, to see what there is. It keeps what it has seen, under other names.
    before = getattr(generation, _METADATA)
    setattr(generation, _METADATA, metadata_of(weights))
    try:
        with delivery(weights) as buckets, holding(_PAIRS, _logged(name_tensor_pairs(buckets))):
            ordinary(generation, *args, **kwargs)
    finally:
        setattr(generation, _METADATA, before)


def _logged(pairs: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Log an error before it is raised: on its way TRL's client waits for an answer that may not come."""
    try:
        yield from pairs
    except Exception:
        logger.exception("the weights cannot be sent to vLLM")
        raise


def _planned(model: Any, mode: str) -> Sending | None:
    """Return the weights to send, for rank 0 or for all; None if they need not, or cannot, be sent in buckets."""
    if all(group_of(parameter) is None for parameter in model.parameters()):
        return None
    is_peft = hasattr(model, "merge_adapter")  # TRL merges adapters, too
    dst: Any = "all" if mode == "colocate" else 0
    try:
        return plan_weights(model, Arguments(bucket_bytes=BUCKET_BYTES, dst=dst, merge_adapters=is_peft))
    except UnsupportedError as error:  # on all ranks alike
        text = f"TRL gathers the weights for vLLM, because they cannot be sent in buckets: {error}"
        warnings.warn(text, stacklevel=outside_level())
        return None


def iterate(ordinary: Callable[..., Iterator[Any]], *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return what `sync` sends, if it runs, whatever the arguments: `sync` has begun to send."""
    pairs = _PAIRS.get()
    return ordinary(*args, **kwargs) if pairs is None else pairs


HANDLERS: Handlers = {foreign_names.SYNC_WEIGHTS: sync, foreign_names.ITER_NAMED_PARAMS: iterate}
