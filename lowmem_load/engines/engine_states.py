"""The training state of a ZeRO-3 engine, opened to be filled from a checkpoint.

[Note: sub-groups] The optimizer keeps this rank's partitions of its parameters as flat fp32 tensors, one for each
sub-group, and its moments in tensors of the same length. They are filled in place, or made if the optimizer has not
stepped yet. Then the code with which DeepSpeed ends a step copies the values to the 16-bit partitions. A sub-group that
is offloaded to nvme is read into the swapper's buffers for that, one at a time.

Written for deepspeed 0.18.4 to 0.19.8: `runtime/zero/stage3.py`, `_rigid_load_state_dict` and `_optimizer_step`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from torch import nn

from lowmem_load.engines.parameters import full_shape, group_of, held_range, is_partitioned, partition_in_memory
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.foreign_names import DEEPSPEED, require, require_attributes
from lowmem_load.models.wrappers import extra_states
from lowmem_load.planning.regions import FlatRange
from lowmem_load.training_checkpoints.names import OF_ACTIVATIONS
from lowmem_load.training_checkpoints.zero_checkpoint import PLACEHOLDER

OF_IMPLEMENTATIONS = frozenset(
    {"params", "foreach", "fused", "capturable", "differentiable", "bias_correction", "step"}
)
"""Entries of an optimizer's groups that do not change its results, or count. Those of the engine stay."""

_REFUSAL = "_lowmem_load_refusal"
"""Attribute of an engine that must not run: the handle of the hook that raises."""

ADAM_MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})


require(
    DEEPSPEED,
    {
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": (
            *("_optimizer_states_and_gradient_swap_in", "_optimizer_states_and_gradient_swap_out"),
            *("_reassign_or_swap_out_partitioned_parameters", "_swappable_optimizer_subgroup"),
            *("checkpoint_event_epilogue", "checkpoint_event_prologue"),
        )
    },
)

from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus  # noqa: E402  as in `parameters.py`
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3  # noqa: E402


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """This rank's partition of a parameter."""

    name: str  # in the engine's module
    shape: tuple[int, ...]
    mine: FlatRange
    first: int  # where `mine` starts in the flat tensor of the sub-group, in elements; 0 for a frozen parameter
    numel: int  # of `mine`, padding included
    dtype: torch.dtype  # of the memory that is filled: the optimizer's, or a frozen parameter's partition
    tensor: nn.Parameter


