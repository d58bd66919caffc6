"""FSDP2 of accelerate and LLaMA-Factory under `install`: they shard a model without memory, each rank reads its shards.

In stock every rank builds the whole model, in fp32 if it trains in mixed precision, before it is sharded. With
`cpu_ram_efficient_loading` rank 0 then broadcasts it, tensor by tensor.

Source: accelerate 1.15 `utils/fsdp_utils.py`, `fsdp2_prepare_model` and `fsdp2_load_full_state_dict`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lowmem_load.api.load_into import load_into
from lowmem_load.api.request import Options, stage_3
from lowmem_load.distributed.group import RankGroup
from lowmem_load.distributed.live_group import has_group
from lowmem_load.ds.zero3_target import TargetMaker
from lowmem_load.dtensor.mesh import fsdp_package, mesh_device, offloads, scatter_into
from lowmem_load.dtensor.sharded_target import Sharded, ShardedModel, Unfilled, plain_name
from lowmem_load.errors import NotStreamedWarning, UnsupportedError, listed, outside_level
from lowmem_load.hf import loader
from lowmem_load.hf.active import active_zero3_config, transformers_class, transformers_models
from lowmem_load.hf.skeleton import allocate
from lowmem_load.integrations.imports import once_imported
from lowmem_load.pipeline.checks import SHARDS
from lowmem_load.pipeline.load import REPORT_ATTRIBUTE, Load
from lowmem_load.replaced import Handler, Replacement, replaced
from lowmem_load.symbolic.initialise import with_random_state

_PENDING = "lowmem_load_pending"
"""Attribute of a model that is to be filled once it is sharded: its `_PendingLoad`."""

_NOT_PENDING = (
    *("quantization_config", "gguf_file"),
    *SHARDS,
    "state_dict",  # of a from_config, too, whose random values are drawn in another order than missing ones
)
"""Keywords of loads that transformers does by itself."""

_NUMBERS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class _PendingLoad:
    """The load that a model waits for."""

    call: loader.Call
    random_state: torch.Tensor  # when it was called: parameters that no file has are drawn from it
    options: Options

    def __deepcopy__(self, _: Any) -> _PendingLoad:
        return self

    def again(self, run: Callable[[loader.Call], Any]) -> nn.Module:
        """Return the model of the call, run once more, with the same random numbers."""
        model: nn.Module = with_random_state(self.random_state, lambda: loader.handled(run, self.call)[0])
        return model


@contextlib.contextmanager
def pending_loads(options: Options) -> Iterator[None]:
    """Inside, models for accelerate's FSDP2 are filled when they have been sharded. For all threads."""
    # A verified load is never left to stock.
    reading_nothing = Options(progress=False, is_lenient=options.is_lenient and not options.verify)

    with contextlib.ExitStack() as hooks:
        # Not before a load: most jobs have no FSDP2, and need not import all this.
        hook = functools.cache(lambda: hooks.enter_context(_hooks()))

        def begin(call: loader.Call) -> tuple[nn.Module, dict[str, Any]]:
            hook()
            call.kwargs.pop("device_map", None)
            state = torch.get_rng_state()
            model, info = _load(_unfilled, reading_nothing)(call)
            if any(parameter.is_meta for parameter in model.parameters()):  # not left to stock
                _mark_pending(model, _PendingLoad(call, state, options._replace(is_lenient=False)))
            return model, info

        hooks.enter_context(loader.intercepted(begin, _is_fsdp2, everywhere=True))
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


# -- which loads -----------------------------------------------------------------------------------------------------


def _is_fsdp2(kwargs: Mapping[str, Any]) -> bool:
    """Return whether accelerate will shard a model by FSDP2 that is loaded with these keywords now."""
    place = kwargs.get("device_map")
    place = place.get("") if isinstance(place, Mapping) else place
    if place is not None and str(place) not in ("cpu", "meta"):  # axolotl names these, for accelerate to shard
        return False
    if not has_group() or any(kwargs.get(keyword) is not None for keyword in _NOT_PENDING):
        return False
    if _fsdp_version() != "2" or active_zero3_config() is not None:
        return False
    import accelerate.utils.fsdp_utils as fsdp_utils

    return hasattr(fsdp_utils, "fsdp2_load_full_state_dict")  # accelerate 1.6 on


