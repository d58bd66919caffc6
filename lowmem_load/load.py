"""The phases of a load, in order: describe -> plan -> agree -> read -> agree -> report."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from tqdm import tqdm

from . import hf, pretrained
from .config import for_loading, hidden_size_of, read_ds_config, resolve_auto, zero_stage
from .distributed import DistributedInterface
from .errors import ConfigError, LoadOrderWarning, UnsupportedError
from .expression import Cast, Computed, Expression, Source, cast, held, leaves, numel
from .hf_active import active_zero3_config, was_dropped
from .partial import Partition, check_ties, choices_of, choose, chosen_parameters, mark
from .plan import FlatRange, TargetPlan, partition_range, plan_digest, plan_target
from .precision import Precision, precision_of
from .rank_group import RankGroup
from .reader import Reader, gathered_nbytes
from .report import LoadReport, SlowPath, host_memory
from .scratch import Scratch
from .symbolic import SymbolicTensor, forget, kept_of
from .zero3 import Destination, Partitioner, is_partitioned, persistent

MAX_THREADS = 4
"""Reads in flight per rank. More compete for the same disk and page tables; transformers found 16 slower than 4."""

REPORT_ATTRIBUTE = "lowmem_load_report"
"""Where a model keeps its `LoadReport`; `load_report(model)` finds it."""

_PLACES_BY_ITSELF = ("device_map", "quantization_config", "gguf_file")
"""Keywords of loads that transformers itself does under stages 0 to 2."""

DROPPED = (
    "a HfDeepSpeedConfig was made but nothing keeps it alive, so this model is loaded whole on every rank, not into "
    "ZeRO-3 partitions; transformers holds the object weakly: keep it in a variable for as long as models are loaded. "
    "If the load is meant to be an ordinary one, call transformers.integrations.unset_hf_deepspeed_config() before it"
)
"""Warning of a load that an `HfDeepSpeedConfig` was probably meant for."""

PROGRESS_DELAY_S = 3.0
"""Seconds before the progress bar appears: short loads stay quiet."""


class _Placement(Protocol):
    """Where parameters go: ZeRO-3 partitions, or whole on every rank."""

    device: torch.device

    def dtype_of(self, parameter: torch.Tensor) -> torch.dtype: ...

    def ranges(self, parameter: torch.Tensor) -> list[FlatRange]: ...

    def make(self, parameter: nn.Parameter, dtype: torch.dtype) -> tuple[nn.Parameter, list[Destination]]: ...

    def fp32_buffers(self, model: nn.Module, /) -> list[torch.Tensor]: ...

    @property
    def is_full(self) -> bool: ...

    def settle(self) -> None: ...


class _Partitioned:
    """Every parameter becomes a ZeRO-3 parameter in the dtype in which DeepSpeed will run."""

    def __init__(self, ds_config: Mapping[str, Any], model: nn.Module, ranks: RankGroup) -> None:
        self._partitioner = Partitioner(ds_config, ranks.group)
        self._ids = self._partitioner.reserve_ids(model)
        self.device = self._partitioner.device

    def dtype_of(self, parameter: torch.Tensor) -> torch.dtype:
        return self._partitioner.dtype if parameter.is_floating_point() else parameter.dtype

    def ranges(self, parameter: torch.Tensor) -> list[FlatRange]:
        return self._partitioner.ranges(parameter.numel())

    def make(self, parameter: nn.Parameter, dtype: torch.dtype) -> tuple[nn.Parameter, list[Destination]]:
        made = self._partitioner.new_parameter(
            parameter.shape, dtype, parameter.requires_grad, self._ids[id(parameter)]
        )
        return made, self._partitioner.allocate(made)

    def fp32_buffers(self, model: nn.Module) -> list[torch.Tensor]:
        return self._partitioner.fp32_buffers(model)

    @property
    def is_full(self) -> bool:
        return self._partitioner.is_full

    def settle(self) -> None:
        self._partitioner.settle()


class _Whole:
    """Every parameter stays whole, as an ordinary load leaves it: in host memory for ZeRO stages 0, 1 and 2."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def dtype_of(self, parameter: torch.Tensor) -> torch.dtype:
        return parameter.dtype

    def ranges(self, parameter: torch.Tensor) -> list[FlatRange]:
        return [FlatRange(0, parameter.numel())]

    def make(self, parameter: nn.Parameter, dtype: torch.dtype) -> tuple[nn.Parameter, list[Destination]]:
        values = torch.empty(parameter.shape, dtype=dtype, device=self.device)
        made = nn.Parameter(values, requires_grad=parameter.requires_grad)
        return made, [Destination(values.view(-1), FlatRange(0, values.numel()))]

    def fp32_buffers(self, _: nn.Module) -> list[torch.Tensor]:
        return []

    is_full = False

    def settle(self) -> None:
        pass