class Zero3State:
    """The training state of a ZeRO-3 engine: its parameters by sub-group, frozen ones, and buffers that are saved.

    `extra_states` has the modules that take one, by the names that DeepSpeed gives these.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._zero = engine, _plain_zero3(engine)
        self.base: torch.optim.Optimizer = self._zero.optimizer  # steps the flat tensors
        names: dict[int, str] = {}
        for name, parameter in engine.module.named_parameters():
            if not is_partitioned(parameter):
                raise UnsupportedError(f"{name}: is not partitioned; use the engine's own load_checkpoint")
            names[id(parameter)] = name
        self.sub_groups = [
            list(_parts_of(group, names, master.dtype))
            for group, master in zip(self._zero.fp16_groups, self._zero.fp32_partitioned_groups_flat, strict=True)
        ]
        trained = [part for group in self.sub_groups for part in group]
        others = names.keys() - {id(part.tensor) for part in trained}
        frozen = [p for p in engine.module.parameters() if id(p) in others]
        self.frozen = [part for p in frozen for part in _parts_of([p], names, p.ds_tensor.dtype)]
        self.parameters = [*trained, *self.frozen]
        self.optional = {PLACEHOLDER} & set(names.values())  # not in the model
        state = engine.module.state_dict(keep_vars=True)
        first = {id(buffer): name for name, buffer in reversed(state.items())}  # DeepSpeed lists a shared one once
        # Their names in the state dict are without some wrappers.
        self.buffers = {first[id(buffer)]: buffer for buffer in engine.module.buffers() if id(buffer) in first}
        self.extra_states = extra_states(engine.module, (OF_ACTIVATIONS,))

    @property
    def is_adam(self) -> bool:
        """Whether it is one of the Adams, which have the same state."""
        return isinstance(self.base, torch.optim.Adam | torch.optim.AdamW | FusedAdam | DeepSpeedCPUAdam)

    def group_of(self, sub_group: int) -> int:
        """Return the number of the optimizer's group that a sub-group belongs to."""
        return int(self._zero.sub_group_to_group_id[sub_group])

    def check_groups(self, saved: Sequence[Mapping[str, Any]], moments: frozenset[str]) -> None:
        """Raise ConfigError unless the optimizer can continue with saved groups and moments."""
        groups, kind = self.base.param_groups, type(self.base).__name__
        if len(saved) != len(groups):
            raise ConfigError(
                f"the checkpoint's optimizer has {len(saved)} groups of parameters, this one {len(groups)}"
            )
        values = [value for state in self.base.state.values() for value in state.values()]
        if not moments and any(isinstance(value, torch.Tensor) and value.dim() for value in values):
            raise ConfigError(
                "the checkpoint was saved before the optimizer's first step, and this optimizer has stepped, so its "
                "moments would stay; make a new engine"
            )
        if self.is_adam:
            if moments and not ADAM_MOMENTS.issubset(moments):
                raise ConfigError(f"the checkpoint's optimizer keeps {', '.join(sorted(moments))}; {kind} does not")
            return
        for old, new in zip(saved, groups, strict=True):
            differing = sorted((set(old) ^ set(new)) - OF_IMPLEMENTATIONS)
            if differing:
                raise ConfigError(
                    f"the checkpoint was saved with another optimizer than {kind}: "
                    f"only one of the two has {', '.join(differing)}"
                )

    def prepare(self) -> None:
        """Partition the parameters that are gathered now. Local."""
        self._zero.checkpoint_event_prologue()

    @contextlib.contextmanager
    def memory(self, sub_group: int, moments: Sequence[str]) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """Yield the flat fp32 values of a sub-group and its moments; afterwards copy the values to the partitions."""
        zero, master = self._zero, self._zero.fp32_partitioned_groups_flat[sub_group]
        is_swapped = zero._swappable_optimizer_subgroup(sub_group)
        if is_swapped:
            zero._optimizer_states_and_gradient_swap_in(sub_group, set())  # which gets the names of timers
        state = self.base.state[master] if moments else {}
        for key in moments:
            if not isinstance(state.get(key), torch.Tensor):  # the optimizer has not stepped
                state[key] = torch.zeros_like(master, requires_grad=False)
        try:
            yield master.detach(), {key: state[key].detach().view(-1) for key in moments}
            zero._reassign_or_swap_out_partitioned_parameters(sub_group)
        finally:
            if is_swapped:  # also after an error, or the next load would find no buffer
                zero._optimizer_states_and_gradient_swap_out(sub_group, set())

    def set_scalars(self, sub_group: int, scalars: Mapping[str, Any]) -> None:
        """Set what the optimizer keeps for a sub-group other than tensors, such as its number of steps."""
        master = self._zero.fp32_partitioned_groups_flat[sub_group]
        state = self.base.state[master]
        for key, value in scalars.items():
            state[key] = value.clone() if isinstance(value, torch.Tensor) else value
        if self.is_adam and state:  # parameters that the checkpoint lacks begin at step 0
            step = int(scalars.get("step", 0))
            if isinstance(self.base, FusedAdam | DeepSpeedCPUAdam):
                state["step"] = step
            else:
                group = self.base.param_groups[self.group_of(sub_group)]
                device = master.device if group.get("capturable") or group.get("fused") else "cpu"
                state["step"] = torch.tensor(float(step), dtype=torch.float32, device=device)

    def set_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Give the optimizer's groups the saved hyperparameters."""
        for old, new in zip(saved, self.base.param_groups, strict=True):
            new.update({key: old[key] for key in new if key in old and key not in OF_IMPLEMENTATIONS})

    @contextlib.contextmanager
    def frozen_memory(self, part: HeldParameter) -> Iterator[torch.Tensor]:
        """Yield the partition of a frozen parameter, padding included; one on nvme is written back."""
        is_away = part.tensor.ds_tensor.status != PartitionedParamStatus.AVAILABLE
        with partition_in_memory(part.tensor, part.name) as partition:
            yield partition.detach()
            if is_away:
                part.tensor.nvme_swapper.swap_out_and_release([part.tensor])
        part.tensor.ds_secondary_tensor = None  # hpZ's copy of the old values

    def set_loss_scale(self, name: str, attributes: Mapping[str, Any], *, overflow: bool) -> None:
        """Set the attributes of the loss scaler, if it is of class `name`."""
        scaler = self._zero.loss_scaler
        if type(scaler).__name__ == name:
            vars(scaler).update({key: value for key, value in attributes.items() if key in vars(scaler)})
            self._zero.overflow = overflow

    def set_counters(self, counters: Mapping[str, int], world_size: int) -> None:
        """Set the engine's global_steps, global_samples and skipped_steps; `world_size` ranks have saved."""
        for name, value in counters.items():
            setattr(self._engine, name, value)
        self._engine.loaded_checkpoint_dp_world_size = world_size
        self._engine.loaded_checkpoint_mp_world_size = 1

    def finish(self) -> None:
        """Gather the parameters that stay gathered between steps. Collective: all ranks."""
        self._zero.checkpoint_event_epilogue()


