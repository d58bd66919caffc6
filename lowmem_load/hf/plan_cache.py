"""Outcomes of transformers' conversions, kept for loads to come. Part of the transformers seam, see `loader.py`.

[Note: the outcome] Most of what describing a large model takes is one function of transformers: it goes through all
tensors of the files, renames and converts them, and gives each parameter its expression by `set_param_for_module`. What
that comes to is small: which parameter is set to which expression, in which order, and which names of the files nobody
expects. This is kept under a digest of all that it depends on (`outcome_key.py`). Where it is there, each expression is
set by the same function of transformers', which checks its shape, marks it, and takes it from the missing keys. What
comes before and after (making the model, ties, initialisation, hooks, errors) is transformers' own in any case.

An outcome is kept only if the function did nothing else: every module of the model is compared with what it was before.
Not kept are outcomes with errors, with values that were read or that are in memory, with functions that have no name
(`describe/pointwise.py`, `mxfp4.py`), of other files than safetensors, of adapters, and of weights that stay quantized.

Source: transformers 5.2 to 5.23 `core_model_loading.py`, `convert_and_load_state_dict_in_model`. Before there is either
no such function, or one with other arguments, and nothing is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import transformers.modeling_utils as modeling_utils
from torch import nn

from lowmem_load.describe.context import Context, PlanCache
from lowmem_load.errors import CheckpointError
from lowmem_load.formats.kept import read_kept, write_kept
from lowmem_load.formats.templates import NotDataError
from lowmem_load.hf.collecting import MODULE
from lowmem_load.hf.names import config_text
from lowmem_load.hf.outcome import CONVERSIONS, SETTER, Conversion, Outcome
from lowmem_load.hf.outcome_key import key_of
from lowmem_load.hf.replaced import replaced

logger = logging.getLogger(__name__)

_FUNCTION = "convert_and_load_state_dict_in_model"
_ARGUMENTS = {"model", "state_dict", "load_config", "tp_plan", "disk_offload_index"}
_SETTER_ARGUMENTS = {
    *("model", "target_name", "param_value", "loading_info", "hf_quantizer", "distributed_operation"),
}
_INFO = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs", "conversion_errors", "skipped_pp_keys")
"""What the function returns lists of; each release has some of them."""


@contextlib.contextmanager
def kept_outcomes(context: Context, keywords: Mapping[str, Any], *, is_cut_up: bool) -> Iterator[None]:
    """Inside, outcomes are taken from the plan cache of the context, if it has one, and kept there.

    Args:
        context: of the load.
        keywords: of its `from_pretrained`.
        is_cut_up: see `Call.describe`.
    """
    cache = context.plan_cache
    if cache is None:
        yield
        return
    module = importlib.import_module(MODULE) if importlib.util.find_spec(MODULE) else None
    ordinary = getattr(modeling_utils, _FUNCTION, None)
    if module is None or ordinary is None or not _is_known(module, ordinary):
        cache.keep_nothing("this release of transformers converts by another function")
        yield
        return

    def convert(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(ordinary).bind(*args, **kwargs).arguments
        try:
            conversion = Conversion(module, context.read_now, call)
            key = key_of(
                *(conversion.model, conversion.load_config, conversion.files, conversion.tensors, keywords),
                is_cut_up=is_cut_up,
                module=module,
            )
        except NotDataError as reason:
            cache.keep_nothing(str(reason))
            return ordinary(*args, **kwargs)
        path = os.path.join(cache.folder, f"{type(conversion.model).__name__}-{key.hex()[:32]}")
        outcome = _found(cache, context, path, key, conversion)
        if outcome is not None:
            return outcome.replay(conversion), None
        return _recorded(cache, path, key, conversion, lambda: ordinary(*args, **kwargs))

    with replaced(modeling_utils, _FUNCTION, convert):
        yield


def _is_known(module: Any, function: Callable[..., Any]) -> bool:
    """Return whether the function and its setter take what they are known to, and return what is known."""
    setter, info = getattr(module, SETTER, None), getattr(module, "LoadStateDictInfo", None)
    if setter is None or not dataclasses.is_dataclass(info):
        return False
    arguments, of_setter = set(inspect.signature(function).parameters), set(inspect.signature(setter).parameters)
    return (
        {"model", "state_dict", "load_config"} <= arguments <= _ARGUMENTS
        and _SETTER_ARGUMENTS - {"distributed_operation"} <= of_setter <= _SETTER_ARGUMENTS
        and {field.name for field in dataclasses.fields(info)} <= set(_INFO)
    )


def _found(cache: PlanCache, context: Context, path: str, key: bytes, conversion: Conversion) -> Outcome | None:
    """Return the outcome that was kept; None if there is none, or none that can be used."""

    def find() -> bytes:
        try:
            return read_kept(path, key) or b""
        except CheckpointError as error:
            _warn(cache, error)
            return b""

    content = context.once(f"kept {path}", find, bytes, bytes)
    if not content:
        return None
    try:
        outcome = Outcome(content, conversion)
    except CheckpointError as error:
        _warn(cache, CheckpointError(f"{path}: {error}"))
        return None
    cache.files[path] = "read"
    cache.contents.append(hashlib.sha256(content).hexdigest())
    return outcome


def _warn(cache: PlanCache, error: CheckpointError) -> None:
    if cache.writes:
        logger.warning("%s; the model is described anew, and the file replaced", error)


def _recorded(cache: PlanCache, path: str, key: bytes, conversion: Conversion, run: Callable[[], Any]) -> Any:
    """Run transformers' conversion, and keep what it comes to."""
    before, bytes_read = _State(conversion.model), cache.bytes_read()
    with _watched_setter(conversion) as calls:
        info, others = run()
    try:
        if cache.bytes_read() != bytes_read:
            raise NotDataError("values that were read while the model was described")
        content = conversion.told(calls, info, others)
        before.check_that_only(
            conversion.model, {name for name, _ in calls} - {name for name, *_ in info.mismatched_keys}
        )
    except NotDataError as reason:
        cache.keep_nothing(str(reason))
        return info, others
    cache.contents.append(hashlib.sha256(content).hexdigest())
    cache.files[path] = "described here, to be written by the first rank of the node"
    if cache.writes:
        try:
            write_kept(path, key, content)
            cache.files[path] = "written"
        except OSError as error:
            cache.files[path] = f"not written: {error}"
            logger.warning("%s: the plan cache cannot be written: %s", path, error)
    return info, others


