"""install() and uninstall(): lowmem_load for a whole script, wherever ZeRO-3 is active in it.

`install` is `streaming(None)` without a block, and leaves to stock what cannot be streamed. It also hooks into
`deepspeed.initialize`, saves, and `engine.load_checkpoint`.
"""

from __future__ import annotations

import base64
import contextlib
import os
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from lowmem_load.api.load_model import why_left_to_stock
from lowmem_load.api.request import Options
from lowmem_load.api.streaming import following
from lowmem_load.config.precision import Precision
from lowmem_load.config.settings import Settings, read_settings
from lowmem_load.ds.engine_states import is_plain_zero3, wants_universal
from lowmem_load.ds.hooks import engine_hooked, hooked, is_shell
from lowmem_load.ds.parameters import is_partitioned
from lowmem_load.errors import ConfigError, LoadOrderWarning
from lowmem_load.hf.active import transformers_models
from lowmem_load.integrations.accelerate_fsdp2 import llamafactory_loads, pending_loads
from lowmem_load.integrations.trainer_saves import saves_hooked
from lowmem_load.pipeline.load import REPORT_ATTRIBUTE
from lowmem_load.report import OnLoad
from lowmem_load.resume.load_checkpoint import load_checkpoint
from lowmem_load.resume.open_checkpoint import saved_by
from lowmem_load.saving.model_digest import unwrapped
from lowmem_load.saving.save import ranks_of

_installed: list[contextlib.ExitStack] = []  # what to undo: at most one


def install(
    *,
    progress: bool | None = None,
    verify: bool = False,
    strict: bool = False,
    saves: bool = True,
    on_load: OnLoad | None = None,
) -> None:
    """Load every model straight into ZeRO-3 partitions from now on, while ZeRO-3 is active in transformers.

    ZeRO-3 is active after `TrainingArguments(deepspeed=...)`, `Accelerator(deepspeed_plugin=...)`, `accelerate launch`
    or an `HfDeepSpeedConfig` in a variable, if that names stage 3. Each load follows that ds_config. All other loads
    are the ordinary ones. Calling this again does nothing.

    A load that works without `install` works with it. One that cannot be streamed (of an 8-bit model, for example) is
    left to stock ZeRO-3, and every rank emits a `NotStreamedWarning` with the reason. All ranks decide this together,
    before they allocate or read anything.

    Every rank emits a `LoadOrderWarning` if `deepspeed.initialize` under stage 3 gets a transformers model without
    partitions, or if a model loads after an `HfDeepSpeedConfig` was dropped that served no load.
    `warnings.simplefilter("error", LoadOrderWarning)` turns the warning into an error. A model for
    `lowmem_load.initialize(partition=...)` may have no partitions, and causes no warning.

    `engine.load_checkpoint`, and so `Trainer.train(resume_from_checkpoint=...)`, also takes a ZeRO-3 checkpoint that
    another number of ranks saved, as `lowmem_load.load_checkpoint` does. DeepSpeed itself refuses that.

    Local: no rank waits for another here. Call it before the first model is loaded.

    Args:
        progress: as for `load_model`.
        verify: as for `load_model`. A load that cannot be streamed cannot be verified either, and is an error then.
        strict: make it an error (usually an `UnsupportedError`) if a load cannot be streamed.
        saves: let `Trainer.save_model`, `Accelerator.save_model` and `engine.save_16bit_model` write the same files
            under ZeRO-3 without gathering, and let `save_pretrained` refuse to write empty parameters; see
            docs/saving.md. They need no stage3_gather_16bit_weights_on_model_save. False leaves all saves to stock.
        on_load: called on every rank with the `LoadReport` of each streamed load, at its end.
    """
    if _installed:
        return
    options = Options(progress, verify, on_load, is_lenient=not strict)
    with contextlib.ExitStack() as stack:
        stack.enter_context(following(options, everywhere=True))
        stack.enter_context(pending_loads(options))
        stack.enter_context(llamafactory_loads(options))
        if saves:
            stack.enter_context(saves_hooked())
        stack.enter_context(engine_hooked("load_checkpoint", _load_checkpoint))
        stack.enter_context(hooked(_before_engine))
        _installed.append(stack.pop_all())


def uninstall() -> None:
    """Undo `install`: all loads are ordinary again. Does nothing if nothing is installed."""
    while _installed:
        _installed.pop().close()


def _before_engine(given: Mapping[str, Any]) -> None:
    """Do what `deepspeed.initialize` needs done to its model, and warn of one that was loaded too early."""
    model = given.get("model")
    if not isinstance(model, nn.Module):
        return
    try:
        settings = read_settings(_ds_config_of(given), world_size=1)
    except ConfigError:  # there is none, or DeepSpeed is about to report it
        return
    _cast_adapters(model, settings)
    if settings.stage == 3 and not is_shell(model):
        _check_load_order(model)


def _ds_config_of(given: Mapping[str, Any]) -> Any:
    configs = (given.get("config"), given.get("config_params"), getattr(given.get("args"), "deepspeed_config", None))
    found = next((config for config in configs if config is not None), None)
    if isinstance(found, str) and not os.path.exists(found):  # Source: deepspeed 0.19.8 runtime/config.py
        with contextlib.suppress(ValueError):  # DeepSpeed is about to report it
            return base64.urlsafe_b64decode(found).decode()
    return found


def _cast_adapters(model: nn.Module, settings: Settings) -> None:
    """Cast what was added to a streamed model of 4-bit weights: stock's engine does, where nothing is partitioned."""
    reports = [getattr(found, REPORT_ATTRIBUTE, None) for found in transformers_models(model)]
    is_packed = any(report is not None and report.num_quantized for report in reports)
    if not is_packed or settings.precision is Precision.FP32:
        return
    for parameter in model.parameters():
        if parameter.is_floating_point() and not is_partitioned(parameter):
            parameter.data = parameter.data.to(settings.dtype)


def _check_load_order(model: nn.Module) -> None:
    """Warn for each transformers model that `deepspeed.initialize` partitions only now."""
    for found in transformers_models(model):  # with any partition, it was loaded under ZeRO-3, and added to since
        parameters = list(found.parameters())
        if parameters and not any(map(is_partitioned, parameters)) and not why_left_to_stock(found):
            mib = sum(parameter.numel() * parameter.element_size() for parameter in parameters) / 2**20
            warnings.warn(
                f"{type(found).__name__}: every rank holds {mib:.1f} MiB of it whole, and ZeRO-3 partitions it only "
                "now: no ZeRO-3 configuration was active when it was loaded. First make TrainingArguments("
                "deepspeed=...), Accelerator(deepspeed_plugin=...) or HfDeepSpeedConfig(...), keep it in a variable, "
                "then call from_pretrained",
                LoadOrderWarning,
                stacklevel=4,  # the caller of deepspeed.initialize
            )


def _load_checkpoint(engine: Any, given: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]] | None:
    """Load a checkpoint that another number of ranks saved, in place of `engine.load_checkpoint`; else return None."""
    if not is_plain_zero3(engine) or wants_universal(engine) or given["custom_load_fn"] is not None:
        return None
    ranks = ranks_of(unwrapped(engine))
    # Ranks may see only the files of their own node. All must take the same way.
    with ranks.step("finding the checkpoint") as step:
        step.payload = saved_by(given["load_dir"], given["tag"])
    found = set(step.payloads)
    if len(found) > 1 or found <= {None, ranks.world_size}:
        return None
    return load_checkpoint(engine, **{name: value for name, value in given.items() if name != "custom_load_fn"})
