"""Prepares and watches each rank of a case, with the default loader and with lowmem_load.

Frameworks take a process without a GPU for a lone one, so accelerate is told the backend before they ask it; before
0.19.8 DeepSpeed gathers one parameter at a time (`benchmarks.methods.wait_for_all_gathers` says why); an op that it
would compile for minutes is left out; and torch is seeded at the first load. None of it takes part in loading a model.
What is watched: every loss that an engine is handed, and the memory of the process.

Runs in the environment of the framework. Nothing is imported before the framework imports it.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lowmem_load.integrations.switch import after_import
from tests.frameworks import stand_ins

if TYPE_CHECKING:
    from benchmarks.memory import PeakMemory

FOLDER = "FRAMEWORKS_RANKS"
"""The variable that names the folder for `rank<N>.json`; see `compare.RankResult`."""

M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES = -3, 64 * 1024  # malloc.h
"""Larger blocks go back to the kernel when they are freed, as in `tests.pipelines.pipeline`."""


def watch() -> None:
    """Have this process told and watched, if it is a rank; launchers are not."""
    if "RANK" in os.environ:
        ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        seen = _Seen()
        stood_in = stand_ins.hooks()
        after = {
            **stood_in,
            "accelerate.state": functools.partial(tell_the_backend, stood_in.get("accelerate.state")),
            "accelerate.accelerator": seen.watch_accelerators,
            "transformers.modeling_utils": seen.watch_loads,
            "deepspeed.comm.torch": _without_shm_comm,
            "deepspeed.runtime.engine": seen.watch_engines,
            "llamafactory.v1.trainers.sft_trainer": seen.watch_llamafactory_v1,
        }
        for name, act in after.items():
            after_import(name, act)


def tell_the_backend(also: Callable[[ModuleType], None] | None, module: ModuleType) -> None:
    """Have accelerate count CPU ranks: it does where it is told a backend, which no environment variable can."""
    if also is not None:
        also(module)
    ordinary = module.PartialState.__init__

    @functools.wraps(ordinary)
    def make(state: Any, cpu: bool = False, **kwargs: Any) -> None:
        cpu = cpu or stand_ins.FSDP_ON_CPU in os.environ
        ordinary(state, cpu, **{**kwargs, "backend": kwargs.get("backend") or "gloo"})

    module.PartialState.__init__ = make


def _without_shm_comm(module: ModuleType) -> None:
    """Leave out an op for all-reduces between CPU ranks, which would be compiled for each environment, in minutes."""
    module.build_shm_op = lambda: None


class _Seen:
    """What this rank has seen; written when it ends."""

    def __init__(self) -> None:
        self._sampler: PeakMemory | None = None
        self._load_bytes: int | None = None
        self._begin_s = self._load_s = 0.0
        self._losses: list[float] = []

    def watch_loads(self, module: ModuleType) -> None:
        """Start to measure memory in the first `from_pretrained` or `from_config`."""
        for name in ("from_pretrained", "_from_config"):
            self._watch_load(module.PreTrainedModel, name)

    def _watch_load(self, model_class: Any, name: str) -> None:
        ordinary = model_class.__dict__[name].__func__

        @functools.wraps(ordinary)
        def load(cls: type, *args: Any, **kwargs: Any) -> Any:
            if self._sampler is None:
                import torch

                from benchmarks.memory import PeakMemory

                torch.manual_seed(0)  # axolotl seeds after it has made adapters: they differ from run to run
                self._sampler = PeakMemory()
                self._sampler.__enter__()
                self._begin_s = time.perf_counter()
                atexit.register(self._write)
            return ordinary(cls, *args, **kwargs)

        setattr(model_class, name, classmethod(load))

    def watch_engines(self, module: ModuleType) -> None:
        """Note when the first engine is made, and what engines are handed to go back from."""
        from benchmarks.methods import wait_for_all_gathers

        wait_for_all_gathers()
        make, backward = module.DeepSpeedEngine.__init__, module.DeepSpeedEngine.backward

        @functools.wraps(make)
        def noted_make(engine: Any, *args: Any, **kwargs: Any) -> None:
            self._end_load()
            make(engine, *args, **kwargs)

        @functools.wraps(backward)
        def noted_backward(engine: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
            self._losses.append(float(loss.detach()))
            return backward(engine, loss, *args, **kwargs)

        module.DeepSpeedEngine.__init__, module.DeepSpeedEngine.backward = noted_make, noted_backward

    def watch_accelerators(self, module: ModuleType) -> None:
        """Note when the first model is prepared for FSDP, and what accelerators without an engine go back from."""
        prepare, backward = module.Accelerator.prepare, module.Accelerator.backward

        @functools.wraps(prepare)
        def noted_prepare(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            prepared = prepare(accelerator, *args, **kwargs)
            if accelerator.distributed_type == "FSDP" and any(hasattr(each, "parameters") for each in args):
                self._end_load()
            return prepared

        @functools.wraps(backward)
        def noted_backward(accelerator: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
            if accelerator.distributed_type != "DEEPSPEED":
                self._losses.append(float(loss.detach()))
            backward(accelerator, loss, *args, **kwargs)

        module.Accelerator.prepare, module.Accelerator.backward = noted_prepare, noted_backward

    def watch_llamafactory_v1(self, module: ModuleType) -> None:
        """Note when its trainer has sharded the model, and its losses."""
        shard, compute_loss = module.SFTTrainer._shard_model, module.SFTTrainer.compute_loss

        @functools.wraps(shard)
        def noted_shard(trainer: Any) -> None:
            shard(trainer)
            self._end_load()

        @functools.wraps(compute_loss)
        def noted_loss(trainer: Any, batch: Any) -> Any:
            loss = compute_loss(trainer, batch)
            self._losses.append(float(loss.detach()))
            return loss

        module.SFTTrainer._shard_model, module.SFTTrainer.compute_loss = noted_shard, noted_loss

    def _end_load(self) -> None:
        """Note the most memory until the first engine is made, or until the end where none is."""
        if self._sampler is not None and self._load_bytes is None:
            self._load_s = time.perf_counter() - self._begin_s
            self._sampler.__exit__()
            self._load_bytes = self._sampler.peak_bytes

    def _write(self) -> None:
        self._end_load()
        result = {"losses": self._losses, "load_bytes": self._load_bytes, "load_s": self._load_s}
        Path(os.environ[FOLDER], f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
