"""The replicated part of a model: its gradients, their one all-reduce per step, and its optimizer.

[Note: one reduction] When autograd has accumulated a gradient, it is added to one flat float32 buffer, which is zero
for unused parameters. At the accumulation boundary one all-reduce sums the buffer over the ranks, whatever each rank
has run. Behind the gradients the buffer has, per parameter, the number of micro-batches that used it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from deepspeed import comm
from torch import nn

from lowmem_load.ds.engine import PartitionedPart
from lowmem_load.errors import ConfigError, UnsupportedError, listed

Average: TypeAlias = Literal["all", "used"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_average(average: str) -> None:
    """Raise ConfigError unless it is an `Average`."""
    if average not in ("all", "used"):
        raise ConfigError(f"average is 'all' or 'used', got {average!r}")


@dataclass(slots=True)
class _Slot:
    """A trainable parameter.

    Attributes:
        name: in the model.
        parameter: the model's own.
        master: what the optimizer updates: the parameter itself if it is float32, else a float32 copy.
        gradient: a view of the flat buffer in the parameter's shape.
        used: whether the current micro-batch has used the parameter.
    """

    name: str
    parameter: nn.Parameter
    master: nn.Parameter
    gradient: torch.Tensor
    used: bool = False


class ReplicatedPart:
    """Trains parameters that every rank holds in full, with equal values on all ranks.

    The parameters are distinct, and all on `device`. For `average` see `lowmem_load.initialize`.

    Memory: a float32 gradient per element, and a float32 master copy of parameters in lower precision.

    Raises:
        ConfigError: a parameter has a dtype that cannot be trained.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        device: torch.device,
        *,
        average: Average,
    ) -> None:
        wrong = [f"{name} ({p.dtype})" for name, p in parameters.items() if p.dtype not in _DTYPES]
        if wrong:
            raise ConfigError(f"{listed(wrong)}: replicated parameters are trained in float32, bfloat16 or float16")
        self._average = average
        self._num_elements = sum(parameter.numel() for parameter in parameters.values())
        self._flat = torch.zeros(self._num_elements + len(parameters), device=device)
        self._gradients, self._counts = self._flat[: self._num_elements], self._flat[self._num_elements :]
        pieces = torch.split(self._gradients, [parameter.numel() for parameter in parameters.values()])
        self._slots = [
            _Slot(name, parameter, _master_of(parameter), piece.view(parameter.shape))
            for (name, parameter), piece in zip(parameters.items(), pieces, strict=True)
        ]
        self._hooks = [
            slot.parameter.register_post_accumulate_grad_hook(_collector(slot))  # type: ignore[no-untyped-call]
            for slot in self._slots
        ]
        self._used_counts: list[int] = []
        self.optimizer: torch.optim.Optimizer | None = None

    @property
    def names(self) -> list[str]:
        """Names of the trained parameters."""
        return [slot.name for slot in self._slots]

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        """The tensors that an optimizer updates, by name of the parameter."""
        return {slot.name: slot.master for slot in self._slots}

    def end_micro_batch(self) -> None:
        """Count the parameters that backward passes have used since the last call. Local."""
        used = [number for number, slot in enumerate(self._slots) if slot.used]
        if used:
            self._counts[used] += 1
        for number in used:
            self._slots[number].used = False

    def reduce(self, micro_batches: int) -> float:
        """Average the gradients over the ranks; return their norm, infinite or nan on overflow. Collective: all ranks.

        Gradients and norm include the loss scale. `micro_batches` is the number of gradient accumulation steps, by
        which each loss was divided.
        """
        if not self._slots:
            return 0.0
        self.end_micro_batch()
        comm.all_reduce(self._flat)
        ranks = comm.get_world_size()
        self._used_counts = [int(count) for count in self._counts.tolist()]
        self._gradients.div_(ranks)
        if self._average == "used":
            for slot, count in zip(self._slots, self._used_counts, strict=True):
                slot.gradient.mul_(ranks * micro_batches / max(count, 1))
        return float(torch.linalg.vector_norm(self._gradients))

    def step(self, factor: float) -> None:
        """Update the parameters with the reduced gradients times `factor`, then clear the gradients. Local."""
        if not self._slots:
            return
        assert self.optimizer is not None
        self._gradients.mul_(factor)
        for slot, count in zip(self._slots, self._used_counts, strict=True):
            slot.master.grad = slot.gradient if count else None
        self.optimizer.step()
        for slot in self._slots:
            slot.master.grad = None
        self._publish()
        self.clear()

    def clear(self) -> None:
        """Clear all gradients of the current step. Local."""
        self._flat.zero_()
        for slot in self._slots:
            slot.used = False

    def state_dict(self) -> dict[str, Any]:
        """Return masters and optimizer state, sharing their memory."""
        return {
            "masters": {slot.name: slot.master.detach() for slot in self._slots},
            "optimizer": self.optimizer.state_dict() if self.optimizer is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ConfigError: it is of other parameters.
        """
        self.check_state(state)
        with torch.no_grad():
            for slot in self._slots:
                slot.master.copy_(state["masters"][slot.name])
        self._publish()
        if self.optimizer is not None and state["optimizer"] is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        self.clear()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ConfigError unless `load_state_dict` can load `state`."""
        different = sorted(set(state["masters"]) ^ set(self.names))
        if different:
            raise ConfigError(f"the checkpoint's replicated part trains other parameters: {listed(different)}")

    def refresh_masters(self) -> None:
        """Copy the values of the parameters, which were changed from outside, to the masters."""
        with torch.no_grad():
            for slot in self._slots:
                slot.master.copy_(slot.parameter)

    def destroy(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _publish(self) -> None:
        pairs = [(slot.parameter, slot.master) for slot in self._slots if slot.master is not slot.parameter]
        if pairs:
            torch._foreach_copy_([parameter for parameter, _ in pairs], [master for _, master in pairs])


def _master_of(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(parameter.detach().float().clone())


def _collector(slot: _Slot) -> Callable[[torch.Tensor], None]:
    @torch.no_grad()
    def collect(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            slot.gradient.add_(parameter.grad)
            parameter.grad = None
            slot.used = True

    return collect


@torch.no_grad()
def broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """Give every rank the values of rank 0. Collective: all ranks, with the same shapes in the same order."""
    for tensor in tensors:
        values = tensor.detach().contiguous()
        comm.broadcast(values.view(-1).view(torch.uint8), 0)  # gloo knows fewer dtypes than torch
        tensor.detach().copy_(values)


# -- the optimizer of the engine --------------------------------------------------------------------------------------


class PartialOptimizer:
    """The engine's `optimizer`: learning rates to read and write, and whether a step was skipped."""

    def __init__(self, part: PartitionedPart, replicated: ReplicatedPart, leader: torch.optim.Optimizer) -> None:
        self._part, self._replicated, self._leader = part, replicated, leader
        self.defaults = leader.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the user's or else the ds_config's optimizer. Both parts use their options."""
        return self._leader.param_groups

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, because gradients of either part overflowed."""
        return bool(self._part.engine.optimizer.overflow)

    @property
    def loss_scale(self) -> float:
        """Factor of losses before the backward pass; 1 unless fp16."""
        return self._part.loss_scale

    def state_dict(self) -> dict[str, Any]:
        """Return the replicated part's state; the partitioned part's is in the engine's checkpoints only."""
        return self._replicated.state_dict()


# -- splitting a user's optimizer ------------------------------------------------------------------------------------


class SplitOptimizer:
    """A user's optimizer, from which one is derived for the partitioned and one for the replicated part.

    The user's own object updates nothing: schedulers write its groups, and learning rates are read there. A derived
    optimizer has the same class, and those of the groups that hold its parameters.

    Raises:
        UnsupportedError: the optimizer has state already, which could belong to either part.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer.state:
            raise UnsupportedError(
                f"{type(optimizer).__name__} holds state already and cannot be split between the two parts; pass one "
                'that has not stepped, or write an "optimizer" section in the ds_config'
            )
        self.optimizer = optimizer
        self._derived: list[tuple[torch.optim.Optimizer, list[int]]] = []

    def derive(self, stands_for: Mapping[int, nn.Parameter]) -> torch.optim.Optimizer | None:
        """Return an optimizer over some parameters; None if the user's optimizer holds none of them.

        `stands_for` maps the `id` of a model's parameter to the tensor that the derived optimizer updates.
        """
        cls, held = type(self.optimizer), self.optimizer.__dict__
        made = object.__new__(cls)
        # An lr scheduler that counts calls sets "step"; like the hooks, it concerns the user's object only.
        made.__dict__.update({key: type(value)() if "_hooks" in key else value for key, value in held.items()})
        made.__dict__.pop("step", None)
        made.state, made.param_groups = defaultdict(dict), []
        numbers = []
        for number, group in enumerate(self.optimizer.param_groups):
            parameters = [stands_for[id(p)] for p in group["params"] if id(p) in stands_for]
            if parameters:
                made.add_param_group({**options_of(group), "params": parameters})
                numbers.append(number)
        if not numbers:
            return None
        self._derived.append((made, numbers))
        return made

    def sync(self) -> None:
        """Copy the options of the user's groups to the derived optimizers. Local."""
        for derived, numbers in self._derived:
            for group, number in zip(derived.param_groups, numbers, strict=True):
                group.update(options_of(self.optimizer.param_groups[number]))


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def follow(leader: torch.optim.Optimizer, follower: torch.optim.Optimizer) -> None:
    """Copy the options of the first group of `leader` to every group of `follower`. Local."""
    for group in follower.param_groups:
        group.update({key: value for key, value in options_of(leader.param_groups[0]).items() if key in group})
