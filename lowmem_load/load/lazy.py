"""lazy: a model whose weights are read when something uses them, or by all ranks as it is sharded or partitioned."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowmem_load.distributed.side_group import SideGroup
from lowmem_load.distributed.steps import Alone, RankGroup
from lowmem_load.engines.mesh import local_shard, local_tensor, made_real, part_of
from lowmem_load.engines.sharded_target import Unfilled
from lowmem_load.engines.target import Made
from lowmem_load.engines.zero3_target import TargetMaker, zero_init_disabled
from lowmem_load.errors import CheckpointError, UnsupportedError, listed
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import Part, fill, name_in_files, read_whole
from lowmem_load.files.memory import naming_shortage
from lowmem_load.files.source import OpenSources
from lowmem_load.load.checks import agree_on_bytes, identify_files
from lowmem_load.load.describe import describe
from lowmem_load.load.execute import execute, reading
from lowmem_load.load.load import REPORT_ATTRIBUTE, LoadedModel, make_executor
from lowmem_load.load.make_plan import make_plan
from lowmem_load.load.report import LoadReport, OnLoad
from lowmem_load.load.request import Request, agree_on_request, refuse_placing, stage_3
from lowmem_load.locks import ForkedLock
from lowmem_load.models.active import load_lock, on_host, transformers_models
from lowmem_load.models.loader import Call
from lowmem_load.models.saver import OURS, default_shard_size
from lowmem_load.phases import computing, no_callback
from lowmem_load.planning.expression import Computed, Concat, Expression, Source, Strided, children, leaves, substituted
from lowmem_load.planning.load_plan import Costs, TargetPlan, in_common_order
from lowmem_load.planning.regions import FlatRange
from lowmem_load.renamed import renamed_keywords
from lowmem_load.symbolic.initialise import WRITTEN, SharedValue
from lowmem_load.symbolic.lazy import (
    KEEPING,
    LazyTensor,
    assigned_data_is_real,
    is_unread,
    keep,
    normal_tensors,
    replace_in_place,
    settle,
    values_of,
)
from lowmem_load.symbolic.tensor import SymbolicTensor
from lowmem_load.text import fingerprint
from lowmem_load.weights_out.buckets import in_batches
from lowmem_load.weights_out.folder import refuse_url
from lowmem_load.weights_out.save import save_by

if TYPE_CHECKING:
    from lowmem_load.engines.partition import Partitioner

BATCH_BYTES = 64 << 20
"""Bytes of changed weights that rank 0 sends at a time. A larger one goes by itself."""

_WAS_LAZY = "lowmem_load_was_lazy"
"""Attribute of the modules of a lazy model."""

_ENDS: weakref.WeakKeyDictionary[nn.Module, Callable[[], object]] = weakref.WeakKeyDictionary()
"""What is called once the parameters of a model are ordinary. A copy of the model has none."""


@renamed_keywords(stream="not download")
def lazy(
    name: str | os.PathLike[str],
    *,
    auto_class: str | type | None = None,
    download: bool = True,
    **from_pretrained_kwargs: Any,
) -> Any:
    """Return a model on the CPU that takes memory only for its modules. Weights are read when something uses them.

    It is the model that `from_pretrained` returns with the same keywords: any code may read its parameters, change
    them, copy, cast, move, tie, resize, shard or save them, and gets the same values. A slice reads only its own bytes,
    so `torch.distributed.fsdp.fully_shard` reads the shards of its rank. A forward pass first reads all parameters,
    which are then ordinary ones. Parameters keep their identity.

    `save_pretrained` has one tensor at a time in memory, and a pickle contains the values. `.to(device)` of a model
    that is not read yet reads nothing: the forward pass reads to the device.

    The folder may be deleted or replaced after the call, because the files stay open as long as a weight refers to
    them. Other arguments are those of `load_model`, without keywords of `from_pretrained` that place, shard or quantize
    (but in 4 bits). It needs no other ranks: call it in a plain process, or on any rank.

    Memory: the modules and buffers; later the weights that were read, and 8 MiB for each of at most
    4 threads, or 16 where files are not cached or come from an object store.

    Raises:
        ConfigError: an argument cannot be used.
        CheckpointError: the files cannot be used. Later: they cannot be read, or have changed.
        UnsupportedError: the weights stay quantized, other than by bitsandbytes in 4 bits.

    Example:
        model = lazy("Qwen/Qwen3-8B")
        print(model.lm_head.weight[:2])  # reads two rows
        model.save_pretrained("copy", max_shard_size="1GB")
    """
    refuse_placing(from_pretrained_kwargs, "lazy: remove {}; place, shard or quantize the model that lazy() returns")
    kwargs = from_pretrained_kwargs
    # transformers also takes a dict, with a dtype for each part of a composite model.
    dicts = [kwargs.pop(key) for key in ("dtype", "torch_dtype") if isinstance(kwargs.get(key), Mapping)]
    # Not None: an auto class writes that into the configuration, and then takes the dtype of the files.
    request = Request(name, auto_class, kwargs.pop("dtype", "auto"), kwargs)
    checked = agree_on_request(Alone(), lambda: request, stream=not download)
    if dicts:
        checked = checked._replace(kwargs={**checked.kwargs, "dtype": dicts[0]})

    def load(call: Call) -> LoadedModel:
        return describe_lazily(call, make_executor(call, 1))

    with load_lock():
        return checked.run(load)


def describe_lazily(
    call: Call,
    executor: Executor,
    report: LoadReport | None = None,
    *,
    make_target: TargetMaker = lambda *_: Unfilled(),
    on_load: OnLoad | None = None,
) -> LoadedModel:
    """Return the lazy model of a call of `from_pretrained`, and the loading info. Local.

    It has lazy parameters and ordinary buffers. A forward reads all parameters below its module first. `on_load` is
    called with the report before the first forward of the model, or when it has been filled.
    """
    report = report or LoadReport(call.name)
    with contextlib.ExitStack() as if_it_fails, zero_init_disabled(), on_host():
        if_it_fails.push(executor)
        with report.phase("describe"):
            settings, is_quiet = stage_3(torch.float32, 1), report.rank != 0
            described = describe(call, settings, make_target, executor, holds_values=True, is_quiet=is_quiet)
        with report.phase("plan"):
            planned = make_plan(described, 0)
        report.take_plan(planned.plan, {})
        execute(planned, _LazyParameters(LazyReader(executor, report)), executor)
        described.constructor.finish(described.model, described.target.device)
        if_it_fails.pop_all()
    for module in described.model.modules():
        setattr(module, _WAS_LAZY, True)
        module.register_forward_pre_hook(_read_before_forward)
        if transformers_models(module) == [module]:
            ordinary: Any = module.save_pretrained  # diffusers passes what its signature names
            vars(module)["save_pretrained"] = functools.update_wrapper(functools.partial(_save, module), ordinary)
    setattr(described.model, REPORT_ATTRIBUTE, report)
    if on_load is not None:
        _ENDS[described.model] = functools.partial(on_load, report)
    return described.model, described.info


# -- a described model becomes a lazy one -----------------------------------------------------------------------------


class LazyReader:
    """Reads for the parameters of one lazy model, and keeps its report.

    Any number of threads may use it; they take turns. Processes that are forked off have threads of their own.
    `leaves` are those of the expressions that the load has given the parameters, by id, without what it initialized.

    Raises CheckpointError if a file cannot be read, or has changed since the load: files are compared after each read.

    [Note: whose files] A weight may come to be made of weights of other lazy models, and outlive these and their
    folders. So its sources refer to what has their files open, which are closed with the last of them.
    """

    def __init__(self, executor: Executor, report: LoadReport) -> None:
        self.executor, self.report = executor, report
        self.leaves: dict[int, Expression] = {}
        self._lock, self._process = ForkedLock(), os.getpid()
        closing = contextlib.ExitStack()
        closing.enter_context(made_real(values_of))
        closing.enter_context(assigned_data_is_real())
        # When nobody refers to the reader any more, in any thread: it neither waits nor runs users' code.
        weakref.finalize(self, closing.close)

    def now(self, expression: Expression, _: str) -> torch.Tensor:
        """Return the value of an expression on the host."""
        with self._reading():
            return read_whole(self.executor, expression)

    def fill(self, parts: Sequence[Part], on_part: Callable[[], object] = no_callback) -> Costs:
        """Fill parts; see `files/fill.py`."""
        with self._reading():
            return fill(parts, self.executor, on_part)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock, normal_tensors():
            if self._process != os.getpid():  # its threads are in the process it came from
                self._process = os.getpid()
                self.executor.renew_tasks(1)
            yield
            stats = self.executor.stats
            self.report.read_bytes, self.report.num_reads = stats.read_bytes, stats.num_reads
            self.report.cold_files = stats.cold_files


def reader_of(tensor: LazyTensor) -> LazyReader:
    """Return what reads a lazy tensor."""
    reader = getattr(tensor.read_now, "__self__", None)
    assert isinstance(reader, LazyReader)  # `describe_lazily` made the tensor that this one comes from
    return reader


class _LazyParameters(Unfilled):
    """Parameters that know what they are made of, and are read when something uses them. A `Target`."""

    def __init__(self, reader: LazyReader) -> None:
        self._reader = reader
        self._originals: list[Expression] = []  # kept: `_bound` knows their nodes by id
        self._bound: dict[int, Expression] = {}

    def make(self, plan: TargetPlan, parameter: nn.Parameter, _: Callable[[], None], /) -> Made:
        """See `Target`. What is in memory already stays there."""
        made, empty = parameter, [torch.empty(0, dtype=plan.dtype, device="cpu")]
        if isinstance(parameter, SymbolicTensor):
            original = parameter.expression  # which is another object each time, where the parameter is a view
            self._originals.append(original)
            for leaf in leaves(original):
                if isinstance(leaf, Source):  # see [Note: whose files]
                    self._bound.setdefault(id(leaf), replace(leaf, files=self._reader.executor.sources))
            expression = substituted(original, self._bound)
            for leaf in leaves(expression):
                if not (isinstance(leaf, Computed) and leaf.operation == WRITTEN):  # each rank may have drawn others
                    self._reader.leaves[id(leaf)] = leaf
            with normal_tensors():
                made = nn.Parameter(LazyTensor(expression, self._reader.now), parameter.requires_grad)
        return made, empty


# -- parameters become ordinary --------------------------------------------------------------------------------------


@normal_tensors()
def read_parameters(module: nn.Module) -> None:
    """Read all lazy parameters of a module and below, file by file. They become ordinary parameters, in place."""
    named = ((name, local_tensor(parameter)) for name, parameter in module.named_parameters())
    lazy = {name: tensor for name, tensor in named if isinstance(tensor, LazyTensor)}
    by_reader: dict[LazyReader, dict[int, tuple[SharedValue, Part]]] = {}
    for name, tensor in lazy.items():
        value = tensor.value
        if value.memory is None and not tensor.views and tensor.is_contiguous():
            memory = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
            part = Part(name, value.expression, FlatRange(0, tensor.numel()), memory)
            by_reader.setdefault(reader_of(tensor), {})[id(value)] = value, part
    for reader, parts in by_reader.items():
        reader.fill([part for _, part in parts.values()])
        for value, part in parts.values():
            settle(value, part.memory.view(value.expression.shape))
    for tensor in lazy.values():
        replace_in_place(tensor, keep(tensor))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _read_before_forward(module: nn.Module, _: Any) -> None:
    with KEEPING:
        read_parameters(module)
    leave(module)


def leave(module: nn.Module) -> None:
    """Take back what is on the modules of a lazy model whose parameters are ordinary now, and call its `on_load`."""
    ends = []
    with KEEPING:
        for submodule in module.modules():
            hooks = submodule._forward_pre_hooks  # noqa: SLF001  a handle would not survive a deepcopy
            for key in [key for key, hook in hooks.items() if hook is _read_before_forward]:
                del hooks[key]
            saves = vars(submodule).get("save_pretrained")
            if isinstance(saves, functools.partial) and saves.func is _save:
                del submodule.save_pretrained
            if submodule in _ENDS:
                ends.append(_ENDS.pop(submodule))
    for end in ends:
        end()


def _save(model: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
    """Do what `save_pretrained` of a transformers model does, one tensor after the other, if `save_model` can do it.

    Otherwise all parameters are read first: the folder may be the one that has their files.
    """
    refuse_url(save_directory)
    if not args and kwargs.keys().isdisjoint(OURS):
        options = {"max_shard_size": kwargs.get("max_shard_size", default_shard_size()), "dtype": None}
        with contextlib.suppress(UnsupportedError):
            return save_by(Alone(), model, save_directory, options, kwargs)
    read_parameters(model)
    return type(model).save_pretrained(model, save_directory, *args, **kwargs)


# -- filled in parts: shards on the meta device, and ZeRO-3 partitions ------------------------------------------------

# What comes from files, moved and cast at most, each rank reads for itself: the elements of its part. What a script has
# made or changed comes from rank 0, as by default.


def are_lazy(model: nn.Module) -> bool:
    """Return whether each rank of the default process group has a lazy model to fill, whatever it has read. Collective.

    Programs may give weights to one rank alone, from which the default loader then sends them.
    """
    with RankGroup(None).step("looking for lazy weights", name=type(model).__name__) as step:
        step.payload = any(getattr(module, _WAS_LAZY, False) for module in model.modules())
    return all(step.payloads)


def fill_sharded(model: nn.Module, state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Give a model that is sharded on meta memory on a device, and the values of a state dict of the same names.

    Raises CheckpointError if the state dict lacks a name, or if the ranks have different weights. Collective: all ranks
    of the default process group. Memory: in addition to the shards, a staging buffer for each reading thread, and
    `BATCH_BYTES` or one tensor for what comes from rank 0.
    """
    ranks, name_of_model = RankGroup(None), type(model).__name__
    with ranks.session("filling the sharded model"), torch.no_grad():
        allocate_shards(model, device)
        shards = model.state_dict()
        with ranks.step("looking at the state dict"):
            if missing := sorted(shards.keys() - state.keys()):
                raise CheckpointError(
                    f"{name_of_model}: the state dict from which it is filled lacks {listed(missing)}. Pass the full "
                    "state dict of the same model"
                )
        unchanged = _find_unchanged(name_of_model, {name: state[name] for name in shards}, ranks)
        parts: dict[LazyReader, dict[int, Part]] = {}
        for name, tensor in unchanged.items():
            region, memory = local_shard(name, shards[name], needs_memory=True)
            part = Part(name, tensor.expression, region, memory)
            parts.setdefault(reader_of(tensor), {}).setdefault(memory.data_ptr() or id(memory), part)
        _read(name_of_model, {reader: list(own.values()) for reader, own in parts.items()}, ranks)
        _send({name: shards[name] for name in sorted(shards.keys() - unchanged.keys())}, state, ranks)
    leave(model)


