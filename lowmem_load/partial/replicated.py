"""The replicated part of a model: its tensors, gradients and optimizer, and their file in a checkpoint.

[Note: one reduction] When autograd has accumulated a gradient, it is added to one flat float32 buffer, which is zero
for unused parameters. At the accumulation boundary one all-reduce sums the buffer over the ranks, whatever each rank
has run. Behind the gradients the buffer has, for each parameter, the number of ranks that used it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from deepspeed import comm
from torch import nn

from lowmem_load.engines.engine import PartitionedPart
from lowmem_load.engines.zero3_target import chosen_parameters
from lowmem_load.errors import CheckpointError, ConfigError, UnsupportedError, listed
from lowmem_load.models.wrappers import extra_states
from lowmem_load.training_checkpoints.plain_values import read_plain
from lowmem_load.training_checkpoints.zero_checkpoint import REPLICATED_FILE

logger = logging.getLogger(__name__)

FORMAT = 1
"""Version of the file."""

EXTRA_STATES = "extra states"
"""Key of what modules that take an extra state gave, by name."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class _Slot:
    """A trained parameter."""

    parameter: nn.Parameter
    master: nn.Parameter  # the parameter itself if it is float32, else a float32 copy
    gradient: torch.Tensor  # a view of the flat buffer
    is_used: bool = False  # on this rank, since the last step

    @torch.no_grad()
    def collect(self, parameter: torch.Tensor) -> None:
        """Add the gradient that a backward pass has given the parameter to that of the step."""
        if parameter.grad is not None:
            self.gradient.add_(parameter.grad)
            parameter.grad = None
            self.is_used = True


