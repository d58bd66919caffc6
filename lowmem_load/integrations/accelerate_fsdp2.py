"""FSDP2 of accelerate and LLaMA-Factory under `install`: the model is lazy until it is sharded.

In stock every rank builds the whole model, in fp32 if it trains in mixed precision, before it is sharded. With
`cpu_ram_efficient_loading` rank 0 then broadcasts it, tensor by tensor. Of a lazy model `fully_shard` reads slices by
itself, and `fsdp2_load_full_state_dict` has each rank read its shards, all together.

Source: accelerate 1.15 `utils/fsdp_utils.py`, `fsdp2_prepare_model` and `fsdp2_load_full_state_dict`, and
`accelerator.py`, `Accelerator._prepare_fsdp2`, which knows the parameters of an optimizer by their addresses.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lowmem_load.api.load_into import load_into
from lowmem_load.api.request import Options, stage_3
from lowmem_load.distributed.group import RankGroup
from lowmem_load.distributed.live_group import has_group
from lowmem_load.dtensor.mesh import offloads
from lowmem_load.dtensor.sharded_target import Unfilled
from lowmem_load.errors import UnsupportedError
from lowmem_load.hf import loader
from lowmem_load.hf.active import active_zero3_config, draws_no_missing
from lowmem_load.hf.skeleton import ties_kept
from lowmem_load.integrations.imports import once_imported
from lowmem_load.lazy_weights.fill import fill_sharded, is_lazy
from lowmem_load.lazy_weights.lazy_model import hand_out
from lowmem_load.pipeline.checks import SHARDS
from lowmem_load.pipeline.load import LEFT_ATTRIBUTE, Load
from lowmem_load.replaced import Handler, Replacement, replaced
from lowmem_load.symbolic.lazy import addresses_are_only_compared

_NOT_LAZY = (
    *("quantization_config", "gguf_file"),
    *SHARDS,
    "state_dict",  # of a from_config, too, whose random values are drawn in another order than missing ones
)
"""Keywords of loads that transformers does by itself."""

_FILLS = "fsdp2_load_full_state_dict"


@contextlib.contextmanager
def lazy_loads(options: Options) -> Iterator[None]:
    """Inside, models for accelerate's FSDP2 are lazy until they are sharded. For all threads."""
    with contextlib.ExitStack() as hooks:
        # Not before a load: most jobs have no FSDP2, and need not import all this.
        hook = functools.cache(lambda: hooks.enter_context(_hooks()))

        def load(call: loader.Call) -> tuple[nn.Module, dict[str, Any]]:
            hook()
            call.kwargs.pop("device_map", None)
            ranks = RankGroup(None)
            load_lazily = Load(
                settings=stage_3(torch.float32, ranks.world_size),
                ranks=ranks,
                make_target=_unquantized,
                verify=options.verify,
                is_lenient=options.is_lenient,
                stream=options.stream,
                stock="stock FSDP2",
                hand_out=functools.partial(hand_out, progress=options.progress, on_load=options.on_load),
            )
            state = torch.get_rng_state()
            model, info = load_lazily(call)
            if draws_no_missing() and not hasattr(model, LEFT_ATTRIBUTE):
                torch.set_rng_state(state)
            return model, info

        hooks.enter_context(loader.intercepted(load, _is_fsdp2, everywhere=True))
        yield


def llamafactory_loads(options: Options) -> contextlib.AbstractContextManager[object]:
    """Inside, LLaMA-Factory v1 fills what it has made by `init_on_meta` and sharded by FSDP2 as `load_into` does.

    Source: LLaMA-Factory 0.9.5 `v1/plugins/trainer_plugins/distributed/fsdp2.py`, `FSDP2Engine.materialize_and_load`.
    """

    def load(_: Any, __: Any, model: nn.Module, name: str) -> None:
        report = load_into(model, name, progress=options.progress, verify=options.verify)
        if options.on_load is not None:
            options.on_load(report)

    module = "llamafactory.v1.plugins.trainer_plugins.distributed.fsdp2"
    return _replaced_once_imported(module, "FSDP2Engine._load_weights_from_hf_checkpoint", load)


