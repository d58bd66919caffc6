"""Which DeepSpeed configuration is active in transformers, and how a load shows it another one, or none at all.

Part of the transformers seam, see `loader.py`. transformers keeps a weak reference to the `HfDeepSpeedConfig` that was
made last (integrations/deepspeed.py); every `from_pretrained` asks whether to load for ZeRO-3.

[Note: who is asked] transformers asks functions by name, and each of its modules holds the function that was there
when it was imported. Frameworks replace some of these names (axolotl 0.19: by `lambda: True`, in two modules), which
then say nothing of the configuration any more. So for a load on the ordinary path the questions are answered wherever a
module holds them, models' own included, and put back in each as they were.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers.integrations.deepspeed as hf_deepspeed
import transformers.modeling_utils as modeling_utils
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import HfDeepSpeedConfig

QUESTIONS = ("is_deepspeed_zero3_enabled", "is_fsdp_enabled")
"""Functions by which transformers decides to leave its ordinary path. FSDP's has ranks other than 0 read nothing."""

_NEVER_ASK = sys.stdlib_module_names | {"deepspeed", "mpmath", "numpy", "scipy", "sympy", "torch"}
"""Packages that know nothing of what transformers asks: 2,800 modules of some 3,500, of which each takes 1 us."""


def active_zero3_config() -> Mapping[str, Any] | None:
    """Return the active ds_config when it is one of ZeRO-3, else None. It is transformers' own: read only.

    It is active if there is one and `from_pretrained`, which may be told otherwise, would load for ZeRO-3.
    """
    reference = hf_deepspeed._hf_deepspeed_config_weak_ref
    alive = None if reference is None else reference()
    if alive is None or not alive.is_zero3() or not modeling_utils.is_deepspeed_zero3_enabled():
        return None
    config: Mapping[str, Any] = alive.config
    return config


def was_dropped() -> bool:
    """Return whether a configuration was active until nothing kept its `HfDeepSpeedConfig` alive any more.

    `unset_hf_deepspeed_config`, with which transformers' users end it on purpose, leaves no such trace.
    """
    reference = hf_deepspeed._hf_deepspeed_config_weak_ref
    return reference is not None and reference() is None


@contextlib.contextmanager
def deepspeed_config(config: Mapping[str, Any] | HfDeepSpeedConfig | None) -> Iterator[HfDeepSpeedConfig | None]:
    """Make `config` the DeepSpeed configuration that transformers sees; None hides any. Restores the one before.

    transformers keeps only a weak reference (`integrations/deepspeed.py`), so the object lives as long as the block.
    """
    before = hf_deepspeed._hf_deepspeed_config_weak_ref
    alive: HfDeepSpeedConfig | None = None
    try:
        if config is None:
            hf_deepspeed._hf_deepspeed_config_weak_ref = None
        elif isinstance(config, Mapping):
            alive = HfDeepSpeedConfig(dict(config))
        else:
            alive = config
            hf_deepspeed.set_hf_deepspeed_config(config)
        yield alive
    finally:
        hf_deepspeed._hf_deepspeed_config_weak_ref = before


@contextlib.contextmanager
def ordinary_path() -> Iterator[None]:
    """Inside, transformers loads as if there were neither ZeRO-3 nor FSDP nor a default device, whoever set them.

    Threads that run already go on asking what they asked before, since one of them may be in the middle of a load of
    its own; that there is a configuration is hidden from all.
    """
    others = set(threading.enumerate()) - {threading.current_thread()}  # not by number: numbers are given again
    with contextlib.ExitStack() as stack:
        stack.enter_context(deepspeed_config(None))
        stack.enter_context(_answered_with_no(others))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))  # ZeRO-3 ignores a default device, the ordinary path loads to it
        yield


@contextlib.contextmanager
def _answered_with_no(others: set[threading.Thread]) -> Iterator[None]:
    """Answer `QUESTIONS` with False wherever a module holds them; see [Note: who is asked]."""
    replaced: dict[Callable[..., Any], Callable[..., Any]] = {}
    is_over = False

    def replacement(asked: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(asked)
        def answer(*args: Any, **kwargs: Any) -> Any:
            # Somebody may have kept it under another name, or wrapped it, for longer than this block.
            return asked(*args, **kwargs) if is_over or threading.current_thread() in others else False

        replaced[answer] = asked
        return answer

    names = list(sys.modules)
    holders = _holders(names)
    try:
        _exchange(replacement, holders)
        yield
    finally:
        is_over = True
        since = list(sys.modules)
        if since[-1] != names[-1]:  # modules that were imported meanwhile took it from these
            holders = _holders(since)
        _exchange(lambda held: replaced.get(held, held), holders)  # who else has it now hears what was asked


def _holders(names: list[str]) -> list[Any]:
    """Return the modules that hold one of `QUESTIONS`, of those of these names that may."""
    first, second = QUESTIONS
    modules = [sys.modules.get(name) for name in names if name.partition(".")[0] not in _NEVER_ASK]
    held = [(module, getattr(module, "__dict__", ())) for module in modules]
    return [module for module, own in held if first in own or second in own]  # asked for it, lazy modules would import


def _exchange(new: Callable[[Callable[..., Any]], Callable[..., Any]], modules: list[Any]) -> None:
    """Put new(function) in the place of the functions that these modules hold under the names of `QUESTIONS`."""
    for module in modules:
        names = vars(module)
        for name in QUESTIONS:
            if name in names and callable(held := names[name]) and (other := new(held)) is not held:
                setattr(module, name, other)


def transformers_models(module: nn.Module) -> list[PreTrainedModel]:
    """Return the outermost transformers models within `module`, such as the one below a PEFT model."""
    if isinstance(module, PreTrainedModel):
        return [module]
    return [found for child in module.children() for found in transformers_models(child)]