def _find_unchanged(name: str, tensors: Mapping[Any, torch.Tensor], ranks: RankGroup) -> dict[Any, LazyTensor]:
    """Return those of the tensors, in order of their keys, that all ranks have as the files have them. Collective.

    Raise CheckpointError on all ranks unless these are the same tensors of equal files.
    """
    with ranks.step("finding what was changed") as step:
        lazy = {key: tensor for key, tensor in tensors.items() if isinstance(tensor, LazyTensor)}
        own = {key: tensor for key, tensor in lazy.items() if _is_of_files(tensor)}
        step.payload = [*own], [key for key, tensor in tensors.items() if key not in own and tensor.is_meta]
    if empty := step.payloads[0][1]:
        raise UnsupportedError(
            f"{name}: {listed(empty)} have no values: they are on the meta device on rank 0; make them on the CPU"
        )
    # What one rank has changed, all take from rank 0: ranks that differ in the way would wait for each other.
    unchanged = {key: own[key] for key in sorted(set(own).intersection(*(keys for keys, _ in step.payloads)))}
    parts = (leaf for tensor in unchanged.values() for leaf in leaves(tensor.expression))
    sources: list[OpenSources] = [*dict.fromkeys(leaf.files for leaf in parts if isinstance(leaf, Source))]
    with ranks.step("comparing the weights") as step:
        lines = (f"{key} {line}" for key, tensor in unchanged.items() for line in _lines(tensor.expression))
        files = [
            f"{place} {file.nbytes} {file.digest}"
            for place, opened in enumerate(sources)
            for file in in_common_order(opened.files.values())
        ]
        step.digest = {"weights that are not read yet": fingerprint(lines), "files": fingerprint(files)}
        step.payload = [identify_files(list(opened.files.values())) for opened in sources]
    for place, opened in enumerate(sources):
        ids = [of_rank[place] for of_rank in step.payloads]
        agree_on_bytes(ranks, name, list(opened.files.values()), opened, ids)
    return unchanged