def _replaced_once_imported(module: str, path: str, handler: Handler) -> contextlib.AbstractContextManager[object]:
    """Inside, `handler` is called in place of a function or method, once its module is imported. For all threads."""
    owner, _, name = path.rpartition(".")

    def replace(found: Any) -> contextlib.AbstractContextManager[None]:
        return replaced((getattr(found, owner) if owner else found, name, handler), everywhere=True)

    return once_imported(module, replace)


def _is_fsdp2(kwargs: Mapping[str, Any]) -> bool:
    """Return whether accelerate may shard a model by FSDP2 that is loaded with these keywords now."""
    place = kwargs.get("device_map")
    place = place.get("") if isinstance(place, Mapping) else place
    if place is not None and str(place) not in ("cpu", "meta"):  # axolotl names these, for accelerate to shard
        return False
    if not has_group() or any(kwargs.get(keyword) is not None for keyword in _NOT_LAZY):
        return False
    if _fsdp_version() == "1" or active_zero3_config() is not None:
        return False
    import accelerate.utils.fsdp_utils as fsdp_utils

    return hasattr(fsdp_utils, _FILLS)  # accelerate 1.6 on


def _fsdp_version() -> str:
    """Return the version of FSDP that an `Accelerator`, the environment or `TrainingArguments` ask for."""
    state: Any = sys.modules.get("accelerate.state")  # whoever has an Accelerator has imported it
    plugin = None if state is None else state.AcceleratorState._shared_state.get("fsdp_plugin")  # noqa: SLF001
    if plugin is not None:
        return str(plugin.fsdp_version)
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true"):
        return os.environ.get("FSDP_VERSION", "1")
    # TrainingArguments(fsdp=...) set this variable, and keep the version to themselves until a Trainer is made.
    return "unknown" if "FSDP_CPU_RAM_EFFICIENT_LOADING" in os.environ else "1"


def _unquantized(_: Any, model: Any) -> Unfilled:
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise UnsupportedError(f"{type(model).__name__}: quantized weights cannot be lazy")
    return Unfilled()


@contextlib.contextmanager
def _hooks() -> Iterator[None]:
    """Inside, each rank reads its shards of a lazy model that accelerate shards on the meta device."""
    import accelerate.accelerator
    import accelerate.utils.fsdp_utils as fsdp_utils

    replacements: list[Replacement] = [
        (fsdp_utils, _FILLS, _fill),
        (fsdp_utils, "fsdp2_prepare_model", _prepare_model),
        (accelerate.accelerator, "fsdp2_prepare_model", _prepare_model),
        (accelerate.accelerator.Accelerator, "_prepare_fsdp2", _prepare_all),
    ]
    with (
        replaced(*replacements, everywhere=True),
        _replaced_once_imported("axolotl.monkeypatch.accelerate.fsdp2", _FILLS, _fill),
    ):
        yield


def _fill(ordinary: Any, accelerator: Any, model: nn.Module, state: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_lazy(state):
        return ordinary(accelerator, model, state, *args, **kwargs)
    is_offloaded = offloads({"offload_policy": accelerator.state.fsdp_plugin.cpu_offload})
    fill_sharded(model, state, torch.device("cpu") if is_offloaded else accelerator.device)
    return model


def _prepare_all(ordinary: Any, *args: Any, **kwargs: Any) -> Any:
    with addresses_are_only_compared():
        return ordinary(*args, **kwargs)


def _prepare_model(ordinary: Any, accelerator: Any, model: nn.Module) -> Any:
    """Keep apart what transformers has found to differ: accelerate ties by the configuration, and loses one of both."""
    with replaced(*ties_kept()):
        return ordinary(accelerator, model)
