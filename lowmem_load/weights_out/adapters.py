"""Adapters alone, handed to an inference engine that serves them: as a folder, which all releases of both take.

Sources: vllm 0.32 `lora/request.py` and `v1/engine/llm_engine.py`, where `load_inplace` replaces an adapter of the same
number; sglang 0.5 `srt/entrypoints/engine.py`. Its `load_lora_adapter_from_tensors` differs between patch releases.
"""

from __future__ import annotations

import fcntl
import functools
import inspect
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowmem_load.errors import ConfigError
from lowmem_load.saving.folder import write_adapter
from lowmem_load.weights_out.send_weights import Tensors

OF_VLLM, OF_SGLANG = "add_lora", "load_lora_adapter"

_SHARED_MEMORY, _PREFIX = Path("/dev/shm"), "lowmem_load-adapters-"


def engine_of(client: Any) -> Any:
    """Return what has the method for adapters: vLLM's `LLM` has an engine. Raise ConfigError if nothing has."""
    inner = getattr(client, "llm_engine", client)
    if callable(getattr(inner, OF_VLLM, None)) or callable(getattr(client, OF_SGLANG, None)):
        if inspect.iscoroutinefunction(getattr(inner, OF_VLLM, None)):
            raise ConfigError(
                f"push_weights: client: its {OF_VLLM} is asynchronous; give a function that takes buckets"
            )
        return inner
    raise ConfigError(
        f"push_weights: client: a {type(client).__name__} is no function and has neither {OF_VLLM} (vLLM) nor "
        f"{OF_SGLANG} (SGLang), so it takes no adapters"
    )


def hand_over_adapter(
    client: Any, name: str, config: dict[str, Any], folder: Path | None, buckets: Iterator[Tensors]
) -> Any:
    """Hand an adapter to an engine, as a folder. Return vLLM's request to generate with; None from SGLang."""
    tensors = {key: value.cpu() for bucket in buckets for key, value in bucket}
    path = Path(_shared_folder().name) / name if folder is None else folder
    write_adapter(path, tensors, config)
    engine = engine_of(client)
    if hasattr(engine, OF_VLLM):
        from vllm.lora.request import LoRARequest

        # vLLM knows adapters by numbers; of people's own, which count from 1, this is none.
        number = zlib.crc32(name.encode()) & 0x7FFFFFFF | 1 << 16
        request = functools.partial(LoRARequest, lora_name=name, lora_int_id=number, lora_path=str(path))
        if not engine.add_lora(request(load_inplace=True)):
            raise ConfigError(f"push_weights: client: {OF_VLLM} did not load the adapter {name!r}")
        return request()
    engine.unload_lora_adapter(lora_name=name)  # loads are refused of one that it has; where it has none, this fails
    answer = engine.load_lora_adapter(lora_name=name, lora_path=str(path))
    if not getattr(answer, "success", True):
        raise ConfigError(f"push_weights: client: {OF_SGLANG} says: {answer.error_message}")
    return None


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
