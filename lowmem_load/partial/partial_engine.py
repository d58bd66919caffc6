"""The engine of partial ZeRO-3, for models of which a rank does not run all parts in every step.

ZeRO-3's collectives would not match across ranks there. Here they cover only what all ranks run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.engines.engine import PartitionedPart, full_state_dict
from lowmem_load.engines.engine_states import unusable_until_filled
from lowmem_load.errors import ConfigError, UnsupportedError, listed
from lowmem_load.partial.replicated import (
    PartialOptimizer,
    ReplicatedPart,
    SplitOptimizer,
    load_replicated,
    options_of,
    save_replicated,
)
from lowmem_load.renamed import renamed_keywords
from lowmem_load.resume.load_checkpoint import load_checkpoint
from lowmem_load.training_checkpoints.zero_checkpoint import STEPS, find_folder
from lowmem_load.weights_out.folder import refuse_url
from lowmem_load.weights_out.rank_shards import Wrapper


class PartialEngine(Wrapper):
    """Trains as a `DeepSpeedEngine` does: call it, `backward(loss)`, `step()`. Made by `initialize_partial`.

    Other attributes (`train_batch_size()`, `global_steps`, `get_global_grad_norm()`, ...) are those of the ZeRO-3
    engine of the partitioned part, whose counters are valid for both parts.

    Attributes:
        module: the full model.
        optimizer: has the groups and learning rates of both parts.
        lr_scheduler: steps with the engine; None without one.
    """

    def __init__(
        self, model: nn.Module, part: PartitionedPart, replicated: ReplicatedPart, split: SplitOptimizer | None
    ) -> None:
        super().__init__()
        self.module, self._part, self._replicated, self._split = model, part, replicated, split
        self.optimizer = PartialOptimizer(part, replicated, split)
        self.lr_scheduler: Any = None

    @property
    def zero3(self) -> Any:
        """The `DeepSpeedEngine` of the partitioned part. It is not a child of this module, whose `module` has all."""
        return self._part.engine

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "_part" not in self.__dict__:
                raise
            return getattr(self.zero3, name)

    # -- training ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward. Collective: all ranks."""
        thawed = [name for name, parameter in self._replicated.frozen.items() if parameter.requires_grad]
        if thawed:
            raise ConfigError(
                f"{listed(thawed)} did not require a gradient when this engine was made, so the engine does not train "
                "it; call destroy(), then initialize again"
            )
        return self._part.forward(args, kwargs)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> Any:
        """Accumulate the gradients of `loss`, as `DeepSpeedEngine.backward`. Collective: all ranks."""
        return self._part.backward(loss, **kwargs)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Update both parts at the accumulation boundary; before it, only count. Collective: all ranks."""
        if not self._part.is_boundary():
            self.zero3.step()
            return
        if self._split is not None:
            self._split.sync()
        factor = self._part.step(self._replicated.reduce())
        for parameter in self._replicated.parameters.values():
            parameter.grad = None  # of parameters that no optimizer updates
        if factor is None:
            self._replicated.clear()
            return
        if self._split is None and self._replicated.optimizer is not None:
            options = options_of(self.optimizer.param_groups[0])
            for group in self._replicated.optimizer.param_groups:
                group.update({key: value for key, value in options.items() if key in group})
        self._replicated.step(factor)
        if self._split is not None:
            self._split.optimizer.step()  # without gradients: schedulers want to see a step
        if self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))

    def train(self, mode: bool = True) -> PartialEngine:
        """Put the model and the ZeRO-3 engine into train or eval mode."""
        super().train(mode)
        self.zero3.train(mode)
        return self

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group of `optimizer`."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def destroy(self) -> None:
        """Remove all hooks from the model and free the memory of the ZeRO-3 engine."""
        self._replicated.destroy()
        self._part.destroy()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save as `DeepSpeedEngine.save_checkpoint` does, with one file for the replicated part. Collective."""
        save_dir, tag = os.fspath(save_dir), str(tag or f"global_step{self.zero3.global_steps}")
        distributed = DistributedInterface()
        with distributed.step("saving", name=save_dir):
            refuse_url(save_dir)
            if distributed.rank == 0:  # before DeepSpeed names this checkpoint the latest
                state = {
                    **self._replicated.state(exclude_frozen=exclude_frozen_parameters),
                    "groups": [options_of(group) for group in self.optimizer.param_groups],
                    "schedule": self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None,
                    STEPS: self.zero3.global_steps,
                }
                save_replicated(os.path.join(save_dir, tag), state)
        return bool(
            self.zero3.save_checkpoint(
                save_dir,
                tag,
                client_state=dict(client_state or {}),
                save_latest=save_latest,
                exclude_frozen_parameters=exclude_frozen_parameters,
            )
        )

    @renamed_keywords(trusted="allow_pickle")
    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *,
        allow_pickle: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load what `save_checkpoint` saved, on any number of ranks, as `lowmem_load.load_checkpoint`. Collective.

        `load_module_only` leaves optimizers, schedulers and step counts as they are: for a model that trains other
        parameters than when it was saved.
        """
        load_dir = os.fspath(load_dir)
        load_optimizer_states = load_optimizer_states and not load_module_only
        distributed = DistributedInterface()
        with distributed.step("checking", name=load_dir) as step:  # before anything is changed
            folder = find_folder(load_dir, tag)
            step.digest = {"checkpoint": "none" if folder is None else os.path.basename(folder)}
            if folder is not None:
                state = load_replicated(folder)
                num_groups = len(self.optimizer.param_groups) if load_optimizer_states else None
                self._replicated.check(state, strict=load_module_strict, num_groups=num_groups)
        if folder is None:
            return None, {}
        path, client_state = load_checkpoint(
            self.zero3,
            load_dir,
            tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_module_only=load_module_only,
            allow_pickle=allow_pickle,
        )
        with unusable_until_filled(self.zero3), distributed.step("loading", name=load_dir):
            self._replicated.load(state, optimizer=load_optimizer_states)
            if load_optimizer_states:
                for group, options in zip(self.optimizer.param_groups, state["groups"], strict=True):
                    group.update(options)
            if load_lr_scheduler_states and not load_module_only and None not in (self.lr_scheduler, state["schedule"]):
                self.lr_scheduler.load_state_dict(state["schedule"])
        return path, client_state

    def consolidated_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """Return the model's full state dict in host memory on rank 0, None on the others. Collective: all ranks."""
        return full_state_dict(self.module, without_frozen=exclude_frozen_parameters)

    _zero3_consolidated_16bit_state_dict = consolidated_state_dict  # accelerate calls it

    def save_16bit_model(self, *_: Any, **__: Any) -> Any:
        """Raise: the ZeRO-3 engine would write its part only."""
        raise UnsupportedError("save_16bit_model is not supported; call lowmem_load.save_model(engine, folder)")

    def module_state_dict(self, *_: Any, **__: Any) -> Any:
        """Raise: the ZeRO-3 engine would return its part only, with empty tensors."""
        raise UnsupportedError("module_state_dict has empty parameters under ZeRO-3; call consolidated_state_dict()")
