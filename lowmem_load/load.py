"""The phases of a load, in order: describe -> plan -> agree -> read -> agree -> report."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from tqdm import tqdm

from . import hf
from .config import hidden_size_of, read_ds_config, resolve_auto, zero_stage
from .distributed import DistributedInterface
from .errors import ConfigError, UnsupportedError
from .expression import Cast, Computed, Expression, Held, Source, cast, held, leaves, numel
from .partial import Partition, check_ties, choices_of, choose, chosen_parameters, mark
from .plan import FlatRange, TargetPlan, partition_range, plan_digest, plan_target
from .precision import Precision, precision_of
from .reader import Reader
from .report import LoadReport, SlowPath, host_memory
from .symbolic import Scratch, SymbolicTensor, forget, kept_of
from .zero3 import Destination, Partitioner, is_partitioned

MAX_THREADS = 4
"""Reads in flight per rank. More compete for the same disk and page tables; transformers found 16 slower than 4."""

REPORT_ATTRIBUTE = "lowmem_load_report"
"""Where a model keeps its `LoadReport`; `load_report(model)` finds it."""

PROGRESS_DELAY_S = 3.0
"""Seconds before the progress bar appears: short loads stay quiet."""


class _Placement(Protocol):
    """Where parameters go: ZeRO-3 partitions, or whole on every rank."""

    device: torch.device

    def dtype_of(self, parameter: torch.Tensor) -> torch.dtype: ...

    def ranges(self, parameter: torch.Tensor) -> list[FlatRange]: ...

    def make(self, parameter: nn.Parameter, dtype: torch.dtype) -> tuple[nn.Parameter, list[Destination]]: ...

    def fp32_buffers(self, model: nn.Module, /) -> list[torch.Tensor]: ...


class _Partitioned:
    """Every parameter becomes a ZeRO-3 parameter in the dtype in which DeepSpeed will run."""

    def __init__(self, ds_config: Mapping[str, Any], model: nn.Module) -> None:
        self._partitioner = Partitioner(ds_config)
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


class _Partial:
    """Parameters of the chosen modules become ZeRO-3 parameters; the others stay whole on the same device."""

    def __init__(self, ds_config: Mapping[str, Any], model: nn.Module, chosen: set[int]) -> None:
        self._chosen = chosen
        self._partitioned = _Partitioned(ds_config, model)
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
    distributed = DistributedInterface()
    kwargs = dict(from_pretrained_kwargs)
    with distributed.agreed("checking the arguments"):
        config_dict = read_ds_config(ds_config)
        stage = zero_stage(config_dict)
        precision = precision_of(config_dict, absent="disabled")
        if partition is not None:
            if stage != 3:
                raise ConfigError(f"partition needs ZeRO stage 3, the ds_config has stage {stage}; drop partition")
            choices_of(partition)
        kwargs["dtype"] = _storage_dtype(dtype, precision, must_agree=stage == 3 and partition is None)
        hf.check_name(name, kwargs.get("subfolder", ""))
        config = hf.model_config(name, kwargs)
        cls = hf.model_class(auto_class, config, bool(kwargs.get("trust_remote_code")))
        if stage == 3:
            if kwargs.get("device_map") is not None:
                raise ConfigError("device_map and ZeRO-3 both place parameters; remove device_map")
            hf.refuse_quantized(config, kwargs)
            hf.check_weights(name, kwargs.get("subfolder", ""), kwargs.get("use_safetensors"))
        resolve_auto(
            config_dict, world_size=distributed.world_size, hidden_size=hidden_size_of(config), precision=precision
        )
    with _streaming(ds_config, progress, partition, must_match=True):
        return cls.from_pretrained(name, **kwargs)


@contextlib.contextmanager
def streaming(ds_config: Any, *, progress: bool | None = None, partition: Partition | None = None) -> Iterator[None]:
    """Inside, any `from_pretrained` of a transformers model loads as `load_model` does, whoever calls it.

    Models keep the dtype that the caller asked for under stages 0 to 2; under stage 3 the ds_config decides, as it
    does with stock ZeRO-3. On exit, also after an exception, everything is as it was before.

    Args:
        ds_config: as for `load_model`.
        progress: as for `load_model`.
        partition: as for `load_model`, applied to each model that is loaded inside; one in which it chooses no
            module stays whole.

    Raises:
        ConfigError: ds_config cannot be used.
    """
    with _streaming(ds_config, progress, partition, must_match=False):
        yield


@contextlib.contextmanager
def _streaming(
    ds_config: Any, progress: bool | None, partition: Partition | None, *, must_match: bool
) -> Iterator[None]:
    distributed = DistributedInterface()
    with distributed.agreed("checking the ds_config"):
        config_dict = read_ds_config(ds_config)
        zero_stage(config_dict)
        precision_of(config_dict, absent="disabled")
        if partition is not None:
            choices_of(partition)
    stream = _Stream(config_dict, distributed, progress, partition, must_match)
    with hf.deepspeed_config(config_dict), hf.intercepted(stream.load):
        yield


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
        distributed: DistributedInterface,
        progress: bool | None,
        partition: Partition | None,
        must_match: bool,
    ) -> None:
        self._partition, self._must_match = partition, must_match
        self._ds_config = ds_config
        self._distributed = distributed
        self._progress = progress
        self._stage = zero_stage(ds_config)

    def load(self, call: hf.Call) -> tuple[nn.Module, dict[str, Any]]:
        if self._stage < 3 and (call.kwargs.get("device_map") or call.kwargs.get("quantization_config")):
            return call.run()
        memory = host_memory()
        report = LoadReport(call.name, start_memory=memory, peak_memory=memory)
        report.rank, report.world_size = self._distributed.rank, self._distributed.world_size
        with self._same_random_numbers(), self._reader() as reader:
            with self._distributed.agreed(f"{call.name}: describing the model"), report.phase("describe"):
                model, info = call.describe(
                    reader.read_whole,
                    Scratch(reader.read_whole, self._kept_range),
                    lambda base: self._complete(base, reader, report),
                )
            self._complete(model, reader, report)
            report.read_bytes, report.num_reads = reader.stats.read_bytes, reader.stats.num_reads
        report.missing_keys = sorted(info["missing_keys"])
        report.unexpected_keys = sorted(info["unexpected_keys"])
        report.mismatched_keys = list(info["mismatched_keys"])
        setattr(model, REPORT_ATTRIBUTE, report)
        return model, info

    def _complete(self, model: nn.Module, reader: Reader, report: LoadReport) -> None:
        """Turn every description in `model` into a parameter or buffer that holds its values."""
        with self._distributed.agreed(f"{report.name}: planning") as digest, report.phase("plan"):
            placement = self._placement(model, report)
            targets = _plan(model, placement, report)
            digest.append(_digest(targets))
        with self._distributed.agreed(f"{report.name}: reading"), report.phase("read"):
            total = sum(plan.needed_bytes for target in targets for plan in target.plans)
            with self._bar(total) as bar:
                reader.on_bytes = bar
                _read_buffers(model, reader, placement, report)
                _read_parameters(targets, reader, placement, report)
                reader.finish()
        report.needed_bytes += total

    def _kept_range(self, numel: int) -> FlatRange:
        """Return what this rank may need of a parameter that is initialised, before partitions are known."""
        secondary = self._ds_config["zero_optimization"].get("zero_hpz_partition_size", 1)
        if self._stage < 3 or secondary != 1 or self._partition is not None:
            return FlatRange(0, numel)
        return partition_range(numel, self._distributed.rank, self._distributed.world_size)

    def _placement(self, model: nn.Module, report: LoadReport) -> _Placement:
        precision = precision_of(self._ds_config, absent="disabled")
        config = getattr(model, "config", None)
        report.ds_config = resolve_auto(
            self._ds_config,
            world_size=self._distributed.world_size,
            hidden_size=hidden_size_of(config),
            precision=precision,
        )
        if self._stage < 3:
            return _Whole(torch.device("cpu"))
        quantizer = getattr(model, "hf_quantizer", None)
        if quantizer is not None:
            hf.refuse_quantized(quantizer, {})
        if self._partition is None:
            mark({"": model})
            return _Partitioned(report.ds_config, model)
        chosen = choose(model, self._partition, must_match=self._must_match)
        check_ties(model, chosen)
        mark(chosen)
        return _Partial(report.ds_config, model, chosen_parameters(chosen))

    def _reader(self) -> Reader:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self._distributed.world_size))
        return Reader(num_threads=max(1, min(MAX_THREADS, (os.cpu_count() or 1) // max(1, local_ranks))))

    @contextlib.contextmanager
    def _bar(self, total: int) -> Iterator[Callable[[int], None]]:
        shown = self._progress if self._progress is not None else sys.stderr.isatty()
        with tqdm(
            total=total,
            desc="Loading partitions",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=not shown or self._distributed.rank != 0,
            delay=0 if self._progress else PROGRESS_DELAY_S,
        ) as bar:
            yield lambda num_bytes: _advance(bar, num_bytes)

    @contextlib.contextmanager
    def _same_random_numbers(self) -> Iterator[None]:
        """Give every rank the random state of rank 0, so that missing keys are initialised equally on all ranks."""
        if self._distributed.world_size == 1:
            yield
            return
        own = torch.get_rng_state()
        torch.set_rng_state(self._distributed.broadcast_object(own, src=0))
        try:
            yield
        finally:
            if self._distributed.rank != 0:
                torch.set_rng_state(own)


def _advance(bar: Any, num_bytes: int) -> None:
    bar.update(num_bytes)


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
        plans = [plan_target(name, cast(expression, dtype), span) for span in placement.ranges(parameter)]
        _note_slow_path(name, parameter, expression, report)
        targets.append(_Target(parameter, dtype, places[key], plans, name))
    return sorted(targets, key=_first_byte)


def _described(name: str, parameter: nn.Parameter) -> Expression:
    if isinstance(parameter, SymbolicTensor):
        return kept_of(parameter) or parameter.expression
    if parameter.is_meta:
        raise UnsupportedError(f"{name}: transformers gave it no value, neither from the files nor by initialising it")
    return held(parameter)


def _note_slow_path(name: str, parameter: nn.Parameter, expression: Expression, report: LoadReport) -> None:
    if isinstance(expression, Held):
        nbytes = parameter.numel() * parameter.dtype.itemsize
        report.slow_paths.append(SlowPath(name, "initialised on this rank: not in the checkpoint", nbytes))
        return
    for leaf in leaves(expression):
        if isinstance(leaf, Computed):
            nbytes = sum(numel(part) * part.dtype.itemsize for part in leaf.inputs)
            report.slow_paths.append(SlowPath(name, f"{leaf.operation} ran on whole tensors", nbytes))


def _first_byte(target: _Target) -> tuple[str, int, str]:
    """Sort key: files are read front to back."""
    sources = [copy for plan in target.plans for copy in plan.copies if isinstance(copy.leaf, Source)]
    if not sources or not isinstance(sources[0].leaf, Source):
        return "", 0, target.name
    return sources[0].leaf.path, sources[0].leaf.start, target.name


def _digest(targets: list[_Target]) -> str:
    """Describe the whole model, not this rank's part: ranks that disagree here hold different files."""
    lines = []
    for target in sorted(targets, key=lambda target: target.name):
        parts = [f"{target.name} {tuple(target.parameter.shape)} {target.dtype}"]
        if isinstance(target.parameter, SymbolicTensor):
            for leaf in leaves(target.parameter.expression):
                if isinstance(leaf, Source):
                    parts.append(f"{os.path.basename(leaf.path)} {leaf.name} {leaf.start} {leaf.shape} {leaf.dtype}")
        lines.append("; ".join(parts))
    return plan_digest(lines)


def _read_parameters(targets: list[_Target], reader: Reader, placement: _Placement, report: LoadReport) -> None:
    """Replace each parameter by one with memory of its own and start filling it."""
    for target in _consumed(targets):
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
