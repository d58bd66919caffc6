"""The target that a ds_config chooses: ZeRO-3 partitions, or for other stages every parameter in full.

The layout is arithmetic; DeepSpeed is imported only when memory is made. `partition` chooses modules by name, glob,
class or predicate. The choice is remembered on the modules.

[Note: chosen modules] A chosen module is partitioned with all that lies below it, so only topmost ones are named. A
parameter that a chosen and another module share cannot be both partitioned and replicated, so that is refused.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowmem_load.config.settings import Choice, Partition, Settings, choices_of
from lowmem_load.engines.target import HostBytes, Layout, Made, Replicated, Target
from lowmem_load.errors import ConfigError, IncompatibleVersionError, UnsupportedError, listed
from lowmem_load.foreign_names import DEEPSPEED, absent, require, require_attributes
from lowmem_load.planning.load_plan import TargetPlan
from lowmem_load.planning.regions import partition_numel, partition_range, secondary_range
from lowmem_load.quantized.format import packed_parameters
from lowmem_load.text import is_below

if TYPE_CHECKING:
    from lowmem_load.engines.partition import Partitioner

KIND = "zero3"
"""`Layout.kind` of partitioned parameters."""

TargetMaker = Callable[[Settings, nn.Module], Target]
"""Makes the target of a model under resolved settings. The model's parameters need only names and shapes."""

MARK = "lowmem_load_partitioned"
"""Attribute of a module that was loaded with all parameters below it partitioned."""

_ZERO = "deepspeed.runtime.zero.partition_parameters"

_LOSSY = {
    "zero_quantized_weights": "quantizes what it gathers",
    "zero_quantized_nontrainable_weights": "quantizes frozen weights",
    "use_all_reduce_for_fetch_params": "adds up what it gathers",
    "stage3_use_all_reduce_for_fetch_params": "adds up what it gathers",  # DeepSpeed takes both names
}
"""Settings of zero_optimization under which DeepSpeed computes with weights when it gathers them."""