@contextlib.contextmanager
def _watched_setter(conversion: Conversion) -> Iterator[list[tuple[str, Any]]]:
    """Yield what parameters are set to inside, in order."""
    calls: list[tuple[str, Any]] = []
    ordinary, signature = conversion.setter, inspect.signature(conversion.setter)

    def setter(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs).arguments
        calls.append((call["target_name"], call["param_value"]))
        return ordinary(*args, **kwargs)

    with replaced(conversion.module, SETTER, setter):
        yield calls


class _State:
    """What the modules of a model hold, to be compared with what they hold later."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        self._held = [self._of(module) for _, module in self._modules]
        self._config = _config_of(model)

    @staticmethod
    def _of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        tensors = {**module._parameters, **module._buffers}
        ignored = ("_parameters", "_buffers", "_modules", CONVERSIONS)
        return tensors, {name: value for name, value in vars(module).items() if name not in ignored}

    def check_that_only(self, model: nn.Module, names: set[str]) -> None:
        """Raise NotDataError unless these parameters and buffers are others now, and all else is as it was."""
        now = list(model.named_modules())
        changed = set()
        same = len(now) == len(self._modules) and _config_of(model) == self._config
        for (prefix, module), (_, before), (tensors, others) in zip(now, self._modules, self._held, strict=False):
            tensors_now, others_now = self._of(module)
            same = same and module is before and tensors_now.keys() == tensors.keys() and _are_same(others_now, others)
            changed |= {
                f"{prefix}.{name}" if prefix else name
                for name, tensor in tensors_now.items()
                if tensor is not tensors.get(name)
            }
        if not same or changed != names:
            raise NotDataError("a conversion that changes more of the model than its parameters")


def _are_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(value is other[name] for name, value in one.items())


def _config_of(model: nn.Module) -> str:
    return config_text(model.config) if hasattr(model, "config") else ""