class ReplicatedPart:
    """The tensors outside of `chosen` modules, which every rank keeps in full.

    Memory: a float32 gradient per trained element, and a float32 master copy of parameters in lower precision.
    """

    def __init__(self, model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
        inside = chosen_parameters(chosen)
        chosen_buffers = {id(buffer) for module in chosen.values() for buffer in module.buffers()}
        chosen_modules = {id(below) for module in chosen.values() for below in module.modules()}
        self.parameters = {name: p for name, p in model.named_parameters() if id(p) not in inside}
        self.frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}  # of both parts
        self.buffers = {name: b for name, b in model.named_buffers() if id(b) not in chosen_buffers}
        states = extra_states(model).items()
        self.extra_states = {name: module for name, module in states if id(module) not in chosen_modules}
        self.optimizer: torch.optim.Optimizer | None = None
        self.masters: dict[str, nn.Parameter] = {}  # what the optimizer updates, by name of the parameter
        self.groups: Mapping[str, int] = {}  # numbers of the groups of what is trained, in the optimizer's order
        self._model = model
        self._slots: dict[str, _Slot] = {}
        self._hooks: list[Any] = []
        self._flat = self._gradients = self._num_users = torch.empty(0)

    def move_to(self, device: torch.device, dtype: torch.dtype | None) -> None:
        """Move all tensors to a device; cast the parameters if a dtype is given."""
        for parameter in self.parameters.values():  # by .data: the user's optimizer refers to these objects
            parameter.data = parameter.data.to(device, dtype if parameter.is_floating_point() else None)
        for buffer in self.buffers.values():
            buffer.data = buffer.data.to(device)  # in place: several modules may share it

    @torch.no_grad()
    def broadcast(self) -> None:
        """Give every rank the values of rank 0. Collective."""
        for tensor in (*self.parameters.values(), *self.buffers.values()):
            values = tensor.detach().contiguous()
            comm.broadcast(values.view(-1).view(torch.uint8), 0)  # gloo knows fewer dtypes than torch
            tensor.detach().copy_(values)

    def train(self, groups: Mapping[str, int], device: torch.device) -> None:
        """Take over the gradients of the parameters in `groups` that require one. They are on `device`."""
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad and name in groups}
        wrong = [f"{name} ({p.dtype})" for name, p in trained.items() if p.dtype not in _DTYPES]
        if wrong:
            raise ConfigError(f"{listed(wrong)}: replicated parameters are trained in float32, bfloat16 or float16")
        numels = [parameter.numel() for parameter in trained.values()]
        self.groups = groups
        self._flat = torch.zeros(sum(numels) + len(numels), dtype=torch.float32, device=device)
        self._gradients, self._num_users = torch.split(self._flat, [sum(numels), len(numels)])
        for (name, p), piece in zip(trained.items(), torch.split(self._gradients, numels), strict=True):
            # In lower precision small updates would be rounded away.
            master = p if p.dtype == torch.float32 else nn.Parameter(p.detach().float().clone())
            self.masters[name] = master
            self._slots[name] = slot = _Slot(p, master, piece.view(p.shape))
            self._hooks.append(p.register_post_accumulate_grad_hook(slot.collect))  # type: ignore[no-untyped-call]

    def reduce(self) -> float:
        """Average the gradients, loss scale included, over the ranks; return their norm, not finite on overflow.

        Collective.
        """
        if not self._slots:
            return 0.0
        self._num_users.copy_(torch.tensor([slot.is_used for slot in self._slots.values()]))
        comm.all_reduce(self._flat)
        self._gradients.div_(comm.get_world_size())
        return float(torch.linalg.vector_norm(self._gradients))

    def step(self, factor: float) -> None:
        """Update the parameters with the reduced gradients times `factor`, then clear the gradients. Local."""
        if self.optimizer is None:
            return
        self._gradients.mul_(factor)
        for slot, num_users in zip(self._slots.values(), self._num_users.tolist(), strict=True):
            slot.master.grad = slot.gradient if num_users else None  # None: not even weight decay, as in one process
        self.optimizer.step()
        for slot in self._slots.values():
            slot.master.grad = None
        self._publish()
        self.clear()

    def clear(self) -> None:
        """Clear all gradients of the current step. Local."""
        self._flat.zero_()
        for slot in self._slots.values():
            slot.is_used = False

    def destroy(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return masters and optimizer state, sharing their memory."""
        return {
            "masters": {name: master.detach() for name, master in self.masters.items()},
            "optimizer": self.optimizer.state_dict() if self.optimizer is not None else None,
            "groups": dict(self.groups),
        }

    def state(self, *, exclude_frozen: bool) -> dict[str, Any]:
        """Return what a checkpoint contains of this part."""
        return {
            "buffers": {name: buffer.detach() for name, buffer in self._persistent()["buffers"].items()},
            "parameters": {
                name: p.detach() for name, p in self.parameters.items() if p.requires_grad or not exclude_frozen
            },
            "excluded": [name for name, p in self.parameters.items() if exclude_frozen and not p.requires_grad],
            EXTRA_STATES: {name: module.get_extra_state() for name, module in self.extra_states.items()},
            "whole": self.state_dict(),
        }

    def check(self, state: Mapping[str, Any], *, strict: bool, num_groups: int | None) -> None:
        """Raise ConfigError if a tensor of a checkpoint's `state` does not fit or, if strict, if names differ.

        `num_groups` is that of the optimizer that is loaded; None if none is.
        """
        kinds: Mapping[str, Mapping[str, Any]] = {**self._persistent(), EXTRA_STATES: self.extra_states}
        for kind, own in kinds.items():
            saved = state.get(kind, {})  # lowmem_load before 0.4 saved no extra states
            differ = sorted(set(saved) ^ (set(own) - set(state["excluded"]))) if strict else []
            shared = saved.keys() & own.keys() if kind != EXTRA_STATES else ()
            differ += [name for name in shared if saved[name].shape != own[name].shape]
            if differ:
                raise ConfigError(f"the checkpoint's replicated part has other {kind} than the model: {listed(differ)}")
        if num_groups is None:
            return
        if len(state["groups"]) != num_groups:
            raise ConfigError(
                f"the checkpoint's optimizer has {len(state['groups'])} parameter groups, this one {num_groups}"
            )
        masters = state["whole"]["masters"]
        if different := sorted(set(masters) ^ set(self.masters)):
            raise ConfigError(f"the checkpoint's replicated part trains other parameters: {listed(different)}")
        if "groups" not in state["whole"]:
            nameless = "the checkpoint's optimizer does not name its parameters, as lowmem_load 0.3 saved it"
            if list(masters) != list(self.masters):
                raise ConfigError(
                    f"{nameless}, and the order of the model's parameters has changed since; pass "
                    "load_optimizer_states=False"
                )
            logger.warning(
                "lowmem_load: %s, so its state is loaded by position: this optimizer must have them in the order of "
                "the one that was saved",
                nameless,
            )
        for name, number in state["whole"].get("groups", {}).items():
            if name in self.groups and self.groups[name] != number:
                raise ConfigError(
                    f"{name}: is in group {self.groups[name]} of the optimizer, and was in group {number} when the "
                    "checkpoint was saved; give the optimizer the same groups, or pass load_optimizer_states=False"
                )

    @torch.no_grad()
    def load(self, state: Mapping[str, Any], *, optimizer: bool) -> None:
        """Load a checkpoint's `state`, which fits. Parameters that were not trained have no masters in it."""
        for kind, tensors in self._persistent().items():
            for name, value in state[kind].items():
                if name in tensors:
                    tensors[name].copy_(value)
        for name, value in state.get(EXTRA_STATES, {}).items():
            if name in self.extra_states:
                self.extra_states[name].set_extra_state(value)
        masters = state["whole"]["masters"]
        for name, slot in self._slots.items():
            slot.master.copy_(masters.get(name, slot.parameter))
        if optimizer:
            self._publish()
            if self.optimizer is not None and state["whole"]["optimizer"] is not None:
                self.optimizer.load_state_dict(self._in_own_order(state))
            self.clear()

    def _in_own_order(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved state of the optimizer, which numbers the parameters in its order, in this one's order."""
        # lowmem_load 0.3 saved no groups, so its optimizers are loaded by position.
        saved = (name for name in state["whole"].get("groups", self.groups) if name in self.masters)
        own = {name: number for number, name in enumerate(name for name in self.groups if name in self.masters)}
        numbers = {number: own[name] for number, name in enumerate(saved)}
        optimizer = state["whole"]["optimizer"]
        return {**optimizer, "state": {numbers.get(key, key): value for key, value in optimizer["state"].items()}}

    def _persistent(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors that checkpoints contain, by kind and name."""
        names = self._model.state_dict().keys()
        buffers = {name: buffer for name, buffer in self.buffers.items() if name in names}
        return {"parameters": dict(self.parameters), "buffers": buffers}

    @torch.no_grad()
    def _publish(self) -> None:
        for slot in self._slots.values():
            if slot.master is not slot.parameter:
                slot.parameter.copy_(slot.master)


# -- the file of a checkpoint that contains this part ------------------------------------------------------------------


def save_replicated(folder: str, state: Mapping[str, Any]) -> None:
    """Write the replicated part's state. The file appears when `load_replicated` can read it."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, REPLICATED_FILE)
    unfinished = f"{path}.{socket.gethostname()}.{os.getpid()}"
    try:
        torch.save(_plain({"format": FORMAT, **state}), unfinished)
        read_plain(unfinished, with_elements=False)
    except Exception as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise CheckpointError(f"{path}: cannot be written so that it can be read again: {error}") from error
    os.replace(unfinished, path)


def _plain(value: Any) -> Any:
    """Return `value` without numpy's scalars and defaultdicts, which schedulers may keep and `read_plain` refuses."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict) and not isinstance(value, Counter):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value


def load_replicated(folder: str) -> dict[str, Any]:
    """Return the state that `save_replicated` wrote, in host memory. No pickled code is run."""
    path = os.path.join(folder, REPLICATED_FILE)
    if not os.path.isfile(path):
        raise CheckpointError(f"{folder}: has no {REPLICATED_FILE}, so it was not saved by partial ZeRO-3")
    state = read_plain(path)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path}: is not of format {FORMAT}; it was written by another version of lowmem_load")
    return state


# -- the optimizer of the engine --------------------------------------------------------------------------------------


class PartialOptimizer:
    """The engine's `optimizer`: learning rates to read and write, and whether a step was skipped.

    Both parts use the options of the `leader`, the user's optimizer or else the ds_config's.
    """

    def __init__(self, part: PartitionedPart, replicated: ReplicatedPart, split: SplitOptimizer | None) -> None:
        self._part, self._replicated = part, replicated
        self.leader: torch.optim.Optimizer = part.optimizer if split is None else split.optimizer
        if split is None and part.frozen and replicated.optimizer is not None:
            self.leader = replicated.optimizer
        self.defaults = self.leader.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the leader."""
        return self.leader.param_groups

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, because gradients of either part overflowed."""
        return bool(self._part.engine.optimizer.overflow)

    def state_dict(self) -> dict[str, Any]:
        """Return the replicated part's state; the partitioned part's is in the engine's checkpoints only."""
        return self._replicated.state_dict()


# -- splitting a user's optimizer ------------------------------------------------------------------------------------


class SplitOptimizer:
    """A user's optimizer, from which one is derived for the partitioned and one for the replicated part.

    The user's own object updates nothing: schedulers write its groups, and learning rates are read there.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer.state:
            raise UnsupportedError(
                f"{type(optimizer).__name__} has state already, so it cannot be split between the two parts; pass one "
                'that has not stepped, or write an "optimizer" section in the ds_config'
            )
        self.optimizer = optimizer
        self._derived: list[tuple[torch.optim.Optimizer, list[int]]] = []

    def groups_of(self, model: nn.Module) -> dict[str, int]:
        """Return the number of the group of each parameter of a model that is in one, by name, in their order."""
        names = {id(p): name for name, p in model.named_parameters()}
        groups = enumerate(self.optimizer.param_groups)
        return {names[id(p)]: number for number, group in groups for p in group["params"] if id(p) in names}

    def derive(self, stands_for: Mapping[int, nn.Parameter]) -> torch.optim.Optimizer | None:
        """Return an optimizer over tensors that stand for parameters, given by their ids; None if it has none."""
        # Not by the class's __init__, whose arguments are not known; add_param_group takes the options of each group.
        derived = object.__new__(type(self.optimizer))
        # An lr scheduler that counts calls sets "step"; like the hooks, it concerns the user's object only.
        for key, value in vars(self.optimizer).items():
            if key != "step":
                derived.__dict__[key] = type(value)() if "_hooks" in key else value
        derived.state, derived.param_groups = defaultdict(dict), []
        numbers = []
        for number, group in enumerate(self.optimizer.param_groups):
            parameters = [stands_for[id(p)] for p in group["params"] if id(p) in stands_for]
            if parameters:
                derived.add_param_group({**options_of(group), "params": parameters})
                numbers.append(number)
        if not numbers:
            return None
        self._derived.append((derived, numbers))
        return derived

    def sync(self) -> None:
        """Copy the options of the user's groups to the derived optimizers. Local."""
        for derived, numbers in self._derived:
            for group, number in zip(derived.param_groups, numbers, strict=True):
                group.update(options_of(self.optimizer.param_groups[number]))


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
