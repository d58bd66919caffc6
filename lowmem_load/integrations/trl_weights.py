"""TRL's weights for vLLM under `install`: in buckets, where TRL gathers parameter by parameter.

GRPO, RLOO and other trainers of trl 1.16 have a `VLLMGeneration`, whose `sync_weights` hands what `_iter_named_params`
yields to the server's client, or to vLLM in the same process. Here it runs unchanged, but gets the tensors of
`iter_weights`. With these come the names of the checkpoint, which vLLM loads by. Online DPO has a method of its own,
which gathers and sends; it is replaced.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from lowmem_load.replaced import holding, replaced
from lowmem_load.saving.iter_weights import Arguments, Weights, plan_weights
from lowmem_load.saving.local_shards import is_dtensor
from lowmem_load.saving.push_weights import flat, handed_out, metadata_of

BUCKET_BYTES = 1 << 30

_SYNC, _ITERATE, _METADATA = "sync_weights", "_iter_named_params", "_weight_metadata"

_MOVE = "_move_model_to_vllm_inner"

_NOTHING = contextlib.nullcontext()

_PAIRS: ContextVar[Iterator[tuple[str, torch.Tensor]] | None] = ContextVar("lowmem_load_pairs", default=None)
"""What the running `sync_weights` sends."""


@contextlib.contextmanager
def weights_hooked(module: Any) -> Iterator[None]:
    """Inside, `VLLMGeneration.sync_weights` of TRL gathers no parameter. Other releases of TRL are left alone."""
    cls = getattr(module, "VLLMGeneration", None)
    is_known = hasattr(cls, _SYNC) and hasattr(cls, _ITERATE) and _METADATA in inspect.getsource(module)
    with replaced((cls, _SYNC, sync), (cls, _ITERATE, iterate), everywhere=True) if is_known else _NOTHING:
        yield


@contextlib.contextmanager
def online_dpo_hooked(module: Any) -> Iterator[None]:
    """Inside, `OnlineDPOTrainer._move_model_to_vllm` of TRL gathers no parameter. Other releases are left alone."""
    cls = getattr(module, "OnlineDPOTrainer", None)
    with replaced((cls, _MOVE, move), everywhere=True) if hasattr(cls, _MOVE) else _NOTHING:
        yield


def sync(ordinary: Callable[[Any], None], generation: Any) -> None:
    """Do what `VLLMGeneration.sync_weights` does. Collective: all ranks, as that is."""
    weights = _planned(generation.model, generation.mode)
    if weights is None:
        ordinary(generation)
        return
    setattr(generation, _METADATA, metadata_of(weights))  # else TRL takes all weights twice, to see what there is
    with handed_out(weights) as buckets, holding(_PAIRS, flat(buckets)):
        ordinary(generation)


def move(ordinary: Callable[[Any], None], trainer: Any) -> None:
    """Do what `OnlineDPOTrainer._move_model_to_vllm_inner` does. Collective: all ranks, as that is."""
    weights = _planned(trainer.model, trainer.vllm_mode)
    if weights is None:
        ordinary(trainer)
        return
    with handed_out(weights) as buckets:
        if trainer.vllm_mode == "server" and trainer.accelerator.is_main_process:
            trainer.vllm_client.update_named_params(metadata_of(weights), flat(buckets))
        for bucket in buckets:  # of all other ranks, or of vLLM in this process
            if trainer.vllm_mode == "colocate":
                trainer.llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights(bucket)


def _planned(model: Any, mode: str) -> Weights | None:
    """Return the weights to send, for rank 0 or for all; None if nothing has to be gathered."""
    if not any(map(_is_in_pieces, model.parameters())):
        return None
    is_peft = hasattr(model, "merge_adapter")  # TRL merges adapters, too
    return plan_weights(model, Arguments(BUCKET_BYTES, "all" if mode == "colocate" else 0, None, None, is_peft))


def iterate(ordinary: Callable[[Any], Iterator[Any]], generation: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return what `sync` sends, if it runs."""
    pairs = _PAIRS.get()
    return ordinary(generation) if pairs is None else pairs


def _is_in_pieces(parameter: torch.Tensor) -> bool:
    if is_dtensor(parameter):
        return True
    if "deepspeed" not in sys.modules:
        return False
    from lowmem_load.ds.parameters import is_partitioned

    return is_partitioned(parameter)
