"""First stage: a model whose parameters are expressions. Reads headers, and what transformers must know at once."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowmem_load.config.settings import Settings
from lowmem_load.engines.target import Target
from lowmem_load.engines.zero3_target import TargetMaker, refuse_partitioned
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import read_whole
from lowmem_load.models.loader import Call, TransformersCall
from lowmem_load.models.model_folder import distributed_folder
from lowmem_load.planning.expression import Expression, numel
from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.regions import FlatRange, bounding_range
from lowmem_load.symbolic.constructor import Constructor, Context, Keeps
from lowmem_load.symbolic.initialise import Initialiser, ReadNow
from lowmem_load.symbolic.tensor import SymbolicTensor
from lowmem_load.training_checkpoints.open_model import open_model


@dataclass(slots=True)
class Described:
    """A model whose parameters are expressions."""

    name: str  # of the checkpoint, for messages
    model: nn.Module
    info: dict[str, Any]  # the loading info: missing, unexpected and mismatched keys
    settings: Settings  # resolved for this model
    target: Target
    files: tuple[PlannedFile, ...]  # of the checkpoint that were opened
    read_to_describe: tuple[tuple[str, int], ...]  # see `LoadPlan`
    constructor: Constructor  # with the values that the model's constructor has computed


def describe(
    call: Call,
    settings: Settings,
    make_target: TargetMaker,
    executor: Executor,
    *,
    holds_values: bool,
    weights: str | None = None,
    is_quiet: bool = False,
) -> Described:
    """Describe what a call would load, with `is_quiet` without the report of its loader. Local.

    Missing parameters are initialized with `holds_values`, else only noted. `weights` is the folder of a training
    checkpoint, whose weights take the place of those that the call names.
    """
    if weights is None and isinstance(call, TransformersCall):  # transformers would read all of it by itself
        weights = distributed_folder(call.path, call.kwargs.get("subfolder") or "")
    reads = _Reads(executor)
    prepared: dict[int, tuple[nn.Module, Settings, Target]] = {}

    def prepare(model: nn.Module) -> tuple[nn.Module, Settings, Target]:
        # Called while the model is built, and again for the result. A model's __init__ may load another model.
        if id(model) not in prepared:
            resolved = settings.for_model(getattr(model, "config", None))
            prepared[id(model)] = model, resolved, make_target(resolved, model)
        return prepared[id(model)]

    def keeps_of(model: nn.Module) -> Keeps:
        try:
            layout = prepare(model)[2].layout
        except ConfigError:  # another model, which this one's __init__ loads, need not fit the settings
            return lambda parameter: FlatRange(0, parameter.numel())
        name_of = {id(parameter): name for name, parameter in nn.Module.named_parameters(model)}

        def kept(parameter: torch.Tensor) -> FlatRange:
            """Return the smallest flat range with all regions that this rank has of a parameter."""
            regions = layout(name_of[id(parameter)], parameter).regions
            ranges = [bounding_range(region, tuple(parameter.shape)) for region in regions]
            return FlatRange(min(part.start for part in ranges), max(part.end for part in ranges))

        return kept

    initialiser = Initialiser(reads.now, None if holds_values else reads.note)
    context = Context(
        reads.now, initialiser, keeps_of, refuse_partitioned, executor.sources.opened, executor.tasks.check
    )
    context.is_partitioned, context.is_quiet = settings.stage == 3, is_quiet
    context.compares_values = holds_values and settings.world_size > 1
    files: tuple[PlannedFile, ...] = ()
    if weights is not None:
        context.weights, files = _training_weights(weights, executor, reads.now)
    model, info = call.describe(context)
    if context.compares_values and context.is_partitioned:
        context.constructor.note_parameters(model)  # of state_dict=, or that the caller has filled
    files += tuple(PlannedFile(file.path, file.nbytes, file.digest, file.version) for file in context.files.values())
    _, resolved, target = prepare(model)
    return Described(call.name, model, info, resolved, target, files, tuple(reads.nbytes.items()), context.constructor)


def _training_weights(
    folder: str, executor: Executor, read_now: ReadNow
) -> tuple[dict[str, torch.Tensor], tuple[PlannedFile, ...]]:
    """Return the weights of a training checkpoint by name, and its files."""
    model = open_model(folder, executor).without_wrappers()
    if model.adapter is not None:
        raise UnsupportedError(
            f"{model.folder}: contains an adapter; make a folder of it by `lowmem-load consolidate`, and load that"
        )
    values = {id(tensor): SymbolicTensor(tensor.whole, read_now) for tensor in model.tensors.values()}
    tensors = {name: values[id(tensor)].detach() for name, tensor in model.tensors.items()}  # tied names share a value
    return tensors, model.files


class _Reads:
    def __init__(self, executor: Executor) -> None:
        self.nbytes: dict[str, int] = {}  # that were read, or would be, by reason
        self._executor = executor

    def now(self, expression: Expression, reason: str) -> torch.Tensor:
        before = self._executor.stats.read_bytes
        whole = read_whole(self._executor, expression)
        self._count(reason, self._executor.stats.read_bytes - before)
        return whole

    def note(self, expression: Expression, reason: str) -> torch.Tensor:
        """Count what `now` would read; return a meta tensor."""
        planner = Planner()
        fill = planner.plan_fill(reason, expression, FlatRange(0, numel(expression)))
        self._count(reason, planner.costs([fill]).read_bytes)
        return torch.empty(expression.shape, dtype=expression.dtype, device="meta")

    def _count(self, reason: str, nbytes: int) -> None:
        if nbytes > 0:
            self.nbytes[reason] = self.nbytes.get(reason, 0) + nbytes


def random_state_text() -> str:
    """Return torch's random state as text, for other ranks."""
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


@contextlib.contextmanager
def random_state_of(common: str) -> Iterator[None]:
    """Give this rank the random state of rank 0, so that missing keys are initialized equally on all ranks.

    If its own is another one, it goes on from there as if it had drawn nothing; after the default load it would have.
    """
    if not common or random_state_text() == common:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(common)), dtype=torch.uint8))
        yield