def _fsdp_version() -> str:
    """Return the version of FSDP that an `Accelerator`, the environment or `TrainingArguments` ask for."""
    state: Any = sys.modules.get("accelerate.state")  # whoever has an Accelerator has imported it
    plugin = None if state is None else state.AcceleratorState._shared_state.get("fsdp_plugin")  # noqa: SLF001
    if plugin is not None:
        return str(plugin.fsdp_version)
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true"):
        return os.environ.get("FSDP_VERSION", "")
    # TrainingArguments(fsdp=...) set this variable, and keep all else to themselves until a Trainer is made.
    module: Any = sys.modules.get("transformers.training_args")
    if module is None or "FSDP_CPU_RAM_EFFICIENT_LOADING" not in os.environ:
        return ""
    arguments = (each for each in gc.get_objects() if issubclass(type(each), module.TrainingArguments))
    plugins = [getattr(each, "fsdp_plugin_args", None) or {} for each in arguments]
    return next((str(each["fsdp_version"]) for each in plugins if "fsdp_version" in each), "")


def _unfilled(_: Any, model: Any) -> Unfilled:
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise UnsupportedError(
            f"{type(model).__name__}: quantized weights cannot be filled after FSDP2 has sharded them"
        )
    return Unfilled()


def _load(make_target: TargetMaker, options: Options) -> Load:
    ranks = RankGroup(None)
    return Load(stage_3(torch.float32, ranks.world_size), ranks, make_target, *options)


def _mark_pending(model: nn.Module, pending: _PendingLoad) -> None:
    for parameter in model.parameters():
        # accelerate tells the parameters of an optimizer by their addresses, and all of meta have the address 0.
        setattr(parameter, "data_ptr", functools.partial(int, next(_NUMBERS)))  # noqa: B010  a method, for mypy
    setattr(model, _PENDING, pending)
    model.register_forward_pre_hook(_before_forward)


def _pending_model(model: nn.Module) -> Any:
    """Return the transformers model within a model that waits for its load; None if there is none."""
    return next((found for found in transformers_models(model) if hasattr(found, _PENDING)), None)


# -- the load --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _hooks() -> Iterator[None]:
    """Inside, pending models are filled where they are sharded, and where their values are needed before."""
    import accelerate.accelerator
    import accelerate.utils.fsdp_utils as fsdp_utils

    replacements: list[Replacement] = [
        (fsdp_utils, "fsdp2_prepare_model", _prepare),
        (accelerate.accelerator, "fsdp2_prepare_model", _prepare),
        (fsdp_package(), "fully_shard", _shard),
        (transformers_class(), "resize_token_embeddings", _resize),
        *((nn.Module, name, _move) for name in ("to", "cuda", "cpu")),
    ]
    peft = _replaced_once_imported("peft.tuners.tuners_utils", "BaseTuner.inject_adapter", _keep_adapters)
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(*replacements, everywhere=True))
        stack.enter_context(peft)
        for module in ("axolotl.loaders.model", "axolotl.train"):
            stack.enter_context(_replaced_once_imported(module, "materialize_trainable_meta_params", _keep_pending))
        yield


def _prepare(ordinary: Any, accelerator: Any, model: nn.Module) -> nn.Module:
    base = _pending_model(model)
    if base is None:
        return ordinary(accelerator, model)  # type: ignore[no-any-return]
    owner = sys.modules[inspect.unwrap(ordinary).__module__]  # axolotl has these two functions of its own
    added = _added(model, base)  # now: accelerate moves the model to meta
    pending = vars(base).pop(_PENDING)  # else `_shard` would take what accelerate shards
    # Instead of a broadcast: the sharded model, which comes after the ordinary function and the accelerator.
    with replaced((owner, "fsdp2_load_full_state_dict", lambda *args, **_: args[2])):
        prepared: nn.Module = ordinary(accelerator, model)
    is_offloaded = offloads({"offload_policy": accelerator.state.fsdp_plugin.cpu_offload})
    _fill(prepared, base, pending, torch.device("cpu") if is_offloaded else accelerator.device, added)
    return prepared


