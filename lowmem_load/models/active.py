"""What a load sets while it runs: one lock for a process, and the settings of transformers that it depends on."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import random
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
import transformers.integrations.deepspeed as hf_deepspeed
import transformers.modeling_utils as modeling_utils
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import HfDeepSpeedConfig
from transformers.utils import logging as hf_logging

from lowmem_load import foreign_names
from lowmem_load.errors import ConfigError
from lowmem_load.locks import ForkedLock
from lowmem_load.replaced import replaced


def active_zero3_config() -> Mapping[str, Any] | None:
    """Return the ds_config under which `from_pretrained` would load for ZeRO-3; None if it would not. Read only."""
    reference = hf_deepspeed._hf_deepspeed_config_weak_ref
    alive = None if reference is None else reference()
    if alive is None or not alive.is_zero3() or not modeling_utils.is_deepspeed_zero3_enabled():
        return None
    config: Mapping[str, Any] = alive.config
    return config


_served: list[Any] = []
"""transformers' weak reference to the last configuration that was active when a model was loaded."""


def begins_after_drop() -> bool:
    """Return whether a load begins after the last `HfDeepSpeedConfig` has died, which never served one.

    Called once for each load: it remembers that the active configuration, if there is one, serves this one.
    """
    active = hf_deepspeed._hf_deepspeed_config_weak_ref
    users = None if active is None else inspect.unwrap(active)  # ours may be in its place
    if not isinstance(users, weakref.ReferenceType):
        return False
    if users() is not None:
        _served[:] = [users]
    return users not in _served and active() is None


@contextlib.contextmanager
def deepspeed_config(config: Mapping[str, Any] | HfDeepSpeedConfig | None) -> Iterator[HfDeepSpeedConfig | None]:
    """Make `config` the DeepSpeed configuration that transformers sees in this thread or task. None hides any other."""
    with replaced({foreign_names.SET_CONFIG: lambda *_, **__: None}):  # it would be set for all threads
        alive = HfDeepSpeedConfig(dict(config)) if isinstance(config, Mapping) else config
    with replaced({foreign_names.CONFIG_REFERENCE: lambda *_, **__: alive}):
        yield alive


def show_ds_config(
    model: nn.Module, ds_config: Mapping[str, Any], is_partitioned: Callable[[torch.Tensor], bool]
) -> None:
    """Have methods of transformers models see their ds_config; transformers has one for all models.

    Without it, `generate` does not wait for ranks whose sequences are longer, a resize finds no shapes, and encoders
    that drop layers at random (wav2vec2) leave out other layers on each rank. Replicated ones may do so.
    """
    with deepspeed_config(ds_config) as shown:  # made once, as that takes a millisecond
        pass
    for module in model.modules():
        names = ["generate", "resize_token_embeddings"] if isinstance(module, PreTrainedModel) else []
        if _asks_for_zero3(type(module).forward) and any(map(is_partitioned, module.parameters())):
            names.append("forward")
        for name in names:
            if hasattr(type(module), name):  # a method follows a deepcopy; LLaMA-Factory asks for its __func__
                setattr(module, name, types.MethodType(_with_config(type(module), name, shown), module))


def _asks_for_zero3(function: Any) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and "is_deepspeed_zero3_enabled" in code.co_names


def _with_config(cls: type, name: str, shown: HfDeepSpeedConfig | None) -> Callable[..., Any]:
    @functools.wraps(getattr(cls, name))
    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with deepspeed_config(shown):
            return getattr(type(model), name)(model, *args, **kwargs)

    return call


def draws_no_missing() -> bool:
    """Return whether a load in this process draws no random values for what the files lack: it gets another rank's.

    Source: transformers 5.23 `modeling_utils.py`, `_initialize_missing_keys`, for FSDP with efficient loading. Earlier
    releases draw there on all ranks.
    """
    initialise: Any = inspect.unwrap(getattr(PreTrainedModel, "_initialize_missing_keys", draws_no_missing))
    knows_fsdp = "is_fsdp_enabled" in initialise.__code__.co_names
    return knows_fsdp and modeling_utils.is_fsdp_enabled() and not modeling_utils.is_local_dist_rank_0()


def random_states() -> Callable[[], None]:
    """Return what puts the random states of Python, numpy and torch (on the host) back to what they are now."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def restore() -> None:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])

    return restore


def on_host() -> contextlib.AbstractContextManager[object]:
    """Make tensors that name no device in host memory, whatever default device the caller has set."""
    is_default = torch.get_default_device().type == "cpu"
    return contextlib.nullcontext() if is_default else torch.device("cpu")  # a context of torch's slows each call


@contextlib.contextmanager
def ordinary_path() -> Iterator[None]:
    """Inside, transformers loads as without ZeRO-3, FSDP and a default device."""
    of_zero3 = foreign_names.IS_ZERO3, foreign_names.IS_ZERO3_IN_LOADS
    of_fsdp = foreign_names.IS_FSDP_IN_LOADS, foreign_names.IS_FSDP_IN_PLACING  # all ranks but the first read nothing
    answered_with_no = dict.fromkeys((*of_zero3, *of_fsdp), lambda *_, **__: False)
    with deepspeed_config(None), replaced(answered_with_no), on_host():  # ZeRO-3 ignores a default device
        yield


@contextlib.contextmanager
def quiet(level: int = logging.NOTSET, of_library: Any = hf_logging) -> Iterator[None]:
    """Hide a library's progress bar, which would show work on names as work on weights, and its logs below a level.

    `of_library` is the module of its logging: transformers' or diffusers'.
    """
    shows_bar, verbosity = of_library.is_progress_bar_enabled(), of_library.get_verbosity()
    of_library.disable_progress_bar()
    of_library.set_verbosity(max(level, verbosity))
    try:
        yield
    finally:
        of_library.set_verbosity(verbosity)
        if shows_bar:
            of_library.enable_progress_bar()


def transformers_models(module: nn.Module) -> list[PreTrainedModel]:
    """Return the outermost transformers models within `module`, such as the one below a PEFT model."""
    if isinstance(module, PreTrainedModel):
        return [module]
    return [model for child in module.children() for model in transformers_models(child)]


PATIENCE_S = 30.0
"""Seconds that a thread waits for another one to build a model. The largest models take a second."""

constructors: list[object] = []
"""One object for each constructor of a model that runs in the thread that loads."""

_LOCK = ForkedLock()

IS_LOADING: ContextVar[bool] = ContextVar("lowmem_load_is_loading", default=False)
"""Whether a load runs, of which calls of `from_pretrained` are a part. If it is False, a handler gets these calls."""


@contextlib.contextmanager
def load_lock() -> Iterator[None]:
    """Have one thread load or save at a time. That thread may take the lock again.

    Raises ConfigError if the other thread stays in one constructor, which may wait for this thread.
    """
    before: list[object] = []
    while not _LOCK.acquire(PATIENCE_S):
        now = constructors[:1]
        if now and now == before:
            raise ConfigError(
                "another thread of this process is loading, and has been in the constructor of its model for more than "
                f"{PATIENCE_S:.0f} s; if that constructor waits for this thread, let it load without a thread"
            )
        before = now
    try:
        yield
    finally:
        _LOCK.release()
