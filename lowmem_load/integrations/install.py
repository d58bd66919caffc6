"""streaming() and install(): lowmem_load inside code that calls `from_pretrained` by itself, for a block or a script.

`install` is `streaming(None)` without a block, and leaves to stock what cannot be streamed. It also hooks into
`deepspeed.initialize`, saves, and `engine.load_checkpoint`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from lowmem_load import foreign_names
from lowmem_load.config.settings import Partition
from lowmem_load.errors import ConfigError
from lowmem_load.foreign_names import ForeignName
from lowmem_load.integrations.hooks import entered_once_imported, replaced_once_imported
from lowmem_load.load.load import Options
from lowmem_load.load.load_model import streaming_by_active_config, streaming_by_config
from lowmem_load.load.report import OnLoad
from lowmem_load.phases import without_progress
from lowmem_load.planning.replicas import ShareReads
from lowmem_load.replaced import Handlers

logger = logging.getLogger(__name__)


@without_progress
@contextlib.contextmanager
def streaming(
    ds_config: Any = None,
    *,
    partition: Partition | None = None,
    stream: bool = False,
    share_reads: ShareReads = "auto",
) -> Iterator[None]:
    """Inside, any `from_pretrained` of a transformers model loads as `load_model` does, whoever calls it.

    Under stages 0 to 2 models keep the dtype that the caller asked for; under stage 3 the ds_config decides, as with
    stock ZeRO-3. Other threads load in the ordinary way. On exit everything is as before.

    Args:
        ds_config: as for `load_model`. None follows transformers: each load goes by the ZeRO-3 configuration that
            TrainingArguments, accelerate's plugin or an `HfDeepSpeedConfig` has set. Where accelerate will shard the
            model by FSDP2, it is lazy, as by `lazy`, also after the block. Else loads are ordinary.
        partition: as for `load_model`, for each model that is loaded inside. A model without a chosen module stays
            whole.
        stream: as for `load_model`.
        share_reads: as for `load_model`.

    Raises:
        ConfigError: ds_config cannot be used. Loads inside raise as `load_model` does.
    """
    options = Options(stream=stream, share_reads=share_reads)
    if ds_config is not None:
        with streaming_by_config(ds_config, options, partition=partition):
            yield
        return
    if partition is not None:
        raise ConfigError("streaming() without a ds_config takes no partition")
    from lowmem_load.integrations.accelerate import lazy_loads  # a load by a ds_config needs none of it
    from lowmem_load.integrations.diffusion import diffusers_loads

    with (
        streaming_by_active_config(options),
        lazy_loads(options, everywhere=False),
        diffusers_loads(options, everywhere=False),
    ):
        yield


_installed: list[contextlib.ExitStack] = []  # what to undo: at most one


@without_progress
def install(
    *,
    strict: bool = False,
    saves: bool = True,
    on_load: OnLoad | None = None,
    stream: bool = False,
    share_reads: ShareReads = "auto",
) -> None:
    """From now on, load models straight into ZeRO-3 partitions or FSDP2 shards, wherever one of them is active.

    ZeRO-3 is active after `TrainingArguments(deepspeed=...)`, `Accelerator(deepspeed_plugin=...)`, `accelerate launch`
    or an `HfDeepSpeedConfig` in a variable, if that names stage 3. FSDP2 is active where accelerate or a
    `DistributedConfig` asks for it; `from_pretrained` then returns a lazy model, as it does for diffusers' models under
    ZeRO-3. All other loads stay as they are. Calling this again does nothing.

    If lowmem_load cannot load a model (in 8 bits, for example), the default loader does, and every rank emits a
    `NotStreamedWarning` with the reason. All ranks decide this together, before they allocate or read anything; for a
    lazy model each rank decides by itself. If a framework lacks a function that is patched, every rank emits one such
    warning, which says what stays as it is without lowmem_load.

    Every rank emits a `LoadOrderWarning` if `deepspeed.initialize` under stage 3 gets a transformers model without
    partitions, or if a model loads after an `HfDeepSpeedConfig` was dropped that served no load.
    `warnings.simplefilter("error", LoadOrderWarning)` turns the warning into an error. A model for
    `lowmem_load.initialize(partition=...)` may have no partitions, and causes no warning.

    `engine.load_checkpoint`, and so `Trainer.train(resume_from_checkpoint=...)`, also takes a ZeRO-3 checkpoint that
    another number of ranks saved, as `lowmem_load.load_checkpoint` does. DeepSpeed itself refuses that.
    TRL's trainers send the weights of partitioned and sharded models to vLLM in buckets, and mix reference models
    partition by partition; see docs/howto/rlhf.md. Local. Call it before the first model is loaded.

    Args:
        strict: True raises an error (usually an `UnsupportedError`) instead of falling back to the default loader.
        saves: let `Trainer.save_model` and `Accelerator.save_model` write the same files under ZeRO-3 without
            gathering, and let `save_pretrained` refuse to write empty parameters; see docs/howto/saving.md.
            stage3_gather_16bit_weights_on_model_save is not needed. False leaves saving alone.
        on_load: called on every rank with the `LoadReport` of each load, at its end.
        stream: as for `load_model`. URLs are taken as names in any case.
        share_reads: as for `load_model`.
    """
    if _installed:
        return
    from lowmem_load.integrations.accelerate import lazy_loads
    from lowmem_load.integrations.diffusion import diffusers_loads, diffusers_saves

    _warn_of_locks()
    options = Options(is_lenient=not strict, on_load=on_load, stream=stream, share_reads=share_reads)
    with contextlib.ExitStack() as stack:
        stack.enter_context(streaming_by_active_config(options, everywhere=True))
        stack.enter_context(lazy_loads(options, everywhere=True))
        stack.enter_context(diffusers_loads(options, everywhere=True))
        stack.enter_context(
            replaced_once_imported(
                [foreign_names.LLAMAFACTORY_LOAD], lambda: _late("llamafactory").load_handlers(options)
            )
        )
        stack.enter_context(replaced_once_imported(_TRL, lambda: _late("trl").HANDLERS))
        stack.enter_context(entered_once_imported(_ENGINES, lambda _: _late("engine").engines_hooked()))
        if saves:
            stack.enter_context(diffusers_saves())
            for names in _SAVES:
                stack.enter_context(replaced_once_imported(names, _save_handlers))
        _installed.append(stack.pop_all())


def _warn_of_locks() -> None:
    """Warn of old locks of builds, where DeepSpeed may wait before anything of ours runs."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        from lowmem_load.engines.ops import old_locks

        for text in old_locks():
            logger.warning("%s: delete it if nobody builds there", text)