def fill_partitions(partitioner: Partitioner, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Partition those of a model's parameters that are still as in the files. DeepSpeed has to partition the others.

    Returns the others, which then have memory: on the first rank with their values. They stay the same objects. Raises
    CheckpointError if the ranks have different weights. Collective: the ranks among which parameters are partitioned.
    Memory: the partitions, a staging buffer for each reading thread, and the others.
    """
    ranks = RankGroup(partitioner.group)
    lazy = {number: local for number, local in enumerate(parameters) if isinstance(local, LazyTensor)}
    with ranks.session("partitioning the model"), torch.no_grad():
        takable = {number: parameter for number, parameter in lazy.items() if partitioner.takes(parameter)}
        taken: dict[int, Any] = _find_unchanged("the model", takable, ranks)
        parts: dict[LazyReader, list[Part]] = {}

        def read() -> None:
            _read("the model", parts, ranks)
            parts.clear()

        for parameter in taken.values():
            partitioner.make_room(read)
            own, expression = parts.setdefault(reader_of(parameter), []), parameter.expression
            partitioner.convert(parameter)
            replace_in_place(parameter, torch.empty(0, dtype=parameter.dtype, device=partitioner.device))
            for region, memory in partitioner.allocate(parameter):
                own.append(Part(name_in_files(expression), expression, region, memory[: region.numel]))
        read()
        partitioner.finish()
        with ranks.step("reading what was changed"):
            for number in lazy.keys() - taken.keys():
                local = lazy[number]
                if ranks.rank == 0 or not is_unread(local):
                    replace_in_place(local, keep(local))
                else:
                    replace_in_place(local, torch.empty(local.shape, dtype=local.dtype, device=local.device))
    if partitioner.module is not None:
        leave(partitioner.module)
    return [parameter for number, parameter in enumerate(parameters) if number not in taken]


def allocate_shards(model: nn.Module, device: torch.device) -> None:
    """Do what `to_empty` does, and name a shortage of memory.

    It makes several parameters of a tied one, and keeps the strides of a buffer, whose values come in order.
    """

    def put(name: str, tensor: torch.Tensor) -> None:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, tensor)

    first: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    origins = {name: first.setdefault(id(parameter), name) for name, parameter in parameters}
    shard_bytes = sum(local_tensor(parameter).nbytes for parameter in model.parameters())
    with naming_shortage("shards of this rank", shard_bytes), torch.no_grad():
        model.to_empty(device=device)
    for name, origin in origins.items():
        if name != origin:
            put(name, model.get_parameter(origin))
    for name, buffer in list(model.named_buffers()):
        if local_tensor(buffer) is buffer and not buffer.is_contiguous():
            put(name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def _read(name: str, parts: Mapping[LazyReader, list[Part]], ranks: RankGroup) -> None:
    executors, reports = [reader.executor for reader in parts], [reader.report for reader in parts]
    needed_bytes = sum(part.memory.nbytes for own in parts.values() for part in own)
    with reading(ranks, name, executors, needed_bytes, reports, bar="Loading shards") as state:
        for reader, own in parts.items():
            report = reader.report
            with report.phase("read"):
                costs = reader.fill(own, state.on_part)
            report.needed_bytes, report.partition_bytes = costs.needed_bytes, sum(part.memory.nbytes for part in own)


def _send(shards: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], ranks: RankGroup) -> None:
    """Fill shards with the values that rank 0 has, which go through the host. Collective."""
    side = SideGroup(ranks)
    with contextlib.closing(side):
        for number, batch in enumerate(in_batches(shards, lambda name: shards[name].nbytes, BATCH_BYTES)):
            with ranks.step("reading what was changed", progress=computing()):
                if not number:
                    side.connect()
                places = [local_shard(name, shards[name], needs_memory=True) for name in batch]
                with naming_shortage("changed weights", sum(shards[name].nbytes for name in batch)):
                    whole = [
                        values_of(state[name]).to("cpu", shards[name].dtype, copy=True).contiguous()
                        if ranks.rank == 0
                        else torch.empty(shards[name].shape, dtype=shards[name].dtype, device="cpu")
                        for name in batch
                    ]
            with ranks.step("sending what was changed", progress=side.progress(computing())):
                for values in whole:
                    side.broadcast(values, 0)
                side.finish(ranks.check)
            for (grid, memory), values in zip(places, whole, strict=True):
                memory.copy_(part_of(values, grid))


def _is_of_files(tensor: LazyTensor) -> bool:
    """Return whether a tensor is what a load has described, elements perhaps moved or cast since."""
    if not is_unread(tensor):
        return False
    known = reader_of(tensor).leaves
    return all(id(leaf) in known for leaf in leaves(tensor.expression))


def _lines(expression: Expression) -> Iterator[str]:
    """Yield a line for each step from files to a tensor. Ranks that differ here would give it other values."""
    nodes = [expression]
    while nodes:
        node = nodes.pop()
        text = f"{type(node).__name__} {node.shape} {node.dtype}"
        if isinstance(node, Source):
            text += f" {node.path.rpartition('/')[2]} {node.name} {node.start}"
        elif isinstance(node, Strided):
            text += f" {node.start} {node.strides}"
        elif isinstance(node, Concat):
            text += f" {node.dim}"
        yield text
        nodes.extend(children(node))
