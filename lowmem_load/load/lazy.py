"""lazy: a model whose weights are read when somebody looks at them, and then are ordinary ones; in a plain process."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lowmem_load.distributed import environment
from lowmem_load.distributed.steps import Alone
from lowmem_load.engines.mesh import local_tensor, made_real
from lowmem_load.engines.sharded_target import Unfilled
from lowmem_load.engines.zero3_target import TargetMaker, zero_init_disabled
from lowmem_load.errors import UnsupportedError
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import Part, fill, read_whole
from lowmem_load.load.describe import Described, describe
from lowmem_load.load.execute import execute
from lowmem_load.load.load import MAX_THREADS, REPORT_ATTRIBUTE, LoadedModel
from lowmem_load.load.make_plan import PlannedModel, make_plan
from lowmem_load.load.report import LoadReport, OnLoad
from lowmem_load.load.request import Request, agree_on_request, refuse_placing, stage_3
from lowmem_load.locks import ForkedLock
from lowmem_load.models.active import load_lock, on_host, transformers_models
from lowmem_load.models.loader import Call
from lowmem_load.models.saver import OURS, default_shard_size
from lowmem_load.phases import no_callback
from lowmem_load.planning.expression import Expression, Source, leaves, substituted
from lowmem_load.planning.load_plan import Costs, TargetPlan
from lowmem_load.planning.regions import FlatRange
from lowmem_load.renamed import renamed_keywords
from lowmem_load.symbolic.initialise import SharedValue
from lowmem_load.symbolic.lazy import (
    KEEPING,
    LazyTensor,
    assigned_data_is_real,
    keep,
    normal_tensors,
    replace_in_place,
    settle,
    values_of,
)
from lowmem_load.symbolic.tensor import SymbolicTensor
from lowmem_load.weights_out.folder import refuse_url
from lowmem_load.weights_out.save import save_by

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

    Memory: the modules and buffers; later the weights that were read, and 8 MiB for each of at most 4 threads.

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
    request = Request(name, auto_class, from_pretrained_kwargs.pop("dtype", None), from_pretrained_kwargs)
    checked = agree_on_request(Alone(), lambda: request, stream=not download)

    def load(call: Call) -> LoadedModel:
        return describe_lazily(call, Executor(num_threads=min(MAX_THREADS, environment.cores(1))))

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
    """Return the lazy model of a call of `from_pretrained`, and the loading info. Local."""
    report = report or LoadReport(call.name)
    try:
        with zero_init_disabled(), on_host():
            with report.phase("describe"):
                settings, is_quiet = stage_3(torch.float32, 1), report.rank != 0
                described = describe(call, settings, make_target, executor, holds_values=True, is_quiet=is_quiet)
            with report.phase("plan"):
                planned = make_plan(described, 0)
            report.take_plan(planned.plan, {})
            hand_out(described, planned, LazyReader(executor, described, report), on_load)
    except BaseException as error:
        executor.__exit__(type(error), error, None)
        raise
    return described.model, described.info


# -- a described model becomes a lazy one -----------------------------------------------------------------------------


class LazyReader:
    """Reads for the parameters of one lazy model, and keeps its report.

    Any number of threads may use it; they take turns. Processes that are forked off have threads of their own.
    `leaves` are those of the expressions that the load has given the parameters, by id.

    Raises CheckpointError if a file cannot be read, or has changed since the load: files are compared after each read.

    [Note: whose files] A weight may come to be made of weights of other lazy models, and outlive these and their
    folders. So its sources refer to what has their files open, which are closed with the last of them.
    """

    def __init__(self, executor: Executor, described: Described, report: LoadReport) -> None:
        self.executor, self.name, self.report = executor, described.name, report
        self.leaves: dict[int, Expression] = {}
        self._lock, self._process = ForkedLock(), os.getpid()
        executor.sources.expect(described.files)
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


def reader_of(tensor: LazyTensor) -> LazyReader:
    """Return what reads a lazy tensor."""
    reader = getattr(tensor.read_now, "__self__", None)
    assert isinstance(reader, LazyReader)  # `hand_out` made the tensor that this one comes from
    return reader


class _LazyParameters(Unfilled):
    """Parameters that know what they are made of, and are read when somebody looks at them. A `Target`."""

    def __init__(self, reader: LazyReader) -> None:
        self._reader = reader
        self._originals: list[Expression] = []  # kept: `_bound` knows their leaves by id
        self._bound: dict[int, Expression] = {}

    def make(
        self,
        plan: TargetPlan,
        parameter: nn.Parameter,
        wait: Callable[[], None],  # noqa: ARG002
    ) -> tuple[nn.Parameter, list[torch.Tensor]]:
        """See `Target`. What is in memory already stays there."""
        made, empty = parameter, [torch.empty(0, dtype=plan.dtype, device="cpu")]
        if isinstance(parameter, SymbolicTensor):
            self._originals.append(parameter.expression)
            for leaf in leaves(parameter.expression):
                if isinstance(leaf, Source):  # see [Note: whose files]
                    self._bound.setdefault(id(leaf), replace(leaf, files=self._reader.executor.sources))
            expression = substituted(parameter.expression, self._bound)
            self._reader.leaves |= {id(leaf): leaf for leaf in leaves(expression)}
            with normal_tensors():
                made = nn.Parameter(LazyTensor(expression, self._reader.now), parameter.requires_grad)
        return made, empty


def hand_out(described: Described, planned: PlannedModel, reader: LazyReader, on_load: OnLoad | None) -> None:
    """Give a described model lazy parameters and ordinary buffers. Their reader is there as long as one of them is.

    A forward reads all parameters below its module first. `on_load` is called with the report before the first forward
    of the model, or when it has been filled.
    """
    execute(planned, _LazyParameters(reader), reader.executor)
    described.constructor.finish(described.model, described.target.device)
    for module in described.model.modules():
        setattr(module, _WAS_LAZY, True)
        module.register_forward_pre_hook(_read_before_forward)
        if transformers_models(module) == [module]:
            ordinary: Any = module.save_pretrained  # diffusers passes what its signature names
            vars(module)["save_pretrained"] = functools.update_wrapper(functools.partial(_save, module), ordinary)
    setattr(described.model, REPORT_ATTRIBUTE, reader.report)
    if on_load is not None:
        _ENDS[described.model] = functools.partial(on_load, reader.report)


def was_lazy(model: nn.Module) -> bool:
    """Return whether a part of a model was handed out lazy. All ranks agree, whatever each has looked at."""
    return any(getattr(module, _WAS_LAZY, False) for module in model.modules())


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
    """Take back what `hand_out` has put on the modules of a model whose parameters are ordinary, and call `on_load`."""
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
    if not args and kwargs.keys().isdisjoint(OURS):
        options = {"max_shard_size": kwargs.get("max_shard_size", default_shard_size()), "dtype": None}
        with contextlib.suppress(UnsupportedError):
            return save_by(Alone(), model, save_directory, options, kwargs)
    refuse_url(save_directory)
    read_parameters(model)
    return type(model).save_pretrained(model, save_directory, *args, **kwargs)
