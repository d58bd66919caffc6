"""install() and uninstall(): lowmem_load for a whole script, wherever ZeRO-3 is active in it.

`install` is `streaming(None)` without a block, and leaves to stock what cannot be streamed. It also hooks into
`deepspeed.initialize`, saves, and `engine.load_checkpoint`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lowmem_load.api.load_into import load_into
from lowmem_load.api.load_model import streaming_by_active_config
from lowmem_load.integrations import frameworks
from lowmem_load.integrations.accelerate_fsdp2 import lazy_loads
from lowmem_load.pipeline.load import Options
from lowmem_load.replaced import Handler
from lowmem_load.report import OnLoad

_installed: list[contextlib.ExitStack] = []  # what to undo: at most one


def install(
    *,
    progress: bool | None = None,
    verify: bool = False,
    strict: bool = False,
    saves: bool = True,
    on_load: OnLoad | None = None,
    stream: bool = False,
) -> None:
    """Load every model straight into ZeRO-3 partitions from now on, while ZeRO-3 is active in transformers.

    ZeRO-3 is active after `TrainingArguments(deepspeed=...)`, `Accelerator(deepspeed_plugin=...)`, `accelerate launch`
    or an `HfDeepSpeedConfig` in a variable, if that names stage 3. Each load follows that ds_config. All other loads
    are the ordinary ones. Calling this again does nothing.

    A load that works without `install` works with it. One that cannot be streamed (of an 8-bit model, for example) is
    left to stock ZeRO-3, and every rank emits a `NotStreamedWarning` with the reason. All ranks decide this together,
    before they allocate or read anything.

    Where a release of a framework lacks a function that is replaced, every rank emits one `NotStreamedWarning` that
    says what stays stock's.

    Every rank emits a `LoadOrderWarning` if `deepspeed.initialize` under stage 3 gets a transformers model without
    partitions, or if a model loads after an `HfDeepSpeedConfig` was dropped that served no load.
    `warnings.simplefilter("error", LoadOrderWarning)` turns the warning into an error. A model for
    `lowmem_load.initialize(partition=...)` may have no partitions, and causes no warning.

    `engine.load_checkpoint`, and so `Trainer.train(resume_from_checkpoint=...)`, also takes a ZeRO-3 checkpoint that
    another number of ranks saved, as `lowmem_load.load_checkpoint` does. DeepSpeed itself refuses that.

    TRL's trainers send the weights of partitioned and sharded models to vLLM in buckets, and mix reference models
    partition by partition; see docs/situations/rlhf_weights.md.

    Local: no rank waits for another here. Call it before the first model is loaded.

    Args:
        progress: as for `load_model`.
        verify: as for `load_model`. A load that cannot be streamed cannot be verified either, and is an error then.
        strict: make it an error (usually an `UnsupportedError`) if a load cannot be streamed.
        saves: let `Trainer.save_model`, `Accelerator.save_model` and `engine.save_16bit_model` write the same files
            under ZeRO-3 without gathering, and let `save_pretrained` refuse to write empty parameters; see
            docs/saving.md. They need no stage3_gather_16bit_weights_on_model_save. False leaves all saves to stock.
        on_load: called on every rank with the `LoadReport` of each streamed load, at its end.
        stream: as for `load_model`. URLs are taken as names in any case.
    """
    if _installed:
        return
    options = Options(progress=progress, verify=verify, stream=stream, is_lenient=not strict, on_load=on_load)
    with contextlib.ExitStack() as stack:
        stack.enter_context(streaming_by_active_config(options, everywhere=True))
        stack.enter_context(lazy_loads(options, everywhere=True))
        stack.enter_context(_llamafactory_loads(options))
        stack.enter_context(frameworks.entered_once_imported(frameworks.ENGINE, lambda _: _hooks(saves=saves)))
        stack.enter_context(_trl_weights())
        _installed.append(stack.pop_all())


def uninstall() -> None:
    """Undo `install`: all loads are ordinary again. Does nothing if nothing is installed. For tests; not public."""
    while _installed:
        _installed.pop().close()


@contextlib.contextmanager
def _hooks(*, saves: bool) -> Iterator[None]:
    # FSDP2 needs neither these modules nor DeepSpeed: 70 MiB, and a second or two of imports.
    from lowmem_load.integrations.engine_hooks import engines_hooked
    from lowmem_load.integrations.trainer_saves import saves_hooked

    with saves_hooked() if saves else contextlib.nullcontext(), engines_hooked():
        yield


@contextlib.contextmanager
def _trl_weights() -> Iterator[None]:
    """Inside, TRL gathers no weights."""

    def handlers(hook: frameworks.Hook) -> Mapping[str, Handler]:
        from lowmem_load.integrations.trl_weights import HANDLERS

        return {name: HANDLERS[name] for name in hook.names}

    with contextlib.ExitStack() as stack:
        for hook in (frameworks.TRL_SYNC, frameworks.TRL_ONLINE_DPO, frameworks.TRL_MIX):
            stack.enter_context(frameworks.hooked(hook, functools.partial(handlers, hook)))
        yield


def _llamafactory_loads(options: Options) -> contextlib.ExitStack:
    """Inside, LLaMA-Factory v1 fills what it has made by `init_on_meta` and sharded by FSDP2 as `load_into` does.

    Source: LLaMA-Factory 0.9.5 `v1/plugins/trainer_plugins/distributed/fsdp2.py`, `FSDP2Engine.materialize_and_load`.
    """

    def load(_: Any, __: Any, model: nn.Module, name: str) -> None:
        report = load_into(model, name, progress=options.progress, verify=options.verify)
        if options.on_load is not None:
            options.on_load(report)

    hook = frameworks.LLAMAFACTORY_LOAD
    return frameworks.hooked(hook, lambda: dict.fromkeys(hook.names, load))
