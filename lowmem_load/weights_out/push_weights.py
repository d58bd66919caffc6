"""push_weights: the buckets of `iter_weights`, handed to an inference engine's client.

Sources of the methods: trl 1.16 `generation/vllm_client.py`; sglang 0.5 `srt/entrypoints/engine.py`; vllm 0.28
`distributed/weight_transfer/base.py`, whose engines for trainers take a source of weights. Any other engine is a
function that takes a bucket.

An adapter alone is handed over as a folder, which all releases of vLLM and SGLang take. Sources: vllm 0.32
`lora/request.py` and `v1/engine/llm_engine.py`, where `load_inplace` replaces an adapter of the same number. SGLang's
`load_lora_adapter_from_tensors` differs between patch releases.
"""

from __future__ import annotations

import fcntl
import functools
import inspect
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import nn

from lowmem_load.errors import ConfigError
from lowmem_load.weights_out.buckets import PlannedTensor
from lowmem_load.weights_out.folder import refuse_url
from lowmem_load.weights_out.iter_weights import Arguments, plan_weights
from lowmem_load.weights_out.rank_shards import ranks_of, unwrapped
from lowmem_load.weights_out.send import Sending, Tensors, delivery

_OF_TRL, _OF_OLD_TRL, _OF_SGLANG = "update_named_params", "update_named_param", "update_weights_from_tensor"
_METHODS = _OF_TRL, _OF_OLD_TRL, _OF_SGLANG

_ADDS, _LOADS = "add_lora", "load_lora_adapter"
"""The methods of vLLM and SGLang for adapters."""

_RESETS = "reset_prefix_cache", "flush_cache"
"""Methods that drop what was computed with the old weights."""


def push_weights(
    engine_or_model: nn.Module,
    client: Any,
    *,
    adapters: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    **keywords: Any,
) -> Any:
    """Hand all weights of a model, or an adapter of PEFT alone, to an inference engine. See `iter_weights`.

    Args:
        engine_or_model: as for `iter_weights`.
        client: a function that takes a bucket, `[(name, tensor), ...]`, such as the `load_weights` of a vLLM model; or
            an object with TRL's `update_named_params(metadata, named_params)` or `update_named_param(name, weights)`,
            such as its `VLLMClient`; or with SGLang's `update_weights_from_tensor(named_tensors, flush_cache=)`, such
            as its `Engine`. An object's `reset_prefix_cache()` or `flush_cache()` is called at the end, if it has one.
            None on ranks that take no weights. If one rank has a client, the weights are sent to it alone, else to all.
        adapters: the name of the adapter to hand over alone. The client is then a function, vLLM's `LLM` or `LLMEngine`
            (with `enable_lora`), or SGLang's `Engine` (`enable_lora`), which load it from a folder in the place of the
            former one.
        folder: where to write that folder, for an engine on another machine. By default one in shared memory, as long
            as this process lives.
        **keywords: bucket_bytes, dtype, names and merge_adapters, as for `iter_weights`.

    Returns:
        Of an adapter for vLLM, on the rank of its client, the `LoRARequest` to generate with. Else None.

    Collective: all ranks that hold the model.
    Memory: as `iter_weights`, on ranks that are sent the weights; an adapter's folder.

    Raises:
        ConfigError: no rank has a client, or it cannot be used; and as `iter_weights`.
        RankError: the client of a rank failed, or did not take all weights; it is chained to the client's own error.
    """
    ranks = ranks_of(unwrapped(engine_or_model))
    with ranks.step("finding who takes the weights") as step:
        step.payload = True if client is not None else None
        needs_folder = adapters is not None and client is not None and not callable(client)
        if needs_folder:
            _engine_of(client)
        elif client is not None and not callable(client) and _method_of(client) is None:
            raise ConfigError(
                f"push_weights: client: a {type(client).__name__} is no function and has none of {', '.join(_METHODS)}"
            )
    takers = [rank for rank, takes in enumerate(step.payloads or [client is not None]) if takes]
    if not takers:
        raise ConfigError("push_weights: client: no rank has one")
    to: int | Literal["all"] = takers[0] if len(takers) == 1 else "all"
    request = None
    sending, config = plan_weights(engine_or_model, Arguments(to=to, adapters=adapters, **keywords))
    with delivery(sending) as buckets:
        if adapters is not None and needs_folder:
            path = None if folder is None else Path(folder)
            request = _hand_over_adapter(client, adapters, config, path, buckets)
        else:
            hand_over(client, sending, buckets)
    with ranks.step("resetting the cache"):
        _reset_cache(client)
    return request


def _reset_cache(client: Any) -> None:
    reset = next((name for name in _RESETS if hasattr(client, name)), None)
    if reset is not None:
        answer = getattr(client, reset)()
        if answer is False or getattr(answer, "success", True) is False:  # vLLM's and SGLang's
            raise ConfigError(
                f"push_weights: client: {reset} failed, so what was computed with the old weights is used on; end all "
                "requests of the engine, and reset its cache again"
            )


