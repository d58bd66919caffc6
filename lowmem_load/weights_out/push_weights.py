"""push_weights: the buckets of `iter_weights`, handed to an inference engine's client.

Sources of the methods: trl 1.16 `generation/vllm_client.py`; sglang 0.5 `srt/entrypoints/engine.py`; vllm 0.28
`distributed/weight_transfer/base.py`, whose engines for trainers take a source of weights. Any other engine is a
function that takes a bucket.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from lowmem_load.errors import ConfigError
from lowmem_load.renamed import renamed_keywords
from lowmem_load.weights_out.buckets import PlannedTensor
from lowmem_load.weights_out.iter_weights import Arguments, plan_weights
from lowmem_load.weights_out.rank_shards import ranks_of, unwrapped
from lowmem_load.weights_out.send import Sending, Tensors, delivery, name_tensor_pairs

_OF_TRL, _OF_OLD_TRL, _OF_SGLANG = "update_named_params", "update_named_param", "update_weights_from_tensor"
_METHODS = _OF_TRL, _OF_OLD_TRL, _OF_SGLANG

_RESETS = "reset_prefix_cache", "flush_cache"
"""Methods that drop what was computed with the old weights."""


@renamed_keywords(engine_or_model="model")
def push_weights(model: nn.Module, client: Any, **keywords: Any) -> None:
    """Send all weights of a model to an inference engine. See `iter_weights`.

    Args:
        model: as for `iter_weights`.
        client: a function that takes a bucket, `[(name, tensor), ...]`, such as the `load_weights` of a vLLM model; or
            an object with TRL's `update_named_params(metadata, named_params)` or `update_named_param(name, weights)`,
            such as its `VLLMClient`; or with SGLang's `update_weights_from_tensor(named_tensors, flush_cache=)`, such
            as its `Engine`. An object's `reset_prefix_cache()` or `flush_cache()` is called at the end, if it has one.
            Its calls return when they have ended; a coroutine is an error. None on ranks that take no weights. If one
            rank has a client, the weights are sent to it alone, else to all.
        **keywords: bucket_bytes, dtype, names and merge_adapters, as for `iter_weights`.

    Collective: all ranks that have the model.
    Memory: as `iter_weights`, on ranks that are sent the weights.

    Raises:
        ConfigError: no rank has a client, or it cannot be used; and as `iter_weights`.
        RankError: the client of a rank failed, or did not take all weights; it is chained to the client's own error.

    Example:
        is_first = torch.distributed.get_rank() == 0
        client = VLLMClient("http://inference:8000") if is_first else None  # TRL's
        push_weights(engine, client, dtype=torch.bfloat16)  # on every rank
    """
    ranks = ranks_of(unwrapped(model))
    with ranks.step("finding who takes the weights") as step:
        step.payload = client is not None
        arguments = Arguments(dst="all", **keywords)
        if client is not None and not callable(client) and _method_of(client) is None:
            raise ConfigError(
                f"push_weights: client: a {type(client).__name__} is not a function and has none of the methods "
                f"{', '.join(_METHODS)}; pass a function that takes a bucket, or an object with one of them"
            )
    takers = [rank for rank, takes in enumerate(step.payloads) if takes]
    if not takers:
        raise ConfigError("push_weights: client: no rank has one; pass it on the rank that is to take the weights")
    dst: int | Literal["all"] = takers[0] if len(takers) == 1 else "all"
    sending = plan_weights(model, replace(arguments, dst=dst))
    with delivery(sending) as buckets:
        hand_over(client, sending, buckets)
    with ranks.step("resetting the cache"):
        if reset := next((name for name in _RESETS if hasattr(client, name)), ""):
            answer = _finished(getattr(client, reset)())
            if answer is False or getattr(answer, "success", True) is False:  # vLLM's and SGLang's
                raise ConfigError(
                    f"push_weights: client: {reset} failed, so what was computed with the old weights is still used; "
                    "end all requests of the engine, and reset its cache again"
                )


class WeightSource:
    """The weights of a model, as the engines for trainers in vLLM 0.28 and later take them: their `WeightSource`.

    Each iteration yields the present weights as (name, tensor), and is collective: all ranks have to make it, and to
    its end. Between two tensors, so within `send_weights`, no weight may change.

    The arguments are those of `iter_weights`. For `dst`, 0 is enough for vLLM's NCCL engine, whose rank 0 sends; its
    IPC engine needs "all".

    Raises:
        ConfigError, UnsupportedError, RankError: as `iter_weights`, when the metadata is asked for or when iterated.

    Example:
        source = WeightSource(engine, dst=0)
        names = [tensor.name for tensor in source.metadata()]
        for name, tensor in source:  # on every rank
            send_to_inference(name, tensor)
    """

    @renamed_keywords(engine_or_model="model", to="dst")
    def __init__(self, model: nn.Module, **keywords: Any) -> None:
        self._engine, self._arguments = model, Arguments(**keywords)
        self._metadata: list[PlannedTensor] | None = None

    def metadata(self) -> list[PlannedTensor]:
        """Return the `name`, `dtype` and `shape` of each tensor, in order. The first call is collective."""
        if self._metadata is None:
            self._metadata = plan_weights(self._engine, self._arguments).tensors
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the value of each tensor, on ranks that get any. Collective."""
        yield from name_tensor_pairs(plan_weights(self._engine, self._arguments).buckets())


def _method_of(client: Any) -> str | None:
    return next((name for name in _METHODS if callable(getattr(client, name, None))), None)


def hand_over(client: Any, sending: Sending, buckets: Iterator[Tensors]) -> None:
    """Hand all buckets to a client; take them on a rank that has none."""
    method = _method_of(client)
    if client is None:
        for _ in buckets:
            pass
    elif method == _OF_TRL:
        _finished(client.update_named_params(metadata_of(sending), name_tensor_pairs(buckets)))
    elif method == _OF_OLD_TRL:
        for name, tensor in name_tensor_pairs(buckets):
            _finished(client.update_named_param(name, tensor))
            del tensor
    elif method == _OF_SGLANG:
        for bucket in buckets:
            answer = _finished(client.update_weights_from_tensor(bucket, flush_cache=False))
            if isinstance(answer, tuple) and not answer[0]:  # whether it succeeded, and a message
                raise ConfigError(f"push_weights: client: {_OF_SGLANG} says: {answer[1]}")
    else:
        for bucket in buckets:
            _finished(client(bucket))


def _finished(answer: Any) -> Any:
    """Return what a client has answered, unless it has yet to do what it was asked for."""
    if inspect.isawaitable(answer):
        raise ConfigError(
            f"push_weights: client: a call returned a {type(answer).__name__}, which nothing awaits, so its work may "
            "never be done; pass a client whose calls return when they have ended, such as a function with asyncio.run"
        )
    return answer


def metadata_of(sending: Sending) -> list[tuple[str, str, list[int]]]:
    """Return name, dtype ("bfloat16") and shape of each tensor in order, as TRL's client wants to know them before."""
    return [(tensor.name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in sending.tensors]
