"""install() and uninstall(): lowmem_load for a whole script, wherever ZeRO-3 is active in it.

`streaming(None)` without the block, which leaves to stock what cannot be streamed; and a look at what
`deepspeed.initialize` is given: a model that comes there whole under ZeRO-3 was loaded in the wrong order, which
neither transformers nor DeepSpeed says.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from lowmem_load.api.load_model import why_left_to_stock
from lowmem_load.api.streaming import following
from lowmem_load.config.ds_config import read_ds_config
from lowmem_load.ds.hooks import engine_hooked, hooked
from lowmem_load.ds.parameters import is_partitioned
from lowmem_load.ds.shell import is_shell
from lowmem_load.errors import ConfigError, LoadOrderWarning
from lowmem_load.hf.active import transformers_models
from lowmem_load.integrations.additions import cast_additions, config_of
from lowmem_load.integrations.trainer_resumes import load_of_engine
from lowmem_load.integrations.trainer_saves import LedSaves
from lowmem_load.report import OnLoad


def install(
    *,
    progress: bool | None = None,
    verify: bool = False,
    strict: bool = False,
    saves: bool = True,
    on_load: OnLoad | None = None,
) -> None:
    """From now on every `from_pretrained` loads into ZeRO-3 partitions while ZeRO-3 is active in transformers.

    It is active from `TrainingArguments(deepspeed=...)`, `Accelerator(deepspeed_plugin=...)`, `accelerate launch` or
    an `HfDeepSpeedConfig` that is kept in a variable, if that names stage 3; the load follows that ds_config. All
    other loads are the ordinary ones. Calling it again does nothing.

    A load that works without this works with it: one that cannot be streamed (an 8-bit model, say) is left to stock
    ZeRO-3, with a `NotStreamedWarning` on every rank that says why. That is decided by all ranks before anything is
    allocated or read.

    A transformers model that `deepspeed.initialize` gets whole under stage 3 raises a `LoadOrderWarning` on every
    rank; so does a load after an `HfDeepSpeedConfig` was dropped. `warnings.simplefilter("error", LoadOrderWarning)`
    makes errors of them. What `lowmem_load.initialize(partition=...)` partitions is whole on purpose, so it does not.

    `engine.load_checkpoint`, and so `Trainer.train(resume_from_checkpoint=...)`, takes what another number of ranks has
    saved under ZeRO-3, as `lowmem_load.load_checkpoint` does; DeepSpeed refuses that, and does all other loads.

    Local: no rank waits for another here. Call it before the first model is loaded.

    Args:
        progress: as for `load_model`.
        verify: as for `load_model`. What cannot be streamed cannot be verified either, and is an error then.
        strict: whether a load that cannot be streamed is an error (an `UnsupportedError` as a rule).
        saves: whether `Trainer.save_model`, `Accelerator.save_model` and `engine.save_16bit_model` under ZeRO-3 write
            the same files without gathering, and `save_pretrained` refuses to write empty parameters; docs/saving.md.
            They need no stage3_gather_16bit_weights_on_model_save. (False: all as in stock.)
        on_load: called with the `LoadReport` of each streamed load when it has ended, on every rank.
    """
    if _Installed.stack is not None:
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            following(progress=progress, verify=verify, on_load=on_load, is_lenient=not strict, everywhere=True)
        )
        stack.enter_context(hooked(cast_additions))
        if saves:
            stack.enter_context(hooked(stack.enter_context(LedSaves()).begin))
        stack.enter_context(engine_hooked("load_checkpoint", load_of_engine))
        stack.enter_context(hooked(_check_order))
        _Installed.stack = stack.pop_all()


def uninstall() -> None:
    """Undo `install`: all loads are ordinary again. Does nothing where nothing is installed."""
    stack, _Installed.stack = _Installed.stack, None
    if stack is not None:
        stack.close()


class _Installed:
    """The only mutable state of the module: it stands for names in other packages, which are per process too."""

    stack: ClassVar[contextlib.ExitStack | None] = None


def _check_order(given: Mapping[str, Any]) -> None:
    """Warn for each transformers model that `deepspeed.initialize` is about to partition only now.

    One with any partition was loaded when ZeRO-3 was active. What is whole of it was made since, and stays whole in
    stock as well: adapters, new heads, embeddings that were resized, which may be most of a small model.
    """
    model = given.get("model")
    ds_config = config_of(given)
    if not isinstance(model, nn.Module) or is_shell(model) or not _is_stage_3(ds_config):
        return
    for found in transformers_models(model):
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
    except ConfigError:  # DeepSpeed is about to say what is wrong with it
        return False
    return isinstance(section, Mapping) and section.get("stage") == 3