class Zero3(Replicated):
    """The parameters of `modules`, topmost ones by name, become ZeRO-3 parameters; those of others are replicated.

    `rank` is that of the partition group; `group` None means all ranks. For planning the device needs no index.
    """

    def __init__(
        self, settings: Settings, rank: int, device: torch.device, group: Any = None, modules: Collection[str] = ("",)
    ) -> None:
        super().__init__(device, settings.world_size)
        _refuse(settings, group)
        self._settings, self._rank, self._group, self._modules = settings, rank, group, modules
        self._partitioner: Partitioner | None = None
        self._ids: dict[int, int] = {}

    def layout(self, name: str, parameter: torch.Tensor) -> Layout:
        """See `Target`. Under hpZ the second region is the secondary partition, which the ranks of a node share."""
        if not is_below(name, self._modules):
            return super().layout(name, parameter)
        numel, stored = parameter.numel(), parameter.dtype
        world_size, secondary_size = self._settings.world_size, self._settings.secondary_size
        regions, numels = [partition_range(numel, self._rank, world_size)], [partition_numel(numel, world_size)]
        holders = [range(self._rank, self._rank + 1)]
        if secondary_size:
            region, size = secondary_range(numel, self._rank, world_size, secondary_size)
            regions.append(region)
            numels.append(size)
            holders.append(range(self._rank % secondary_size, world_size, secondary_size))
        dtype = self._settings.dtype if stored.is_floating_point else stored
        on_host = self.device.type == "cpu" or self._settings.offload_device != "none"
        return Layout(KIND, dtype, tuple(regions), tuple(numels), on_host, holders=holders)

    def check(self, model: nn.Module, /) -> None:
        """See `Target`."""
        check_packed(model, self._settings)
        check_ties(model, {name: model.get_submodule(name) for name in self._modules})

    def fp32_buffers(self, model: nn.Module, /) -> list[torch.Tensor]:
        """Return the buffers that the model or the ds_config (data_types.keep_in_fp32_modules) names for fp32."""
        setting = self._settings.ds_config.get("data_types", {}).get("keep_in_fp32_modules")
        return fp32_buffers(model, setting, self._settings.dtype)

    def host_bytes(self, plans: Sequence[TargetPlan], /) -> HostBytes:
        """See `Target`. Under offload_param to nvme, small partitions stay on the host; they are not counted."""
        new_bytes = super().host_bytes([plan for plan in plans if plan.kind != KIND]).new
        if self._settings.offload_device == "nvme":
            uses_gds = (self._settings.ds_config.get("aio") or {}).get("use_gds")  # its buffers lie on the device
            new_bytes += 0 if uses_gds else self._settings.swap_bytes
        elif self.device.type == "cpu" or self._settings.offload_device == "cpu":
            new_bytes += sum(plan.held_bytes for plan in plans if plan.kind == KIND)
        return HostBytes(new_bytes)

    def prepare(self, model: nn.Module, /) -> None:
        """See `Target`. Needs DeepSpeed's `comm` and `LOCAL_RANK`, which `DistributedInterface` sets up."""
        from lowmem_load.engines.partition import Partitioner

        made = Partitioner.from_config(self._settings.ds_config, self._group)
        world_size, secondary_size = self._settings.world_size, self._settings.secondary_size
        secondary = (self._rank % secondary_size, secondary_size) if secondary_size else (0, 0)
        planned = (self._settings.dtype, self.device.type, self._rank, world_size, secondary)
        actual = (made.dtype, made.device.type, made.rank, made.world_size, made.secondary)
        if actual != planned:
            raise IncompatibleVersionError(
                "zero.Init takes dtype, device, rank, world size, and rank and size of hpZ's group "
                f"{actual} from this ds_config, the plan {planned}"
            )
        self._partitioner, self._ids = made, made.reserve_ids(model)
        self.device = made.device
        mark(model.get_submodule(name) for name in self._modules)

    def files(self, plans: Sequence[TargetPlan], /) -> Mapping[str, int]:
        """See `Target`. Only the swapper of offload_param to nvme writes files."""
        assert self._partitioner is not None  # prepare comes first
        swapping = self._partitioner.swapping
        partitioned = [plan.destinations[0].numel for plan in plans if plan.kind == KIND]
        return {} if swapping is None else swapping.files(partitioned)

    def make(self, plan: TargetPlan, parameter: nn.Parameter, wait: Callable[[], None]) -> Made:
        """See `Target`."""
        if plan.kind != KIND:
            return super().make(plan, parameter, wait)
        partitioner = self._partitioner
        assert partitioner is not None  # prepare comes first
        partitioner.make_room(wait)
        partitioned = partitioner.new_parameter(
            torch.Size(plan.shape), plan.dtype, parameter.requires_grad, self._ids[id(parameter)]
        )
        tensors = [memory for _, memory in partitioner.allocate(partitioned)]
        actual = [tensor.numel() for tensor in tensors]
        planned = [destination.numel for destination in plan.destinations]
        if actual != planned:
            raise IncompatibleVersionError(
                f"{plan.name}: DeepSpeed's partitions have {actual} elements, those of the plan {planned}"
            )
        return partitioned, tensors

    def finish(self) -> None:
        """See `Target`."""
        assert self._partitioner is not None  # prepare comes first
        self._partitioner.finish()


def target_maker(rank: int, device: torch.device, group: Any = None) -> TargetMaker:
    """Return a function that makes targets for a rank of the partition group; for planning the device needs no index.

    `group` of torch.distributed has the ranks among which parameters are partitioned; None means all.
    """

    def make(settings: Settings, model: nn.Module) -> Target:
        if settings.stage < 3:
            return Replicated(torch.device("cpu"), settings.world_size)
        if settings.partition is None:
            return Zero3(settings, rank, device, group)
        chosen = tuple(choose(model, settings.partition, must_match=settings.must_match))
        return Zero3(settings, rank, device, group, chosen)

    return make