class _Partial:
    """Parameters of the chosen modules become ZeRO-3 parameters; the others stay whole on the same device."""

    def __init__(self, ds_config: Mapping[str, Any], model: nn.Module, ranks: RankGroup, chosen: set[int]) -> None:
        self._chosen = chosen
        self._partitioned = _Partitioned(ds_config, model, ranks)
        self.device = self._partitioned.device
        self._whole = _Whole(self.device)

    def dtype_of(self, parameter: torch.Tensor) -> torch.dtype:
        return self._of(parameter).dtype_of(parameter)

    def ranges(self, parameter: torch.Tensor) -> list[FlatRange]:
        return self._of(parameter).ranges(parameter)

    def make(self, parameter: nn.Parameter, dtype: torch.dtype) -> tuple[nn.Parameter, list[Destination]]:
        return self._of(parameter).make(parameter, dtype)

    def fp32_buffers(self, model: nn.Module) -> list[torch.Tensor]:
        return self._partitioned.fp32_buffers(model)

    @property
    def is_full(self) -> bool:
        return self._partitioned.is_full

    def settle(self) -> None:
        self._partitioned.settle()

    def _of(self, parameter: torch.Tensor) -> _Placement:
        return self._partitioned if id(parameter) in self._chosen else self._whole


@dataclass(slots=True)
class _Target:
    """A distinct parameter: all places that hold it, and the plan of each of its destinations."""

    parameter: nn.Parameter
    dtype: torch.dtype
    places: list[tuple[nn.Module, str]]
    plans: list[TargetPlan]
    name: str


def load_model(
    name: str | os.PathLike[str],
    ds_config: Any,
    *,
    auto_class: str | type | None = None,
    dtype: str | torch.dtype | None = "auto",
    progress: bool | None = None,
    data_parallel_group: Any = None,
    partition: Partition | None = None,
    **from_pretrained_kwargs: Any,
) -> Any:
    """Load a checkpoint straight into ZeRO-3 partitions; return an ordinary transformers model.

    Every rank must call it. Under ZeRO stage 3 every parameter of the result is partitioned; each rank has read only
    the bytes of its own partitions. Under stage 0, 1 or 2 the result is whole on every rank, read without mmap.

    Args:
        name: a local folder or a Hub id.
        ds_config: a dict, the path of a JSON file, or an `HfDeepSpeedConfig`; never changed. Its "auto" values are
            resolved as `config.resolve_auto` says; `load_report(model).ds_config` holds the result.
        auto_class: a transformers class, its name, or None for the class that the config's `architectures` names.
        dtype: "auto" for the dtype in which DeepSpeed will run this ds_config (bf16, fp16 or, with both off or
            absent, fp32). Under stage 3 any other value must agree with it, unless `partition` is given: then it
            is the dtype of the parameters that stay whole.
        progress: True shows a progress bar on rank 0, False none, None one on long loads when stderr is a terminal.
        partition: under stage 3, what to partition: module names or globs, module classes, predicates on
            (name, module), or a sequence of these; all else is loaded whole on every rank. None partitions all, an
            empty sequence nothing. Train such a model with `lowmem_load.initialize`.
        data_parallel_group: a group of torch.distributed among whose ranks parameters are cut up, such as one for
            data and sequence parallelism; then the ranks of that group call this, and no others. None: all ranks.
        **from_pretrained_kwargs: as `from_pretrained` takes them: revision, token, cache_dir, subfolder, ...

    Returns:
        The model, in eval mode, with a `LoadReport` as `model.lowmem_load_report`.

    Collective: all ranks. No weight crosses the network; two small status exchanges do.
    Memory: the partitions, plus the reader's staging (`reader.STAGING_NBYTES` per thread).

    Raises:
        ConfigError: ds_config, dtype or auto_class cannot be used.
        CheckpointError: the folder or its files cannot be used.
        UnsupportedError: a combination that cannot be streamed.
        RankError: another rank failed; the same error is raised on every rank.
    """
    name = os.fspath(name)
    ranks = DistributedInterface().subgroup(data_parallel_group)
    kwargs = dict(from_pretrained_kwargs)
    if "torch_dtype" in kwargs:  # the older name of the same keyword
        dtype = kwargs.pop("torch_dtype") if dtype == "auto" else dtype
    with ranks.agreed("checking the arguments"):
        config_dict = read_ds_config(ds_config)
        stage = zero_stage(config_dict)
        precision = precision_of(config_dict, absent="disabled")
        if partition is not None:
            if stage != 3:
                raise ConfigError(f"partition needs ZeRO stage 3, the ds_config has stage {stage}; drop partition")
            choices_of(partition)
        kwargs["dtype"] = _storage_dtype(dtype, precision, must_agree=stage == 3 and partition is None)
        pretrained.check_name(name, kwargs.get("subfolder", ""))
        config = pretrained.model_config(name, kwargs)
        cls = pretrained.model_class(auto_class, config, bool(kwargs.get("trust_remote_code")))
        if stage == 3:
            if kwargs.get("device_map") is not None:
                raise ConfigError("device_map and ZeRO-3 both place parameters; remove device_map")
            pretrained.refuse_quantized(config, kwargs)
            pretrained.check_weights(name, kwargs.get("subfolder", ""), kwargs.get("use_safetensors"))
        resolve_auto(config_dict, world_size=ranks.world_size, hidden_size=hidden_size_of(config), precision=precision)
    with _streaming(ds_config, ranks, progress, partition, must_match=True):
        return cls.from_pretrained(name, **kwargs)


