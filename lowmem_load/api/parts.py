"""The load of one module from several checkpoints, by submodule prefix."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from lowmem_load.api.request import Checked, agree_on_request, name_text, ordinary_load
from lowmem_load.distributed.group import RankGroup
from lowmem_load.errors import ConfigError
from lowmem_load.families.files import Rename
from lowmem_load.families.modules import ModuleCall
from lowmem_load.families.parts import InnerCall, Part, PartsCall
from lowmem_load.frameworks.wrappers import plain_name
from lowmem_load.hf.active import transformers_class, transformers_models
from lowmem_load.hf.remote_names import find_folder
from lowmem_load.symbolic.context import Context


def is_of_parts(model: nn.Module, name: Any, rename: Rename | None) -> bool:
    """Return whether a load has parts: several checkpoints, or a transformers model inside of the module."""
    return isinstance(name, Mapping) or (rename is None and bool(transformers_models(model)))


def module_call(
    model: nn.Module,
    name: Any,
    ranks: RankGroup | None,
    make: Callable[[Context], nn.Module],
    *,
    dtype: str | torch.dtype | None = None,
    stream: bool = False,
    **how: Any,
) -> ModuleCall | PartsCall:
    """Return the load of a module, of parts or by names. For `ranks` and `make`, see `parts_call`."""
    if is_of_parts(model, name, how["rename"]):
        names = name if isinstance(name, Mapping) else {"": name}
        return parts_call(model, names, ranks, make, dtype=dtype, stream=stream, **how)
    return ModuleCall(name_text(name), make, **how)


def parts_call(
    model: nn.Module,
    names: Mapping[str, Any],
    ranks: RankGroup | None,
    make: Callable[[Context], nn.Module],
    *,
    dtype: str | torch.dtype | None = None,
    kwargs: Mapping[str, Any] | None = None,
    leave: Collection[str] = (),
    stream: bool = False,
    is_stand_in: bool = False,
    **of_modules: Any,
) -> PartsCall:
    """Return the load of checkpoints by the prefixes of submodules; "" names that of all else.

    A submodule that holds one transformers model is loaded by transformers' rules: `dtype` and `kwargs` are for that.
    `make` returns the module that is described, which is like `model`. Other arguments are those of `ModuleCall`.

    Collective: all ranks agree on each checkpoint. Local without `ranks`.
    """
    places = _places(model, names)
    left = {plain_name(model, name) for name in leave}
    of_modules["is_stand_in"] = is_stand_in
    parts: dict[str, Part] = {}
    paths: dict[str, str] = {}
    for prefix, name in places.items():
        with nullcontext() if ranks is None else ranks.step("finding the files", name=name):
            paths[prefix], keywords = find_folder(name, kwargs or {}, stream=stream)
        start = f"{plain_name(model, prefix)}."
        left_inside = {full.removeprefix(start) for full in left if full.startswith(start)}
        submodule = model.get_submodule(prefix)
        if isinstance(submodule, transformers_class()):
            left_inside = left if not prefix else left_inside
            checked = _checked(ranks, submodule, paths[prefix], dtype, keywords)
            how: dict[str, Any] = {"left": left_inside, "is_stand_in": is_stand_in}
            parts[prefix] = functools.partial(
                InnerCall, cls=checked.cls, name=checked.name, kwargs=dict(checked.kwargs), **how
            )
        elif prefix:
            parts[prefix] = functools.partial(_by_names, path=paths[prefix], leave=left_inside, **of_modules)
    done = [plain_name(model, prefix) for prefix in parts]
    beside = {name for name in left if not any(not top or name.startswith(f"{top}.") for top in done)}
    rest = functools.partial(_by_names, path=paths.get("", ""), leave=beside, done=done, **of_modules)
    return PartsCall(make, parts, rest, list(paths.values()))


def _by_names(module: nn.Module, *, path: str, **how: Any) -> ModuleCall:
    return ModuleCall(path, lambda _: module, {}, **how)


def _places(model: nn.Module, names: Mapping[str, Any]) -> dict[str, str]:
    """Return the checkpoints by the submodules that are filled: a transformers model, where there is one below."""
    places: dict[str, str] = {}
    for prefix, name in names.items():
        try:
            submodule = model.get_submodule(prefix)
        except AttributeError as error:
            raise ConfigError(f"load_into: {prefix!r} is no submodule of {type(model).__name__}") from error
        models = transformers_models(submodule) if prefix or len(names) == 1 else []
        if len(models) > 1:
            raise ConfigError(
                f"load_into: {prefix!r} holds {len(models)} transformers models; name a checkpoint for each, by prefix"
            )
        filled = models[0] if models else submodule
        place = next(full for full, module in model.named_modules() if module is filled)
        if nested := [
            other for other in places if f"{place}.".startswith(f"{other}.") or f"{other}.".startswith(f"{place}.")
        ]:
            raise ConfigError(
                f"load_into: {place!r} and {nested[0]!r}: one lies within the other; name the parts alone"
            )
        places[place] = name_text(name)
    return places


def _checked(
    ranks: RankGroup | None, model: nn.Module, name: str, dtype: str | torch.dtype | None, kwargs: Mapping[str, Any]
) -> Checked:
    world_size = 1 if ranks is None else ranks.world_size
    request = functools.partial(ordinary_load, model, name, dtype, None, kwargs, world_size)
    if ranks is not None:
        return agree_on_request(ranks, request, has_ds_config=False)
    ordinary, settings = request()
    return ordinary.with_folder().checked(settings)