def is_plain_zero3(engine: Any) -> bool:
    """Return whether the engine's optimizer is that of plain ZeRO-3."""
    return type(getattr(engine, "optimizer", None)) is DeepSpeedZeroOptimizer_Stage3


@contextlib.contextmanager
def unusable_until_filled(engine: nn.Module) -> Iterator[None]:
    """Inside, an engine's forward raises, since it has half of a checkpoint. After an error it goes on to raise."""

    def refuse(*_: Any) -> None:
        raise ConfigError("a checkpoint was loaded into this engine halfway; load one again before you run it")

    if _REFUSAL not in engine.__dict__:
        engine.__dict__[_REFUSAL] = engine.register_forward_pre_hook(refuse)
    yield
    engine.__dict__.pop(_REFUSAL).remove()


def _parts_of(group: Sequence[nn.Parameter], names: Mapping[int, str], dtype: torch.dtype) -> Iterator[HeldParameter]:
    first = 0
    for parameter in group:
        if id(parameter) not in names:
            raise UnsupportedError("the engine's optimizer trains parameters that its module does not have")
        numel = int(parameter.partition_numel())
        yield HeldParameter(
            name=names[id(parameter)],
            shape=full_shape(parameter),
            mine=held_range(parameter),
            first=first,
            numel=numel,
            dtype=dtype,
            tensor=parameter,
        )
        first += numel


def _plain_zero3(engine: Any) -> Any:
    zero: Any = getattr(engine, "optimizer", None)
    if not is_plain_zero3(engine) or getattr(zero, "zenflow", False):
        raise UnsupportedError(
            f"load_checkpoint fills engines of plain ZeRO-3 that train, not one with {type(zero).__name__}; use the "
            "engine's own load_checkpoint"
        )
    names = ("fp16_groups", "fp32_partitioned_groups_flat", "loss_scaler", "optimizer", "overflow")
    require_attributes(DEEPSPEED, zero, (*names, "sub_group_to_group_id"))
    require_attributes(DEEPSPEED, engine, ("global_samples", "global_steps", "lr_scheduler", "skipped_steps"))
    if engine.random_ltd_enabled() or engine.curriculum_learning_enabled():
        raise UnsupportedError("random LTD and curriculum learning: use the engine's own load_checkpoint")
    groups = {id(group_of(p)) for group in zero.fp16_groups for p in group}
    if engine.mp_world_size != 1 or len(groups) > 1:
        raise UnsupportedError("model or expert parallelism: use the engine's own load_checkpoint")
    return zero
