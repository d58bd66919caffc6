"""TRL's weights under `install`: in buckets to vLLM, where TRL gathers.

GRPO, RLOO and other trainers of trl 1.16 have a `VLLMGeneration`, whose `sync_weights` hands what `_iter_named_params`
yields to the server's client, or to vLLM in the same process. Here it runs unchanged, but gets the tensors of
`iter_weights`. With these come the names of the checkpoint, which vLLM loads by. The asynchronous trainers (AsyncGRPO)
hand what `_streaming_iter` yields to a thread, which sends it; to a server with LoRA they give an adapter in a folder.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from lowmem_load import foreign_names
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.errors import UnsupportedError, outside_level
from lowmem_load.replaced import Handlers, holding, warn_of_missing
from lowmem_load.weights_out.iter_weights import Arguments, metadata_of, plan_weights
from lowmem_load.weights_out.rank_shards import group_of, ranks_of
from lowmem_load.weights_out.save import save_model
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


_TOLD = "_weight_update_info"
"""Attribute of the asynchronous trainers' client: what the server is told of the weights."""


def sync_async(ordinary: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what `_sync_weight_merged` of an asynchronous trainer does. Collective: all ranks, as that is."""
    model, client = trainer.accelerator.unwrap_model(trainer.model), trainer.weight_transfer
    weights = _planned(model, "server")
    if weights is None:
        return ordinary(trainer, *args, **kwargs)
    turn = threading.Lock()
    with delivery(weights) as buckets, contextlib.ExitStack() as stack:
        stack.enter_context(_waits_by_steps(weights.ranks, trainer.accelerator))
        if type(client).__name__ == "WeightTransferClient":  # one of a script has the tensors alone
            foreign_names.require_attributes(foreign_names.TRL, client, (_TOLD,))
            names, dtypes, shapes = zip(*metadata_of(weights), strict=True)
            told = getattr(client, _TOLD) | {"names": names, "dtype_names": dtypes, "shapes": shapes}
            stack.enter_context(_instead(client, **{_TOLD: told}))
        if hasattr(model, "merge_adapter"):  # the weights come merged, and the model stays as it is
            stack.enter_context(_instead(model, merge_adapter=lambda: None, unmerge_adapter=lambda: None))
        pairs = _logged(name_tensor_pairs(buckets))
        stack.enter_context(holding(_PAIRS, _in_turn(pairs, turn)))
        stack.callback(_close, pairs, turn)
        return ordinary(trainer, *args, **kwargs)


def sync_adapter(ordinary: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what `_sync_weight_lora` of an asynchronous trainer does. Collective: all ranks, as that is."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not _is_sharded(model):
        return ordinary(trainer, *args, **kwargs)
    ranks = ranks_of(model)
    with ranks.step("handing over the adapter"), _waits_by_steps(ranks, trainer.accelerator):
        return ordinary(trainer, *args, **kwargs)


def save_adapter(
    ordinary: Callable[..., None],
    model: Any,
    accelerator: Any,
    adapter_name: str,
    dest_dir: str,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Do what `save_lora_adapter` of an asynchronous trainer does, within `sync_adapter`. Collective: all ranks."""
    if not _is_sharded(model):
        return ordinary(model, accelerator, adapter_name, dest_dir, *args, **kwargs)
    staged = Path(dest_dir).with_name(f".{Path(dest_dir).name}.tmp")
    save_model(model, staged, selected_adapters=[adapter_name])
    if accelerator.is_main_process:
        shutil.rmtree(dest_dir, ignore_errors=True)
        (staged if adapter_name == "default" else staged / adapter_name).rename(dest_dir)  # PEFT nests all others
        shutil.rmtree(staged, ignore_errors=True)
    return None


def _waits_by_steps(ranks: RankGroup, accelerator: Any) -> contextlib.AbstractContextManager[None]:
    """Inside, ranks that wait for all learn that a request of rank 0 has failed, unlike in a barrier."""

    def wait() -> None:
        with ranks.step("waiting for all ranks"):
            pass

    return _instead(accelerator, wait_for_everyone=wait)


@contextlib.contextmanager
def _instead(owner: Any, **attributes: Any) -> Iterator[None]:
    """Inside, an object has these attributes."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)


def _in_turn(pairs: Iterator[Any], turn: threading.Lock) -> Iterator[Any]:
    """Yield pairs in TRL's thread. If a request fails meanwhile, this one must not be in another step: see `_close`."""
    while True:
        with turn:
            pair = next(pairs, None)
        if pair is None:
            return
        yield pair
        del pair


def _close(pairs: Generator[Any, None, None], turn: threading.Lock) -> None:
    """End the pairs, once TRL's thread is not in a step of the ranks."""
    with turn:
        pairs.close()


def _logged(pairs: Iterator[tuple[str, torch.Tensor]]) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Log an error before it is raised: on its way TRL's client waits for an answer that may not come."""
    try:
        yield from pairs
    except Exception:
        logger.exception("the weights cannot be sent to vLLM")
        raise


def _is_sharded(model: Any) -> bool:
    return any(group_of(parameter) is not None for parameter in model.parameters())


def _planned(model: Any, mode: str) -> Sending | None:
    """Return the weights to send, for rank 0 or for all; None if they need not, or cannot, be sent in buckets."""
    if not _is_sharded(model):
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
ASYNC_HANDLERS: Handlers = {
    **dict.fromkeys(foreign_names.ASYNC_SYNCS, sync_async),
    **dict.fromkeys(foreign_names.ASYNC_ITERS, iterate),
    **dict.fromkeys(foreign_names.ASYNC_ADAPTER_SYNCS, sync_adapter),
    **dict.fromkeys(foreign_names.ASYNC_SAVES, save_adapter),
}