@contextlib.contextmanager
def streaming(
    ds_config: Any = None,
    *,
    progress: bool | None = None,
    partition: Partition | None = None,
    data_parallel_group: Any = None,
) -> Iterator[None]:
    """Inside, any `from_pretrained` of a transformers model loads as `load_model` does, whoever calls it.

    Models keep the dtype that the caller asked for under stages 0 to 2; under stage 3 the ds_config decides, as it
    does with stock ZeRO-3. On exit, also after an exception, everything is as it was before.

    Args:
        ds_config: as for `load_model`. None follows transformers: each load goes by the ZeRO-3 configuration that is
            active at that moment, which TrainingArguments, accelerate's plugin or an `HfDeepSpeedConfig` has set; while
            there is none, loads are the ordinary ones.
        progress: as for `load_model`.
        partition: as for `load_model`, applied to each model that is loaded inside; one in which it chooses no
            module stays whole.
        data_parallel_group: as for `load_model`.

    Raises:
        ConfigError: ds_config cannot be used.
    """
    if ds_config is None:
        if partition is not None or data_parallel_group is not None:
            raise ConfigError("streaming() without a ds_config takes neither partition nor data_parallel_group")
        with hf.intercepted(lambda call: _load_as_active(call, progress), _zero3_is_active):
            yield
        return
    ranks = DistributedInterface().subgroup(data_parallel_group)
    with _streaming(ds_config, ranks, progress, partition, must_match=False):
        yield


@contextlib.contextmanager
def _streaming(
    ds_config: Any, ranks: RankGroup, progress: bool | None, partition: Partition | None, *, must_match: bool
) -> Iterator[None]:
    with ranks.agreed("checking the ds_config"):
        config_dict = read_ds_config(ds_config)
        zero_stage(config_dict)
        precision_of(config_dict, absent="disabled")
        if partition is not None:
            choices_of(partition)
    stream = _Stream(config_dict, ranks, progress, partition, must_match)
    with hf.deepspeed_config(config_dict), hf.intercepted(stream.load):
        yield


def _zero3_is_active() -> bool:
    if active_zero3_config() is not None:
        return True
    if was_dropped():
        warnings.warn(DROPPED, LoadOrderWarning, stacklevel=4)  # the caller of from_pretrained
    return False


