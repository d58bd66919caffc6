"""accelerate: models that are lazy until FSDP2 shards or ZeRO-3 partitions them.

FSDP2:
By default every rank builds the full model, in fp32 if it trains in mixed precision, before it is sharded. With
`cpu_ram_efficient_loading` rank 0 then broadcasts it, tensor by tensor. If the model is lazy, `fully_shard` reads
slices by itself, and `fsdp2_load_full_state_dict` has each rank read its shards, all together.

Source: accelerate 1.15 `utils/fsdp_utils.py`, `fsdp2_prepare_model` and `fsdp2_load_full_state_dict`, and
`accelerator.py`, `Accelerator._prepare_fsdp2`, which knows the parameters of an optimizer by their addresses.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lowmem_load import foreign_names
from lowmem_load.distributed import environment
from lowmem_load.distributed.steps import Alone, RankGroup
from lowmem_load.engines.mesh import offloads
from lowmem_load.engines.sharded_target import Unfilled
from lowmem_load.engines.target import Target
from lowmem_load.errors import UnsupportedError
from lowmem_load.load.lazy import are_lazy, describe_lazily, fill_partitions, fill_sharded
from lowmem_load.load.load import Options, fall_back, fallback_reason, find, make_executor
from lowmem_load.load.report import LoadReport
from lowmem_load.models.active import active_zero3_config, draws_no_missing, random_states
from lowmem_load.models.loader import SHARDS, Call
from lowmem_load.models.model_folder import rename_loaded
from lowmem_load.models.quantizers import stays_packed
from lowmem_load.models.skeleton import ties_kept
from lowmem_load.replaced import Handlers, warn_of_missing
from lowmem_load.symbolic.lazy import addresses_are_only_compared

_NOT_LAZY = (
    "gguf_file",
    *SHARDS,
    "state_dict",  # of a from_config, too, whose random values are drawn in another order than missing ones
)
"""Keywords of loads that transformers does by itself."""


def load_lazily(call: Call, *, options: Options) -> tuple[nn.Module, dict[str, Any]]:
    """Run a call; return a model that is lazy until accelerate shards it. Local: only then do the ranks agree."""
    ranks, device_map = RankGroup(None), call.kwargs.pop("device_map", None)
    state, restore = torch.get_rng_state(), random_states()
    find(call, options, Alone())
    executor = make_executor(call, environment.ranks_on_node(ranks.world_size))
    report = LoadReport(call.name, ranks.rank, ranks.world_size)
    try:
        model, info = describe_lazily(call, executor, report, make_target=_lazy_target, on_load=options.on_load)
    except Exception as error:  # noqa: BLE001  it is raised again unless the default loader may work
        reason = fallback_reason(error, call, options)
    else:
        if draws_no_missing():
            torch.set_rng_state(state)
        place = _device_of(device_map)
        if place is not None and place.type not in ("cpu", "meta"):
            model.to(place)  # reads nothing
        return rename_loaded((model, info))
    if device_map is not None:
        call.kwargs["device_map"] = device_map
    return fall_back(call, "accelerate", reason, restore)


def is_for_fsdp2(kwargs: Mapping[str, Any]) -> bool:
    """Return whether accelerate may shard a model by FSDP2 that is loaded with these keywords now."""
    if (quantization := kwargs.get("quantization_config")) is not None and not stays_packed(quantization):
        return False
    return may_be_lazy(kwargs) and uses_fsdp2()


def may_be_lazy(kwargs: Mapping[str, Any]) -> bool:
    """Return whether a load with these keywords makes a full model, where this rank will need it."""
    if kwargs.get("device_map") is not None and not _is_of_this_rank(_device_of(kwargs["device_map"])):
        return False
    if nn.Module.register_parameter.__module__.startswith("accelerate."):  # init_empty_weights: nobody wants values
        return False
    return environment.has_group() and all(kwargs.get(keyword) is None for keyword in _NOT_LAZY)


def uses_fsdp2() -> bool:
    """Return whether accelerate may shard a model by FSDP2 that is loaded now.

    An `Accelerator`, the environment or `TrainingArguments` ask for it.
    """
    if active_zero3_config() is not None:
        return False
    state: Any = sys.modules.get("accelerate.state")  # whoever has an Accelerator has imported it
    shared = getattr(getattr(state, "AcceleratorState", None), "_shared_state", None)
    if state is not None and shared is None:
        warn_of_missing([foreign_names.SHARED_STATE])
    if (plugin := (shared or {}).get("fsdp_plugin")) is not None:
        return str(plugin.fsdp_version) != "1"
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true"):
        return os.environ.get("FSDP_VERSION", "1") != "1"
    # TrainingArguments(fsdp=...) set this variable, and keep the version to themselves until a Trainer is made.
    return "FSDP_CPU_RAM_EFFICIENT_LOADING" in os.environ


def _device_of(device_map: Any) -> torch.device | None:
    """Return the one device that a device_map names for all of a model."""
    if isinstance(device_map, Mapping):
        device_map = device_map[""] if device_map.keys() == {""} else None
    with contextlib.suppress(RuntimeError, TypeError):  # "auto", and what splits a model
        return torch.device(device_map)
    return None


def _is_of_this_rank(device: torch.device | None) -> bool:
    """Return whether a model goes to this rank's GPU (TRL's `get_kbit_device_map`) or to the host (axolotl)."""
    if device is None or device.type in ("cpu", "meta") or device.index is None:
        return device is not None
    return device.index == torch.accelerator.current_device_index()


def _lazy_target(_: Any, model: Any) -> Target:
    quantization = getattr(getattr(model, "config", None), "quantization_config", None)
    if quantization is not None and not stays_packed(quantization):
        raise UnsupportedError(
            f"{type(model).__name__}: is quantized, and can only be lazy if its quantized weights stay packed"
        )
    return Unfilled()


def _fill(ordinary: Any, accelerator: Any, model: nn.Module, full_sd: Any, *args: Any, **kwargs: Any) -> Any:
    if not are_lazy(model):
        return ordinary(accelerator, model, full_sd, *args, **kwargs)
    is_offloaded = offloads({"offload_policy": accelerator.state.fsdp_plugin.cpu_offload})
    fill_sharded(model, full_sd, torch.device("cpu") if is_offloaded else accelerator.device)
    return model


def _prepare_all(ordinary: Any, *args: Any, **kwargs: Any) -> Any:
    with addresses_are_only_compared():
        return ordinary(*args, **kwargs)


def _prepare_model(ordinary: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep apart what transformers has found to differ: accelerate ties by the configuration, and loses one of two."""
    with ties_kept():
        return ordinary(*args, **kwargs)


# -- ZeRO-3 ------------------------------------------------------------------------------------------------------------


def _partition(ordinary: Any, init: Any, param_list: Iterable[nn.Parameter], *args: Any, **kwargs: Any) -> None:
    """Have each rank read its partitions of what is still as in the files; all else is partitioned as by default.

    This is also for models that are ordinary on this rank, because they may be lazy on others.
    """
    from lowmem_load.engines.partition import Partitioner

    ordinary(init, fill_partitions(Partitioner(init), list(param_list)), *args, **kwargs)


def _broadcast_model(ordinary: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    """Leave out what is broadcast again as it is partitioned, and would have a lazy model read in full."""
    from lowmem_load.engines.hooks import partitions_all

    if not partitions_all(engine):
        ordinary(engine, *args, **kwargs)


HANDLERS: Handlers = {
    foreign_names.PARTITION: _partition,
    foreign_names.BROADCAST_MODEL: _broadcast_model,
    foreign_names.ACCELERATE_FILL: _fill,
    foreign_names.AXOLOTL_FILL: _fill,
    foreign_names.PREPARE_FSDP2: _prepare_all,
    **dict.fromkeys(foreign_names.PREPARE_MODEL, _prepare_model),
}