def uninstall() -> None:
    """Undo `install`: all loads are ordinary again. Does nothing if nothing is installed. For tests; not public."""
    while _installed:
        _installed.pop().close()


# -- what is replaced once a program imports it. Our modules are imported then, or by the first call -------------------

_TRL = (
    foreign_names.SYNC_WEIGHTS,
    foreign_names.ITER_NAMED_PARAMS,
    foreign_names.MOVE_TO_VLLM,
    foreign_names.SYNC_TARGET_MODEL,
)
_ENGINES = (foreign_names.INITIALIZE, foreign_names.LOAD_CHECKPOINT)
_SAVES = (
    (foreign_names.SAVE_MODEL, foreign_names.GET_STATE_DICT, foreign_names.SAVE),
    (foreign_names.TRAINER_SAVE,),
    (foreign_names.MODEL_SAVE,),
    (foreign_names.ADAPTER_SAVE,),
)


def _late(module: str) -> Any:
    """Return a module of this folder, which only programs that use its framework import."""
    return importlib.import_module(f"lowmem_load.integrations.{module}")


def _save_handlers() -> Handlers:
    replaced_names = {name for names in _SAVES for name in names} - {foreign_names.SAVE}
    return {name: functools.partial(_save, name) for name in replaced_names}


def _save(name: ForeignName, ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # What DeepSpeed has not partitioned, stock can save. The handlers need DeepSpeed: 70 MiB, and seconds of imports.
    if "deepspeed" not in sys.modules:
        return ordinary(*args, **kwargs)
    handlers = {**_late("accelerate").SAVE_HANDLERS, **_late("saves").HANDLERS}
    return handlers[name](ordinary, *args, **kwargs)