def _shard(ordinary: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Fill a model that somebody else shards: TRL does so with the reference model of DPO."""
    base = _pending_model(module) if isinstance(module, nn.Module) else None
    if base is None:
        return ordinary(module, *args, **kwargs)
    added = _added(module, base)
    sharded = ordinary(module, *args, **kwargs)
    device = torch.device("cpu") if offloads(kwargs) else mesh_device(module)
    _fill(module, base, vars(base).pop(_PENDING), device, added)
    return sharded


def _added(model: nn.Module, base: nn.Module) -> dict[str, torch.Tensor]:
    """Return what has values in a pending model, or beside it: parameters put on it or read before, others' buffers."""
    if changed := [name for name, each in base.named_parameters() if each.is_meta and each._version]:  # noqa: SLF001
        raise UnsupportedError(
            f"{type(base).__name__}: {listed(changed)} changed before FSDP2 has sharded the model, when it holds no "
            "values; change them after Accelerator.prepare, or load without lowmem_load"
        )
    own = set(map(id, base.buffers()))
    return {name: each.detach() for name, each in _tensors(model) if not each.is_meta and id(each) not in own}


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers by their plain names."""
    parameters, buffers = model.named_parameters(), model.named_buffers(remove_duplicate=False)  # to_empty unties them
    return ((plain_name(name), each) for name, each in itertools.chain(parameters, buffers))


def _fill(
    model: nn.Module, base: Any, pending: _PendingLoad, device: torch.device, added: Mapping[str, torch.Tensor]
) -> None:
    """Fill a model that was sharded on meta: from its files, and what was added from rank 0's values."""
    ranks = RankGroup(None)
    with ranks.step("noting what was added to the model") as step:
        step.payload = sorted(added) if ranks.rank == 0 else []
    named = set(step.payloads[0])  # axolotl gives the others memory for all
    filled = {id(each) for _, each in _tensors(base)} | {id(each) for name, each in _tensors(model) if name in named}
    if lost := [name for name, each in _tensors(model) if id(each) not in filled]:
        raise UnsupportedError(f"{type(model).__name__}: no file fills {listed(lost)}; make them on the CPU")
    model.to_empty(device=device)
    allocate(base, None)
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is base)
    given = {id(each) for name, each in base.named_parameters() if plain_name(prefix + name) in named}
    left = [name for name, each in base.named_parameters(remove_duplicate=False) if id(each) in given]
    sharded = ShardedModel(base, left)
    loaded = pending.again(_load(lambda _, described: Sharded(sharded, described), pending.options))
    with torch.no_grad():
        sharded.fill_buffers(loaded)
    for name, tensor in _tensors(model):
        if name in named:
            scatter_into(tensor, added.get(name, torch.empty(tensor.shape)))
    setattr(base, REPORT_ATTRIBUTE, getattr(loaded, REPORT_ATTRIBUTE))


# -- what needs values before ----------------------------------------------------------------------------------------


def _read_whole(base: nn.Module, modules: Collection[nn.Module]) -> None:
    """Read the parameters of some modules of a pending model, whole on every rank. Collective."""
    pending: _PendingLoad = getattr(base, _PENDING)
    held = {id(each) for module in modules for each in module.parameters() if each.is_meta}
    named = {name: each for name, each in base.named_parameters(remove_duplicate=False) if id(each) in held}
    if named:
        wanted = {plain_name(name) for name in named}
        options = pending.options._replace(on_load=None)  # most of the model is yet to be loaded
        _give(base, pending.again(_load(lambda *_: Unfilled(wanted), options)), named)


def _make_whole(base: nn.Module, why: str) -> None:
    """Load a pending model as stock does, and warn of what that costs. Nothing of it is pending any more."""
    if getattr(base, _PENDING).options.verify:
        raise UnsupportedError(
            f"{type(base).__name__}: {why} needs its weights before FSDP2 has sharded it, and cannot have them "
            "verified; call lowmem_load.verify_checkpoint before, and install without verify"
        )
    nbytes = sum(each.nbytes for each in base.parameters() if each.is_meta)
    warnings.warn(
        f"{type(base).__name__}: {why} needs its weights before FSDP2 has sharded it, so it was loaded whole, as "
        f"without lowmem_load: {nbytes / 2**20:.0f} MiB",
        NotStreamedWarning,
        stacklevel=outside_level(),
    )
    _give(base, vars(base).pop(_PENDING).again(loader.Call.run), dict(base.named_parameters(remove_duplicate=False)))


