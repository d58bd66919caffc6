"""Stand-ins, on a machine without a GPU, for packages that need one and for the CUDA calls of a framework.

Runs in the environment of the framework, with both loaders; a case asks for it by the variables below. None of it
takes part in loading a model, or in training one.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

EMPTY_PACKAGES = "FRAMEWORKS_EMPTY_PACKAGES"
"""Names of packages that may be imported, and whose names may be, but are errors when they are called."""
CUDA_IS_CPU = "FRAMEWORKS_CUDA_IS_CPU"
"""If set, the CUDA calls that a framework makes by itself, not through DeepSpeed's accelerator, mean the CPU."""
FSDP_ON_CPU = "FRAMEWORKS_FSDP_ON_CPU"
"""If set, accelerate takes the FSDP that it is asked for on CPU ranks, too."""


def hooks() -> dict[str, Callable[[ModuleType], None]]:
    """Put the empty packages in place; return what is to be called after which module has been executed."""
    if names := os.environ.get(EMPTY_PACKAGES, "").split():
        sys.meta_path.append(_EmptyPackages(names))
    found = {"accelerate.state": fsdp_on_cpu} if FSDP_ON_CPU in os.environ else {}
    if CUDA_IS_CPU in os.environ:
        found |= {"torch.cuda": _cuda_is_cpu, "torch.distributed.device_mesh": _meshes_are_of_cpus}
        found["torch.accelerator"] = _nothing_to_wait_for
    return found


def fsdp_on_cpu(module: ModuleType) -> None:
    """Have accelerate choose FSDP for CPU ranks, as it does for GPUs."""
    ordinary = module.AcceleratorState.__init__

    @functools.wraps(ordinary)
    def make(state: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        ordinary(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and state.distributed_type == module.DistributedType.MULTI_CPU:
            if state._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(state._mixed_precision)
            state.fsdp_plugin, state.distributed_type = fsdp_plugin, module.DistributedType.FSDP
            module.PartialState._shared_state["distributed_type"] = module.DistributedType.FSDP

    module.AcceleratorState.__init__ = make


def _cuda_is_cpu(module: ModuleType) -> None:
    module.set_device = lambda _device: None
    module.synchronize = lambda _device=None: None
    module.current_device = lambda: "cpu"


def _nothing_to_wait_for(module: ModuleType) -> None:
    module.synchronize = lambda _device=None: None


def _meshes_are_of_cpus(module: ModuleType) -> None:
    ordinary = module.init_device_mesh

    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return ordinary("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    module.init_device_mesh = init_device_mesh


class _EmptyPackages:
    """Finds packages of some names, and all below them, and makes them empty."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._names else None

    def create_module(self, spec: ModuleSpec) -> None:
        pass

    def exec_module(self, module: ModuleType) -> None:
        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)

            def call(*_args: Any, **_kwargs: Any) -> Any:
                raise ImportError(f"{module.__name__}.{name} stands in for what needs a GPU, and was called")

            return call

        module.__getattr__ = missing  # type: ignore[method-assign]
