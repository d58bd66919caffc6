"""accelerate's FSDP2 under `install`: accelerate shards a model without memory, then each rank reads its shards.

In stock every rank builds the whole model, in fp32 if it trains in mixed precision, before it is sharded. With
`cpu_ram_efficient_loading` rank 0 then broadcasts it, tensor by tensor.

Source: accelerate 1.15 `utils/fsdp_utils.py`, `fsdp2_prepare_model` and `fsdp2_load_full_state_dict`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowmem_load.api.load_into import load_into
from lowmem_load.config.settings import read_settings
from lowmem_load.distributed.group import RankGroup, has_group
from lowmem_load.dtensor.mesh import fsdp_package, mesh_device, offloads, scatter_into
from lowmem_load.dtensor.sharded_target import Unfilled, plain_name
from lowmem_load.hf import intercept, loader
from lowmem_load.hf.active import active_zero3_config, transformers_models
from lowmem_load.hf.replaced import replaced
from lowmem_load.hf.skeleton import allocate, file_keywords
from lowmem_load.pipeline.load import Load
from lowmem_load.report import OnLoad

_PENDING = "lowmem_load_pending"
"""Attribute of a model that is to be filled once it is sharded: its `_PendingLoad`."""

_NOT_PENDING = ("device_map", "quantization_config", "gguf_file", "distributed_config", "tp_plan", "tp_size")
"""Keywords of loads that transformers does by itself."""

_SETTINGS = {"zero_optimization": {"stage": 3}}  # parameters are cut up; by whom, the target knows
_NUMBERS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class _PendingLoad:
    """The load that a model waits for.

    Attributes:
        name, kwargs: of the `from_pretrained`.
        dtype: of the model that it returned.
        random_state: when it was called: parameters that no file has are drawn from it.
    """

    name: str
    kwargs: Mapping[str, Any]
    dtype: torch.dtype
    random_state: torch.Tensor


@contextlib.contextmanager
def pending_loads(*, progress: bool | None, verify: bool, on_load: OnLoad | None) -> Iterator[None]:
    """Inside, models for accelerate's FSDP2 are filled when they have been sharded. For all threads."""
    is_preparing = False

    def fill(model: nn.Module, device: torch.device, policy: Any, added: Mapping[str, torch.Tensor]) -> None:
        device = torch.device("cpu") if offloads({"offload_policy": policy}) else device
        report = _fill(model, device, added, progress=progress, verify=verify)
        if on_load is not None:
            on_load(report)

    def prepare(ordinary: Any, accelerator: Any, model: nn.Module) -> nn.Module:
        import accelerate.utils.fsdp_utils as fsdp_utils

        nonlocal is_preparing
        if not _is_pending(model):
            return ordinary(accelerator, model)  # type: ignore[no-any-return]
        added = _added(model)  # now: accelerate moves the model to meta
        is_preparing = True
        try:
            with replaced((fsdp_utils, "fsdp2_load_full_state_dict", _load_nothing)):
                prepared: nn.Module = ordinary(accelerator, model)
        finally:
            is_preparing = False
        fill(prepared, accelerator.device, accelerator.state.fsdp_plugin.cpu_offload, added)
        return prepared

    def shard(ordinary: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Fill a model that somebody else shards: TRL does so with the reference model of DPO."""
        if is_preparing or not isinstance(module, nn.Module) or not _is_pending(module):
            return ordinary(module, *args, **kwargs)
        added = _added(module)
        sharded = ordinary(module, *args, **kwargs)
        fill(module, mesh_device(module), kwargs.get("offload_policy"), added)
        return sharded

    with contextlib.ExitStack() as hooks:
        hooked: list[Any] = []

        def load(call: loader.Call) -> tuple[nn.Module, dict[str, Any]]:
            if not hooked:  # not before: most jobs have no FSDP2, and need not import all this
                hooked.append(hooks.enter_context(_hooks(prepare, shard)))
            return _load_pending(call)

        hooks.enter_context(intercept.intercepted(load, _is_fsdp2, everywhere=True))
        yield


def _hooks(prepare: Any, shard: Any) -> contextlib.AbstractContextManager[None]:
    """Return a block in which these prepare and shard models, and PEFT keeps adapters in host memory."""
    import accelerate.accelerator
    import accelerate.utils.fsdp_utils as fsdp_utils

    replacements = [(owner, "fsdp2_prepare_model", prepare) for owner in (fsdp_utils, accelerate.accelerator)]
    replacements.append((fsdp_package(), "fully_shard", shard))
    if importlib.util.find_spec("peft") is not None:
        from peft.tuners.tuners_utils import BaseTuner

        replacements.append((BaseTuner, "inject_adapter", _keep_adapters))
    return replaced(*replacements, everywhere=True)


def _is_pending(model: nn.Module) -> bool:
    return any(hasattr(found, _PENDING) for found in transformers_models(model))


def _added(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters that were put on a pending model, and have values."""
    return {plain_name(name): tensor.detach() for name, tensor in model.named_parameters() if not tensor.is_meta}


def _load_nothing(*args: Any, **_: Any) -> Any:
    """Return the sharded model as it is, in place of the broadcast."""
    return args[2]  # after the ordinary function and the accelerator


def _is_fsdp2(kwargs: Mapping[str, Any]) -> bool:
    """Return whether accelerate will shard a model by FSDP2 that is loaded with these keywords now."""
    if not has_group() or any(kwargs.get(keyword) is not None for keyword in _NOT_PENDING):
        return False
    state: Any = sys.modules.get("accelerate.state")  # whoever has an Accelerator has imported it
    plugin = None if state is None else state.AcceleratorState._shared_state.get("fsdp_plugin")  # noqa: SLF001
    in_environment = os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")
    version = plugin.fsdp_version if plugin is not None else os.environ.get("FSDP_VERSION") if in_environment else None
    return str(version) == "2" and active_zero3_config() is None and _knows_fsdp2()


def _knows_fsdp2() -> bool:
    import accelerate.utils.fsdp_utils as fsdp_utils

    return hasattr(fsdp_utils, "fsdp2_load_full_state_dict")  # accelerate 1.6 on


def _load_pending(call: loader.Call) -> tuple[nn.Module, dict[str, Any]]:
    """Build the model of a `from_pretrained`, with its buffers, and leave its parameters on meta."""
    ranks, state = RankGroup(None), torch.get_rng_state()
    settings = read_settings(_SETTINGS, world_size=ranks.world_size)
    model, info = Load(settings, ranks, lambda *_: Unfilled(), progress=False)(call)
    for parameter in model.parameters():
        # accelerate tells the parameters of an optimizer by their addresses, and all of meta have the address 0.
        setattr(parameter, "data_ptr", functools.partial(int, next(_NUMBERS)))  # noqa: B010  a method, for mypy
    dtype = next(each.dtype for each in model.parameters() if each.dtype.is_floating_point)
    setattr(model, _PENDING, _PendingLoad(call.name, call.kwargs, dtype, state))
    return model, info


def _fill(
    model: nn.Module,
    device: torch.device,
    added: Mapping[str, torch.Tensor],
    *,
    progress: bool | None,
    verify: bool,
) -> Any:
    """Fill a model that accelerate has sharded on meta: from its files, and what was added from rank 0's values."""
    (base,) = transformers_models(model)
    pending: _PendingLoad = getattr(base, _PENDING)
    model.to_empty(device=device)
    allocate(base, None)
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is base)
    left = [name for name, _ in base.named_parameters() if plain_name(prefix + name) in added]
    after = torch.get_rng_state()
    torch.set_rng_state(pending.random_state)
    try:
        with intercept.outermost():
            report = load_into(
                *(base, pending.name),
                dtype=pending.dtype,
                leave=left,
                progress=progress,
                verify=verify,
                **file_keywords(pending.kwargs),
            )
    finally:
        torch.set_rng_state(after)
    for name, parameter in model.named_parameters():
        if plain_name(name) in added:
            scatter_into(parameter, added[plain_name(name)])
    delattr(base, _PENDING)
    return report


def _keep_adapters(ordinary: Any, tuner: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Leave the adapters that PEFT puts on a model without memory in host memory, where they have values.

    PEFT moves each adapter to the device of its layer. On meta its values would be lost.
    Source: peft 0.21 `tuners/tuners_utils.py`, `BaseTuner.inject_adapter`; `tuners/lora/model.py`, `_replace_module`.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    made: list[tuple[nn.Module, str, nn.Parameter]] = []

    def note(ordinary: Any, layer: Any, adapter_name: str, device: torch.device | None = None) -> None:
        ordinary(layer, adapter_name, device or torch.device("cpu"))
        for module in layer.modules():
            made.extend(
                (module, name, each) for name, each in module.named_parameters(recurse=False) if not each.is_meta
            )

    if not _is_pending(model):
        ordinary(tuner, model, *args, **kwargs)
        return
    with replaced((BaseTunerLayer, "_move_adapter_to_device_of_base_layer", note)):
        ordinary(tuner, model, *args, **kwargs)
    for module, name, parameter in made:
        moved = getattr(module, name)
        if moved.is_meta:
            setattr(module, name, parameter.requires_grad_(moved.requires_grad))