def _give(base: nn.Module, loaded: nn.Module, named: Mapping[str, nn.Parameter]) -> None:
    """Give parameters that have no values those of a loaded model."""
    values = dict(loaded.named_parameters(remove_duplicate=False))
    made: dict[int, nn.Parameter] = {}
    for name, parameter in named.items():
        if not parameter.is_meta:
            continue
        if id(parameter) not in made:
            value = values[plain_name(name)].detach().to(parameter.dtype)
            made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            loader.copy_marks(parameter, made[id(parameter)])
        owner, _, last = name.rpartition(".")
        setattr(base.get_submodule(owner), last, made[id(parameter)])


def _resize(ordinary: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Read the embeddings of a pending model, which are then resized like any other."""
    if hasattr(model, _PENDING):
        embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
        _read_whole(model, [each for each in embeddings if each is not None])
    return ordinary(model, *args, **kwargs)


def _move(ordinary: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Load a pending model whole before it is moved to a device."""
    asked = kwargs.get("device", args[0] if args else None)
    asked = asked.device if isinstance(asked, torch.Tensor) else asked
    moves = isinstance(asked, str | int | torch.device) and torch.device(asked).type != "meta"
    if (moves or not (args or kwargs)) and (base := _pending_model(module)) is not None:
        _make_whole(base, f"{type(module).__name__}.to a device")
    return ordinary(module, *args, **kwargs)


def _before_forward(model: nn.Module, _: Any) -> None:
    if hasattr(model, _PENDING):
        _make_whole(model, "its forward")


def _keep_adapters(ordinary: Any, tuner: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    """Leave the adapters that PEFT puts on a model without memory in host memory, where they have values.

    PEFT moves each adapter to the device of its layer. On meta its values would be lost.
    Source: peft 0.21 `tuners/tuners_utils.py`, `BaseTuner.inject_adapter`; `tuners/lora/model.py`, `_replace_module`.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    base, config = _pending_model(model), tuner.peft_config[adapter_name]
    if base is not None and _needs_weights(config):
        _make_whole(base, f"a {config.peft_type} adapter that is made from them")
        base = None
    if base is None:
        ordinary(tuner, model, adapter_name, *args, **kwargs)
        return
    if copied := tuple(getattr(config, "modules_to_save", None) or ()):
        _read_whole(base, [module for name, module in base.named_modules() if name.endswith(copied)])
    made: list[tuple[nn.Module, str, nn.Parameter]] = []

    def note(ordinary: Any, layer: Any, adapter_name: str, device: torch.device | None = None) -> None:
        weight = getattr(layer.get_base_layer(), "weight", None)
        if device is not None or weight is None or not weight.is_meta:
            ordinary(layer, adapter_name, device)
        else:
            on_host = SimpleNamespace(weight=torch.empty(0, dtype=weight.dtype))
            layer.get_base_layer = lambda: on_host
            ordinary(layer, adapter_name)
            del layer.get_base_layer
        for module in layer.modules():
            made.extend(
                (module, name, each) for name, each in module.named_parameters(recurse=False) if not each.is_meta
            )

    with replaced((BaseTunerLayer, "_move_adapter_to_device_of_base_layer", note)):
        ordinary(tuner, model, adapter_name, *args, **kwargs)
    for module, name, parameter in made:
        moved = getattr(module, name)
        if moved.is_meta:
            setattr(module, name, parameter.requires_grad_(moved.requires_grad))


def _keep_pending(ordinary: Any, model: nn.Module) -> Any:
    """Leave a pending model without memory: `_mark_pending` has given its parameters addresses.

    Source: axolotl 0.19 `loaders/utils.py`, which gives memory to parameters that an optimizer is made for.
    """
    return [] if _pending_model(model) is not None else ordinary(model)


def _needs_weights(config: Any) -> bool:
    """Return whether PEFT computes an adapter from the weights that it adapts, or copies some of them."""
    is_lora = str(config.peft_type).rpartition(".")[2] in ("LORA", "ADALORA")
    is_plain_lora = is_lora and getattr(config, "init_lora_weights", None) in (True, False, "gaussian")
    others = ("use_dora", "target_parameters", "trainable_token_indices", "lora_bias")
    return not is_plain_lora or any(getattr(config, each, None) for each in others)