def _load_as_active(call: hf.Call, progress: bool | None) -> tuple[nn.Module, dict[str, Any]]:
    active = active_zero3_config()
    assert active is not None  # asked a moment ago, by _zero3_is_active
    distributed = DistributedInterface()
    with distributed.agreed("checking the active ds_config"):
        stream = _Stream(for_loading(read_ds_config(active)), distributed, progress)
    return stream.load(call)


def load_report(model: Any) -> LoadReport:
    """Return the `LoadReport` of a model that lowmem_load loaded, also when an engine or an adapter wraps it.

    Raises:
        ValueError: lowmem_load did not load this model.
    """
    report = getattr(model, REPORT_ATTRIBUTE, None)
    if not isinstance(report, LoadReport):
        raise ValueError(  # noqa: TRY004  the model has the right type, the wrong history
            f"{type(model).__name__} was not loaded by lowmem_load, so there is no report of its load"
        )
    return report


class _Stream:
    """Loads models under one ds_config."""

    def __init__(
        self,
        ds_config: dict[str, Any],
        ranks: RankGroup,
        progress: bool | None,
        partition: Partition | None = None,
        must_match: bool = False,
    ) -> None:
        self._partition, self._must_match = partition, must_match
        self._ds_config = ds_config
        self._ranks = ranks
        self._progress = progress
        self._stage = zero_stage(ds_config)

    def load(self, call: hf.Call) -> tuple[nn.Module, dict[str, Any]]:
        if self._stage == 3 and call.kwargs.get("device_map") is not None:
            raise ConfigError(f"{call.name}: device_map and ZeRO-3 both place parameters; remove device_map")
        if self._stage < 3 and any(call.kwargs.get(name) for name in _PLACES_BY_ITSELF):
            return call.run()
        memory = host_memory()
        report = LoadReport(call.name, start_memory=memory, peak_memory=memory)
        report.rank, report.world_size = self._ranks.rank, self._ranks.world_size
        with self._same_random_numbers(), self._reader() as reader:
            with self._ranks.agreed(f"{call.name}: describing the model") as digest, report.phase("describe"):
                model, info = call.describe(
                    reader.read_whole,
                    Scratch(reader.read_whole, self._kept_range),
                    lambda base: self._complete(base, reader, report),
                )
                digest.append(plan_digest(f"{key} {sorted(map(str, names))}" for key, names in sorted(info.items())))
            self._complete(model, reader, report)
            report.read_bytes, report.num_reads = reader.stats.read_bytes, reader.stats.num_reads
        report.missing_keys = sorted(info["missing_keys"])
        report.unexpected_keys = sorted(info["unexpected_keys"])
        report.mismatched_keys = list(info["mismatched_keys"])
        setattr(model, REPORT_ATTRIBUTE, report)
        return model, info

    def _complete(self, model: nn.Module, reader: Reader, report: LoadReport) -> None:
        """Turn every description in `model` into a parameter or buffer that holds its values."""
        with self._ranks.agreed(f"{report.name}: planning") as digest, report.phase("plan"):
            placement = self._placement(model, report)
            targets = _plan(model, placement, report)
            digest.append(_digest(model, targets))
        with self._ranks.agreed(f"{report.name}: reading"), report.phase("read"):
            total = sum(plan.needed_bytes for target in targets for plan in target.plans)
            with self._bar(total) as bar:
                reader.on_bytes = bar
                _read_buffers(model, reader, placement, report)
                _read_parameters(targets, reader, placement, report)
                reader.finish()
                placement.settle()
        report.needed_bytes += total
        if self._stage == 3:
            report.persistent_parameters, report.persistent_elements = persistent(report.ds_config, model)

    def _kept_range(self, numel: int) -> FlatRange:
        """Return what this rank may need of a parameter that is initialised, before partitions are known."""
        secondary = self._ds_config["zero_optimization"].get("zero_hpz_partition_size", 1)
        if self._stage < 3 or secondary != 1 or self._partition is not None:
            return FlatRange(0, numel)
        return partition_range(numel, self._ranks.rank, self._ranks.world_size)

    def _placement(self, model: nn.Module, report: LoadReport) -> _Placement:
        precision = precision_of(self._ds_config, absent="disabled")
        config = getattr(model, "config", None)
        report.ds_config = resolve_auto(
            self._ds_config,
            world_size=self._ranks.world_size,
            hidden_size=hidden_size_of(config),
            precision=precision,
        )
        if self._stage < 3:
            return _Whole(torch.device("cpu"))
        quantizer = getattr(model, "hf_quantizer", None)
        if quantizer is not None:
            pretrained.refuse_quantized(quantizer, {})
        if self._partition is None:
            mark({"": model})
            return _Partitioned(report.ds_config, model, self._ranks)
        chosen = choose(model, self._partition, must_match=self._must_match)
        check_ties(model, chosen)
        mark(chosen)
        return _Partial(report.ds_config, model, self._ranks, chosen_parameters(chosen))

    def _reader(self) -> Reader:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self._ranks.world_size))
        return Reader(num_threads=max(1, min(MAX_THREADS, (os.cpu_count() or 1) // max(1, local_ranks))))

    @contextlib.contextmanager
    def _bar(self, total: int) -> Iterator[Callable[[int], object]]:
        shown = self._progress if self._progress is not None else sys.stderr.isatty()
        with tqdm(
            total=total,
            desc="Loading partitions",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=not shown or self._ranks.rank != 0,
            delay=0 if self._progress else PROGRESS_DELAY_S,
        ) as bar:
            yield bar.update

    @contextlib.contextmanager
    def _same_random_numbers(self) -> Iterator[None]:
        """Give every rank the random state of rank 0, so that missing keys are initialised equally on all ranks."""
        if self._ranks.world_size == 1:
            yield
            return
        own = torch.get_rng_state()
        common = self._ranks.broadcast_object(own, src=0)
        torch.set_rng_state(common)
        try:
            yield
        finally:
            if not torch.equal(own, common):
                torch.set_rng_state(own)


def _storage_dtype(dtype: str | torch.dtype | None, precision: Precision, *, must_agree: bool) -> torch.dtype:
    engine = _torch_dtype(precision.value)
    if dtype in (None, "auto"):
        return engine
    asked = dtype if isinstance(dtype, torch.dtype) else _torch_dtype(str(dtype))
    if must_agree and asked != engine:
        raise ConfigError(
            f"dtype {asked} contradicts the ds_config, under which DeepSpeed runs in {engine}; "
            "drop dtype, or change bf16.enabled and fp16.enabled"
        )
    return asked


def _torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype {name!r} is not a torch dtype; use 'auto' or one such as 'bfloat16'")
    return found


def _plan(model: nn.Module, placement: _Placement, report: LoadReport) -> list[_Target]:
    """Plan every parameter of `model` that has no partition yet; nothing is read or allocated."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    parameters: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not is_partitioned(parameter):
                places.setdefault(id(parameter), []).append((module, name))
                parameters.setdefault(id(parameter), (f"{prefix}.{name}" if prefix else name, parameter))
    targets = []
    for key, (name, parameter) in parameters.items():
        dtype = placement.dtype_of(parameter)
        expression = _described(name, parameter)
        if expression.dtype != dtype:
            report.recast_parameters.append(name)
            if isinstance(expression, Cast):  # the loader's own: what the file holds is cast once, as stock does
                expression = expression.part
        plans = [plan_target(name, cast(expression, dtype), span) for span in placement.ranges(parameter)]
        report.slow_paths += _slow_paths(name, parameter, expression, plans)
        targets.append(_Target(parameter, dtype, places[key], plans, name))
    return sorted(targets, key=_first_byte)


def _described(name: str, parameter: nn.Parameter) -> Expression:
    if isinstance(parameter, SymbolicTensor):
        return kept_of(parameter) or parameter.expression
    if parameter.is_meta:
        raise UnsupportedError(f"{name}: transformers gave it no value, neither from the files nor by initialising it")
    return held(parameter)


def _slow_paths(
    name: str, parameter: nn.Parameter, expression: Expression, plans: list[TargetPlan]
) -> Iterator[SlowPath]:
    """Yield why, and at what cost, a parameter is not read straight into its partition."""
    if isinstance(parameter, SymbolicTensor) and kept_of(parameter) is not None:
        nbytes = parameter.numel() * parameter.dtype.itemsize
        yield SlowPath(name, "initialised on this rank: not in the checkpoint", nbytes)
    for leaf in leaves(expression):
        if isinstance(leaf, Computed):
            nbytes = sum(numel(part) * part.dtype.itemsize for part in leaf.inputs)
            yield SlowPath(name, f"{leaf.operation} ran on whole tensors", nbytes)
    gathered = [over for plan in plans for copy in plan.copies if (over := gathered_nbytes(copy)) is not None]
    if gathered:
        yield SlowPath(name, "gathered from scattered bytes", sum(gathered))


def _first_byte(target: _Target) -> tuple[str, int, str]:
    """Sort key: files are read front to back."""
    for plan in target.plans:
        for copy in plan.copies:
            if isinstance(copy.leaf, Source):
                return copy.leaf.path, copy.leaf.start, target.name
    return "", 0, target.name


def _digest(model: nn.Module, targets: list[_Target]) -> str:
    """Describe the whole model, not this rank's part: ranks that disagree here hold different files."""
    lines = [_line(target.name, target.parameter) for target in sorted(targets, key=lambda target: target.name)]
    return plan_digest(lines + [_line(name, buffer) for name, buffer in model.named_buffers()])


def _line(name: str, tensor: torch.Tensor) -> str:
    parts = [f"{name} {tuple(tensor.shape)} {tensor.dtype}"]
    if not isinstance(tensor, SymbolicTensor):
        return f"{parts[0]}; in memory"
    if kept_of(tensor) is not None:
        return f"{parts[0]}; initialised"
    for leaf in leaves(tensor.expression):
        parts.append(type(leaf).__name__)
        if isinstance(leaf, Source):
            parts.append(f"{os.path.basename(leaf.path)} {leaf.name} {leaf.start} {leaf.shape} {leaf.dtype}")
    return "; ".join(parts)


def _read_parameters(targets: list[_Target], reader: Reader, placement: _Placement, report: LoadReport) -> None:
    """Replace each parameter by one with memory of its own and start filling it."""
    for target in _consumed(targets):
        if placement.is_full:
            reader.finish()
            placement.settle()
        made, destinations = placement.make(target.parameter, target.dtype)
        for plan, destination in zip(target.plans, destinations, strict=True):
            reader.fill(plan.copies, destination.tensor[: plan.flat_range.numel])
            if isinstance(placement, _Partial) and not is_partitioned(made):
                report.whole_bytes += destination.tensor.nbytes
            else:
                report.partition_bytes += destination.tensor.nbytes
        hf.copy_marks(target.parameter, made)
        for module, name in target.places:
            setattr(module, name, made)
        if isinstance(target.parameter, SymbolicTensor):
            forget(target.parameter)
        report.num_parameters += 1
        report.num_elements += target.parameter.numel()
        if target.dtype.is_floating_point:
            report.dtype = str(target.dtype)
        report.sample_memory()
    report.total_partition_bytes = report.partition_bytes * report.world_size


def _consumed(targets: list[_Target]) -> Iterator[_Target]:
    """Yield the targets and forget them: what a missing parameter was initialised with goes with it."""
    targets.reverse()
    while targets:
        yield targets.pop()


def _read_buffers(model: nn.Module, reader: Reader, placement: _Placement, report: LoadReport) -> None:
    """Read the symbolic buffers whole, as an ordinary load holds them, and move all to where DeepSpeed runs.

    Those that DeepSpeed keeps in fp32 are read in fp32: upcasting them later would not give back what a cast took.
    """
    fp32 = {id(buffer) for buffer in placement.fp32_buffers(model)}
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            whole = buffer
            if isinstance(buffer, SymbolicTensor):
                expression = _without_cast(buffer.expression) if id(buffer) in fp32 else buffer.expression
                whole = reader.read_whole(expression)
                sources = [leaf for leaf in leaves(expression) if isinstance(leaf, Source)]
                report.needed_bytes += sum(numel(leaf) * leaf.dtype.itemsize for leaf in sources)
            if id(buffer) in fp32:
                whole = whole.float()
            if not whole.is_meta:
                whole = whole.to(placement.device)
            if whole is not buffer:
                setattr(module, name, whole)


def _without_cast(expression: Expression) -> Expression:
    while isinstance(expression, Cast):
        expression = expression.part
    return expression
