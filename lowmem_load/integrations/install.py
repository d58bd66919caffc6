"""install() and uninstall(): lowmem_load for a whole script, wherever ZeRO-3 is active in it.

`install` is `streaming(None)` without a block, and leaves to stock what cannot be streamed. It also hooks into
`deepspeed.initialize`, saves, and `engine.load_checkpoint`.
"""

from __future__ import annotations

import base64
import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import nn

from lowmem_load.api.load_into import load_into
from lowmem_load.api.load_model import load_report, why_left_to_stock
from lowmem_load.api.streaming import following
from lowmem_load.config.ds_config import read_ds_config
from lowmem_load.config.precision import Precision
from lowmem_load.config.settings import read_settings
from lowmem_load.ds.engine_states import is_plain_zero3, wants_universal
from lowmem_load.ds.hooks import engine_hooked, hooked, is_shell
from lowmem_load.ds.parameters import is_partitioned
from lowmem_load.errors import ConfigError, LoadOrderWarning
from lowmem_load.hf.active import transformers_models
from lowmem_load.hf.replaced import replaced
from lowmem_load.integrations.accelerate_fsdp2 import pending_loads
from lowmem_load.integrations.import_hook import after_import
from lowmem_load.integrations.trainer_saves import HookedSaves
from lowmem_load.report import OnLoad
from lowmem_load.resume.load_checkpoint import load_checkpoint
from lowmem_load.resume.open_checkpoint import saved_by
from lowmem_load.saving.model_digest import unwrapped
from lowmem_load.saving.save import ranks_of


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
    partitions, or if a model loads after an `HfDeepSpeedConfig` was dropped that
    served no load.
    `warnings.simplefilter("error", LoadOrderWarning)` turns the warning into an error. Models for
    `lowmem_load.initialize(partition=...)` have no partitions on purpose, and cause no warning.

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
    if _Installed.stack is not None:
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            following(progress=progress, verify=verify, on_load=on_load, is_lenient=not strict, everywhere=True)
        )
        stack.enter_context(pending_loads(progress=progress, verify=verify, on_load=on_load, is_lenient=not strict))
        stack.enter_context(_llamafactory_hooked(progress=progress, verify=verify, on_load=on_load))
        stack.enter_context(hooked(_cast_adapters))
        if saves:
            stack.enter_context(hooked(stack.enter_context(HookedSaves()).begin))
        stack.enter_context(engine_hooked("load_checkpoint", _load_checkpoint))
        stack.enter_context(hooked(_check_load_order))
        _Installed.stack = stack.pop_all()


def uninstall() -> None:
    """Undo `install`: all loads are ordinary again. Does nothing if nothing is installed."""
    stack, _Installed.stack = _Installed.stack, None
    if stack is not None:
        stack.close()


class _Installed:
    """The only mutable state of this module. The names that it replaces in other packages exist once per process."""

    stack: ClassVar[contextlib.ExitStack | None] = None


@contextlib.contextmanager
def _llamafactory_hooked(*, progress: bool | None, verify: bool, on_load: OnLoad | None) -> Iterator[None]:
    """Inside, LLaMA-Factory v1 fills what it has made by `init_on_meta` and sharded by FSDP2 as `load_into` does.

    Source: LLaMA-Factory 0.9.5 `v1/plugins/trainer_plugins/distributed/fsdp2.py`, `FSDP2Engine.materialize_and_load`.
    """

    def load(_: Any, __: Any, model: nn.Module, name: str) -> None:
        report = load_into(model, name, progress=progress, verify=verify)
        if on_load is not None:
            on_load(report)

    with contextlib.ExitStack() as stack:

        def hook(module: Any) -> None:
            replacement = (module.FSDP2Engine, "_load_weights_from_hf_checkpoint", load)
            stack.enter_context(replaced(replacement, everywhere=True))

        stack.callback(after_import("llamafactory.v1.plugins.trainer_plugins.distributed.fsdp2", hook))
        yield


def _ds_config_of(given: Mapping[str, Any]) -> Any:
    configs = (given.get("config"), given.get("config_params"), getattr(given.get("args"), "deepspeed_config", None))
    found = next((config for config in configs if config is not None), None)
    if isinstance(found, str) and not os.path.exists(found):  # Source: deepspeed 0.19.8 runtime/config.py
        with contextlib.suppress(ValueError):  # DeepSpeed is about to report it
            return base64.urlsafe_b64decode(found).decode()
    return found


def _cast_adapters(given: Mapping[str, Any]) -> None:
    """Cast what was added to a streamed model of 4-bit weights: stock's engine does, where nothing is partitioned."""
    model = given.get("model")
    if not isinstance(model, nn.Module) or not any(map(_is_packed, transformers_models(model))):
        return
    try:
        settings = read_settings(_ds_config_of(given), world_size=1)
    except ConfigError:  # DeepSpeed is about to report it
        return
    if settings.precision is Precision.FP32:
        return
    for parameter in model.parameters():
        if parameter.is_floating_point() and not is_partitioned(parameter):
            parameter.data = parameter.data.to(settings.dtype)


def _is_packed(model: nn.Module) -> bool:
    try:
        return load_report(model).num_quantized > 0
    except ValueError:  # not loaded by lowmem_load
        return False


def _check_load_order(given: Mapping[str, Any]) -> None:
    """Warn for each transformers model that `deepspeed.initialize` partitions only now."""
    model = given.get("model")
    if not isinstance(model, nn.Module) or is_shell(model) or not _is_stage_3(_ds_config_of(given)):
        return
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
                stacklevel=3,  # the caller of deepspeed.initialize
            )


def _is_stage_3(ds_config: Any) -> bool:
    if ds_config is None:
        return False
    try:
        section = read_ds_config(ds_config).get("zero_optimization")
    except ConfigError:  # DeepSpeed is about to report it
        return False
    return isinstance(section, Mapping) and section.get("stage") == 3


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