def fp32_buffers(module: nn.Module, setting: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the buffers that DeepSpeed keeps in fp32 when it trains `module` in `dtype`.

    `setting` is data_types.keep_in_fp32_modules of the ds_config; None if it is absent.
    """
    rules = fp32_rules()
    if rules is None:
        if isinstance(setting, list) and setting:
            raise absent("data_types.keep_in_fp32_modules")
        return []
    pattern = rules.keep_in_fp32_pattern(module, setting, dtype)
    return [] if pattern is None else list(rules.buffers_to_keep_in_fp32(module, pattern))


def fp32_rules() -> Any:
    """Return the module of DeepSpeed that chooses buffers for fp32; None if the installed release has none."""
    # Its file is run by itself: planning needs nothing else of DeepSpeed, whose import takes seconds.
    package = importlib.util.find_spec("deepspeed")
    assert package is not None and package.origin is not None  # this package requires it
    path = os.path.join(os.path.dirname(package.origin), "runtime", "keep_in_fp32.py")
    spec = importlib.util.spec_from_file_location("deepspeed_keep_in_fp32", path)
    if not os.path.exists(path) or spec is None or spec.loader is None:
        return None
    rules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rules)
    require_attributes(DEEPSPEED, rules, ("buffers_to_keep_in_fp32", "keep_in_fp32_pattern"))
    return rules


def _refuse(settings: Settings, group: Any) -> None:
    has_secondary = settings.secondary_size > 0
    if settings.ds_config.get("weight_quantization", {}).get("quantized_initialization"):
        raise UnsupportedError("weight_quantization.quantized_initialization quantizes full layers; remove it")
    section = settings.ds_config["zero_optimization"]
    if settings.offload_device == "nvme" and not (section.get("offload_param") or {}).get("nvme_path"):
        raise ConfigError("offload_param.device is 'nvme', but offload_param.nvme_path is missing; name a folder")
    if has_secondary and settings.offload_device == "nvme":
        raise UnsupportedError(
            "zero_hpz_partition_size with offload_param.device 'nvme': DeepSpeed has no swapper for secondary "
            "partitions; remove one of them"
        )
    if has_secondary and group is not None:
        raise UnsupportedError(
            "zero_hpz_partition_size with data_parallel_group: DeepSpeed cuts secondary groups out of all ranks; "
            "remove one of them"
        )
    if section.get("mics_shard_size", -1) > 0:
        raise UnsupportedError(
            "mics_shard_size: models are not loaded under MiCS, which DeepSpeed has dropped; set "
            "zero_hpz_partition_size instead"
        )
    if has_secondary and settings.world_size % settings.secondary_size:
        raise ConfigError(
            f"zero_hpz_partition_size {settings.secondary_size} does not divide the {settings.world_size} ranks, which "
            "DeepSpeed refuses; use a divisor"
        )


def check_packed(model: nn.Module, settings: Settings) -> None:
    """Refuse settings under which DeepSpeed computes with packed weights."""
    packed = packed_parameters(model)
    if not packed:
        return
    for setting, does in _LOSSY.items():
        if settings.ds_config["zero_optimization"].get(setting):
            raise ConfigError(f"{setting}: DeepSpeed {does}, but packed weights are not numbers; remove it")
    if settings.partition is not None:
        raise UnsupportedError("partition= with packed weights has not been tried; load all of it into ZeRO-3")
    for name, parameter in packed.items():
        storage, packing = parameter.dtype, parameter.packing
        if storage.is_floating_point and storage != settings.dtype:
            raise ConfigError(
                f"{name}: its packed values are stored as {storage}, and DeepSpeed, which runs in {settings.dtype} "
                f"under this ds_config, would cast them as if they were numbers; use {packing.storage_option}="
                f"{settings.dtype} (or torch.uint8), and pack a checkpoint again that is packed already"
            )
        if settings.offload_device == "nvme" and storage != settings.dtype:
            raise UnsupportedError(
                f"{name}: its packed values are stored as {storage}, and the buffers through which DeepSpeed writes to "
                f"nvme are of {settings.dtype}; use {packing.storage_option}={settings.dtype}"
            )


# -- which modules are partitioned -------------------------------------------------------------------------------------


def choose(model: nn.Module, partition: Partition, *, must_match: bool = True) -> dict[str, nn.Module]:
    """Return the topmost chosen modules by their first names, in the order of the model; "" is the model itself."""
    entries = choices_of(partition)
    named = list(model.named_modules(remove_duplicate=False))  # a shared module has several names
    matches = [{id(module) for name, module in named if _matches(entry, name, module)} for entry in entries]
    matched: set[int] = set().union(*matches)
    chosen: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if id(module) in matched and not is_below(name, chosen):  # a module comes before those below it
            chosen[name] = module
    idle = [getattr(entry, "__name__", repr(entry)) for entry, ids in zip(entries, matches, strict=True) if not ids]
    if idle and must_match:
        raise ConfigError(
            f"partition: {', '.join(idle)} choose(s) no module of {type(model).__name__}; its modules are "
            f"{listed([name for name, _ in model.named_modules() if name])}"
        )
    empty = [name for name, module in chosen.items() if next(module.parameters(), None) is None]
    if empty and must_match:
        raise ConfigError(f"partition: {listed(empty)} has no parameters, so there is nothing to partition")
    return {name: module for name, module in chosen.items() if name not in empty}


def check_ties(model: nn.Module, chosen: dict[str, nn.Module]) -> None:
    """Raise ConfigError for parameters that a chosen and another module share; see [Note: chosen modules]."""
    inside = chosen_parameters(chosen)
    shared = [
        (prefix, f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules()
        if not is_below(prefix, chosen)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(parameter) in inside
    ]
    if shared:
        owners = sorted({repr(prefix) for prefix, _ in shared})
        raise ConfigError(
            f"partition: {listed([name for _, name in shared])} is tied to a parameter of a chosen module, so it "
            f"would be partitioned without being gathered; choose {listed(owners)} too"
        )


def chosen_parameters(chosen: Mapping[str, nn.Module]) -> set[int]:
    """Return the ids of all parameters of the chosen modules."""
    return {id(parameter) for module in chosen.values() for parameter in module.parameters()}


def mark(chosen: Iterable[nn.Module]) -> None:
    """Remember on the modules themselves, which PEFT and composite modules keep, that they are partitioned."""
    for module in chosen:
        setattr(module, MARK, True)


def partitioned_modules(model: nn.Module, is_partitioned: Callable[[torch.Tensor], bool]) -> dict[str, nn.Module]:
    """Return the topmost modules that are partitioned already, by name.

    These are the marked ones. Where a model was partitioned by other means, they are the modules of which all
    parameters are partitioned, and those that own a partitioned one while others below are not.
    """
    topmost: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        parameters, own = list(module.parameters()), module.parameters(recurse=False)
        # No module above a marked one, which may be called on its own.
        is_full = not any(map(_is_marked, module.modules())) and parameters and all(map(is_partitioned, parameters))
        if not is_below(name, topmost) and (_is_marked(module) or is_full or any(map(is_partitioned, own))):
            topmost[name] = module
    return topmost


def _is_marked(module: nn.Module) -> bool:
    # Not getattr: wrappers such as PeftModel answer for what they wrap, and also have parameters of their own.
    return bool(vars(module).get(MARK, False))


def _matches(entry: Choice, name: str, module: nn.Module) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    if not name:  # the model itself: a predicate that is about names below it would choose everything there
        return False
    return fnmatch.fnmatchcase(name, entry) if isinstance(entry, str) else bool(entry(name, module))


# -- a deepspeed.zero.Init that the caller has entered ----------------------------------------------------------------


@contextlib.contextmanager
def zero_init_disabled() -> Iterator[Any]:
    """Inside, a zero.Init that was entered around this has no effect. Yields the outermost one, or None."""
    zero: Any = sys.modules.get(_ZERO)
    if zero is not None:
        require(DEEPSPEED, {_ZERO: ("restore_init_context", "shutdown_init_context", "top_level_context")})
    init = getattr(zero, "top_level_context", None)
    if not getattr(init, "patched", False):
        yield None
        return
    zero.shutdown_init_context()
    try:
        yield init
    finally:
        zero.restore_init_context()


def refuse_other_zero_init(init: Any, *, dtype: torch.dtype, device: str, world_size: int) -> None:
    """Raise unless a zero.Init around a load, as `zero_init_disabled` yields it, makes the same parameters as the load.

    `device` is where partitions stay: "cpu", "nvme", or the accelerator's type.
    """
    if init is None:
        return
    require_attributes(DEEPSPEED, init, ("dp_world_size", "dtype", "remote_device"))
    remote_device = str(getattr(init.remote_device, "value", init.remote_device)).partition(":")[0]  # may be an enum
    if (init.dtype, remote_device, init.dp_world_size) != (dtype, device, world_size):
        raise UnsupportedError(
            f"inside a deepspeed.zero.Init that makes {init.dtype} parameters on {remote_device} for "
            f"{init.dp_world_size} rank(s); the ds_config of this load asks for {dtype} on {device} for {world_size}: "
            "give zero.Init the same ds_config (config_dict_or_path=), or load outside of it"
        )


def refuse_partitioned(model: nn.Module) -> None:
    """Raise UnsupportedError if a parameter of a described model is a ZeRO-3 parameter already."""
    if _ZERO not in sys.modules:
        return
    from lowmem_load.engines.parameters import is_partitioned

    for name, parameter in model.named_parameters():
        if is_partitioned(parameter):
            raise UnsupportedError(
                f"{name}: was partitioned by a zero.Init before its values were known; it was entered inside the "
                f"load, such as in the __init__ of {type(model).__name__} or of a module of it: remove it there"
            )