class WeightSource:
    """The weights of a model, as the engines for trainers in vLLM 0.28 and later take them: their `WeightSource`.

    Each iteration yields the present weights as (name, tensor), and is collective: all ranks have to make it, and to
    its end. Between two tensors, so within `send_weights`, no weight may change.

    The arguments are those of `iter_weights`. Of `to`, 0 is enough for vLLM's NCCL engine, whose rank 0 sends; its IPC
    engine needs "all".

    Raises:
        ConfigError, UnsupportedError, RankError: as `iter_weights`, when the metadata is asked for or when iterated.
    """

    def __init__(self, engine_or_model: nn.Module, **keywords: Any) -> None:
        self._engine, self._arguments = engine_or_model, Arguments(**keywords)
        self._metadata: list[PlannedTensor] | None = None

    def metadata(self) -> list[PlannedTensor]:
        """Return the `name`, `dtype` and `shape` of each tensor, in order. The first call is collective."""
        if self._metadata is None:
            self._metadata = plan_weights(self._engine, self._arguments)[0].tensors
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the value of each tensor, on ranks that get any. Collective."""
        yield from name_tensor_pairs(plan_weights(self._engine, self._arguments)[0].buckets())


def _method_of(client: Any) -> str | None:
    return next((name for name in _METHODS if callable(getattr(client, name, None))), None)


def hand_over(client: Any, sending: Sending, buckets: Iterator[Tensors]) -> None:
    """Hand all buckets to a client; of a rank that has none, take them."""
    method = _method_of(client)
    if client is None:
        for _ in buckets:
            pass
    elif method == _OF_TRL:
        client.update_named_params(metadata_of(sending), name_tensor_pairs(buckets))
    elif method == _OF_OLD_TRL:
        for name, tensor in name_tensor_pairs(buckets):
            client.update_named_param(name, tensor)
            del tensor
    elif method == _OF_SGLANG:
        for bucket in buckets:
            answer = client.update_weights_from_tensor(bucket, flush_cache=False)
            if isinstance(answer, tuple) and not answer[0]:  # whether it succeeded, and a message
                raise ConfigError(f"push_weights: client: {_OF_SGLANG} says: {answer[1]}")
    else:
        for bucket in buckets:
            client(bucket)


def metadata_of(sending: Sending) -> list[tuple[str, str, list[int]]]:
    """Return name, dtype ("bfloat16") and shape of each tensor in order, as TRL's client wants to know them before."""
    return [(tensor.name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in sending.tensors]


def name_tensor_pairs(buckets: Iterator[Tensors]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of all buckets."""
    for bucket in buckets:
        bucket.reverse()
        while bucket:
            yield bucket.pop()  # so that nothing here keeps it while the next bucket is made


# -- an adapter alone --------------------------------------------------------------------------------------------------

_SHARED_MEMORY, _PREFIX = Path("/dev/shm"), "lowmem_load-adapters-"


def _engine_of(client: Any) -> Any:
    """Return what has the method for adapters: vLLM's `LLM` has an engine. Raise ConfigError if nothing has."""
    inner = getattr(client, "llm_engine", client)
    if callable(getattr(inner, _ADDS, None)) or callable(getattr(client, _LOADS, None)):
        if inspect.iscoroutinefunction(getattr(inner, _ADDS, None)):
            raise ConfigError(f"push_weights: client: its {_ADDS} is asynchronous; give a function that takes buckets")
        return inner
    raise ConfigError(
        f"push_weights: client: a {type(client).__name__} is no function and has neither {_ADDS} (vLLM) nor "
        f"{_LOADS} (SGLang), so it takes no adapters"
    )


def _hand_over_adapter(
    client: Any, name: str, config: dict[str, Any], folder: Path | None, buckets: Iterator[Tensors]
) -> Any:
    """Hand an adapter to an engine, as a folder. Return vLLM's request to generate with; None from SGLang."""
    tensors = {key: value.cpu() for bucket in buckets for key, value in bucket}
    path = Path(_shared_folder().name) / name if folder is None else folder
    _write_adapter(path, tensors, config)
    engine = _engine_of(client)
    if hasattr(engine, _ADDS):
        from vllm.lora.request import LoRARequest

        # vLLM knows adapters by numbers; of people's own, which count from 1, this is none.
        number = zlib.crc32(name.encode()) & 0x7FFFFFFF | 1 << 16
        request = functools.partial(LoRARequest, lora_name=name, lora_int_id=number, lora_path=str(path))
        if not engine.add_lora(request(load_inplace=True)):
            raise ConfigError(f"push_weights: client: {_ADDS} did not load the adapter {name!r}")
        return request()
    engine.unload_lora_adapter(lora_name=name)  # loads are refused of one that it has; where it has none, this fails
    answer = engine.load_lora_adapter(lora_name=name, lora_path=str(path))
    if not getattr(answer, "success", True):
        raise ConfigError(f"push_weights: client: {_LOADS} says: {answer.error_message}")
    return None


def _write_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Write the two files of PEFT's `save_pretrained` that engines read, each at once in the place of the former."""
    refuse_url(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder) as made:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, Path(made, "adapter_model.safetensors"), metadata={"format": "pt"})
        text = json.dumps(config, indent=2, sort_keys=True)
        Path(made, "adapter_config.json").write_text(text, encoding="utf-8")
        for path in Path(made).iterdir():
            os.replace(path, folder / path.name)


@functools.cache
def _shared_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder in memory that lives as long as this process: an engine may read an adapter again.

    A process that is killed leaves its folder to the next one that makes one. A lock says who lives: processes of
    containers that share this memory do not see each other's numbers.
    """
    parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    for left in parent.glob(f"{_PREFIX}*"):
        if (lock := _locked(left)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    while True:
        folder = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True)
        if _locked(Path(folder.name)) is not None and os.path.isdir(folder.name):  # else taken for one that was left
            return folder


def _locked(folder: Path) -> int | None:
    """Lock a folder for as long as this process lives; return its file descriptor, None if another one has it."""
    try:
        number = os.open(folder, os.O_RDONLY)
    except OSError:  # it is gone, or another user's
        return None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        return None
    return number
