"""Described models for tests of the stages: a file of three tensors, and a stand-in for `from_pretrained`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from lowmem_load.config.settings import Settings, read_settings
from lowmem_load.engines.target import Replicated, Target
from lowmem_load.files.executor import Executor
from lowmem_load.files.safetensors import Safetensors
from lowmem_load.load.describe import Described, describe
from lowmem_load.load.make_plan import make_plan
from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.symbolic.constructor import Context
from lowmem_load.symbolic.tensor import SymbolicTensor

CPU = torch.device("cpu")
X = torch.arange(24.0).reshape(4, 6) / 10
Y = X + 100

Build = Callable[[dict[str, torch.Tensor], Context], nn.Module]


@dataclass
class Call:
    """Stands for a `from_pretrained` that makes its model of the tensors of a file."""

    path: Path
    build: Build
    name: str = "model"

    def describe(self, context: Context, **_: bool) -> tuple[nn.Module, dict[str, Any]]:
        file = context.file(str(self.path), Safetensors())
        tensors = {name: SymbolicTensor(file.expression(name), context.read_now) for name in file.names}
        model = self.build(tensors, context)
        context.keeps_of(model)  # as transformers' initialize_weights does
        return model, {"missing_keys": {"m"}, "unexpected_keys": {"u"}, "mismatched_keys": []}


def write_file(folder: Path) -> Path:
    save_file({"x": X, "y": Y, "z": torch.arange(6.0)}, folder / "model.safetensors")
    return folder / "model.safetensors"


def whole(*_: Any) -> Target:
    return Replicated(CPU)


def described(
    file: Path, build: Build, make_target: Any = whole, settings: Settings | None = None, *, holds_values: bool = True
) -> Described:
    settings = settings or read_settings({"zero_optimization": {"stage": 3}}, world_size=3)
    call: Any = Call(file, build)
    with Executor() as executor:
        return describe(call, settings, make_target, executor, holds_values=holds_values)


def planned(file: Path, build: Build) -> LoadPlan:
    return make_plan(described(file, build), 0).plan


def module(**parameters: torch.Tensor) -> nn.Module:
    made = nn.Module()
    for name, tensor in parameters.items():
        made.register_parameter(name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
    return made
