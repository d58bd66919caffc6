"""lazy: a model whose weights are read when somebody looks at them, in a plain process."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from lowmem_load.distributed import environment
from lowmem_load.engines.sharded_target import Unfilled
from lowmem_load.engines.zero3_target import TargetMaker, zero_init_disabled
from lowmem_load.files.executor import Executor
from lowmem_load.load.companions import combine_companions
from lowmem_load.load.describe import check_described, describe
from lowmem_load.load.lazy_model import LazyReader, hand_out
from lowmem_load.load.load import MAX_THREADS
from lowmem_load.load.make_plan import make_plan
from lowmem_load.load.report import LoadReport, OnLoad
from lowmem_load.load.request import name_text, refuse_placing, stage_3
from lowmem_load.models import diffusion, loader, model_class, model_folder
from lowmem_load.models.active import load_lock, on_host
from lowmem_load.models.loader import Call
from lowmem_load.models.model_folder import find_folder, rename_loaded


def lazy(
    name: str | os.PathLike[str],
    *,
    auto_class: str | type | None = None,
    stream: bool = False,
    **from_pretrained_kwargs: Any,
) -> Any:
    """Return a model on the CPU that costs its module objects. Weights are read when somebody looks at them.

    It is the model that `from_pretrained` returns with the same keywords: any code may look at its parameters, change
    them, copy, cast, move, tie, resize, shard or save them, and gets the same values. Slices read what they hold: on
    such a model `torch.distributed.fsdp.fully_shard` reads the shards of its rank. A forward reads the parameters
    first, which are then ordinary ones. Parameters keep their identity.

    `save_pretrained` holds one tensor at a time, and pickles hold the values. `.to(device)` of a model that is not
    read yet reads nothing: the forward reads to the device.

    The files are those that were there when the model was made, until nobody refers to a weight that is made of them:
    the folder may be deleted or replaced. Other arguments are those of `load_model`, without keywords of
    `from_pretrained` that place, shard or quantize (but in 4 bits).

    Local: a plain process, or one rank of many.
    Memory: the modules, buffers, and what was read to describe the model; later what looks at it holds, and a staging
        buffer of 8 MiB for each of at most 4 threads.

    Raises:
        ConfigError: an argument cannot be used.
        CheckpointError: the files cannot be used. Later: they cannot be read, or have changed.
        UnsupportedError: the weights stay quantized, other than by bitsandbytes in 4 bits.
    """
    refuse_placing(from_pretrained_kwargs, "lazy: remove {}; place, shard or quantize the model that lazy() returns")
    where, kwargs = find_folder(name_text(name), from_pretrained_kwargs, stream=stream)
    model_folder.check_name(where, kwargs.get("subfolder", ""))
    cls = diffusion.model_class(where, auto_class, kwargs)
    if cls is None:
        cls, _ = model_class.class_and_config(where, auto_class, kwargs)

    def load(call: Call) -> tuple[nn.Module, dict[str, Any]]:
        return describe_lazily(call, Executor(num_threads=min(MAX_THREADS, environment.cores(1))))[1:]

    with load_lock(), loader.intercepted(load), diffusion.intercepted(load):
        return rename_loaded(cls.from_pretrained(where, **kwargs))


def describe_lazily(
    call: Call,
    executor: Executor,
    report: LoadReport | None = None,
    *,
    make_target: TargetMaker = lambda *_: Unfilled(),
    on_load: OnLoad | None = None,
) -> tuple[LazyReader, nn.Module, dict[str, Any]]:
    """Return a reader, the lazy model of a call of `from_pretrained` that it reads for, and the loading info. Local."""
    report = report or LoadReport(call.name)
    executor.sources.keeps_all = True
    try:
        with zero_init_disabled(), on_host():
            with report.phase("describe"):
                settings, is_quiet = stage_3(torch.float32, 1), report.rank != 0
                described = describe(call, settings, make_target, executor, holds_values=True, is_quiet=is_quiet)
                check_described(described)
            with report.phase("plan"):
                planned = make_plan(described, 0)
            report.take_plan(planned.plan, {})
            combine_companions(planned, executor)
            reader = hand_out(described, planned, executor, report, on_load=on_load)
    except BaseException as error:
        executor.__exit__(type(error), error, None)
        raise
    return reader, described.model, described.info
