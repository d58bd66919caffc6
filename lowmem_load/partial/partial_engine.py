"""The engine of partial ZeRO-3, for models of which a rank does not run all parts in every step.

ZeRO-3's collectives would not match across ranks there. Here they cover only what all ranks run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowmem_load.config.settings import Settings
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.engines.engine import PartitionedPart, optimizer_over, scheduler_class, whole_state_dict
from lowmem_load.engines.engine_states import mark_unusable, mark_usable
from lowmem_load.engines.zero3_target import mark
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
        self,
        model: nn.Module,
        chosen: dict[str, nn.Module],
        settings: Settings,
        split: SplitOptimizer | None,
    ) -> None:
        super().__init__()
        self.module, self._split = model, split
        self.lr_scheduler: Any = None
        derive = None if split is None else lambda parameters: split.derive({id(p): p for p in parameters})
        try:
            with DistributedInterface().step("making the ZeRO-3 engine"):
                self._part = PartitionedPart(model, chosen, settings.ds_config, derive)
        except BaseException:
            if "_part" in self.__dict__:  # another rank has failed
                self._part.destroy()
            raise
        mark(chosen.values())
        self._replicated = ReplicatedPart(model, chosen)

    def train_replicated(self, dtype: torch.dtype | None) -> None:
        """Prepare the replicated part for training, cast to `dtype` if one is given. Collective. Internal."""
        part, split, replicated = self._part, self._split, self._replicated
        device, distributed = part.engine.device, DistributedInterface()
        with distributed.step("moving the replicated part"):  # before the broadcast, which cannot report a failure
            replicated.move_to(device, dtype)
        with distributed.step("broadcasting the replicated part"):
            replicated.broadcast()
        trained = {name: p for name, p in replicated.parameters.items() if p.requires_grad}
        groups = dict.fromkeys(trained, 0)
        if split is not None:
            groups = split.groups_of(self.module)
            trained = {name: p for name, p in trained.items() if name in groups}
        replicated.train(trained, groups, device)
        if trained and split is not None:
            replicated.optimizer = split.derive({id(p): replicated.masters[name] for name, p in trained.items()})
        elif trained:
            replicated.optimizer = optimizer_over(part.engine, part.optimizer_params, [*replicated.masters.values()])
        self.optimizer = PartialOptimizer(part, replicated, self._leader)

    @property
    def zero3(self) -> Any:
        """The `DeepSpeedEngine` of the partitioned part. It is no child of this module: `module` has its parameters."""
        return self._part.engine

    @property
    def _leader(self) -> torch.optim.Optimizer:
        """The optimizer whose groups hold the learning rates of both parts."""
        if self._split is not None:
            return self._split.optimizer
        if self._part.frozen and self._replicated.optimizer is not None:
            return self._replicated.optimizer
        return self._part.optimizer

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
        self._replicated.end_micro_batch()  # after a loss.backward() of the caller
        return self._part.forward(args, kwargs)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> Any:
        """Accumulate the gradients of `loss`, as `DeepSpeedEngine.backward`. Collective: all ranks."""
        result = self._part.backward(loss, **kwargs)
        self._replicated.end_micro_batch()
        return result

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Update both parts at the accumulation boundary; before it, only count. Collective: all ranks."""
        if not self._part.is_boundary():
            self.zero3.step()
            return
        if self._split is not None:
            self._split.sync()
        factor = self._part.step(self._replicated.reduce())
        for parameter in self._replicated.parameters.values():
            parameter.grad = None  # of parameters that no optimizer holds
        if factor is None:
            self._replicated.clear()
            return
        if self._leader is self._part.optimizer and self._replicated.optimizer is not None:
            options = options_of(self._leader.param_groups[0])
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

    def set_lr_scheduler(self, lr_scheduler: Any, section: Mapping[str, Any] | None) -> None:
        """Set the lr scheduler: a scheduler, a function that makes one, or that of a ds_config's section. Internal."""
        if lr_scheduler is None and section:
            lr_scheduler = scheduler_class(section)(self._leader, **(section.get("params") or {}))
        elif lr_scheduler is not None and not hasattr(lr_scheduler, "step"):
            lr_scheduler = lr_scheduler(self._leader)
        self.lr_scheduler = lr_scheduler

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
                    "groups": [options_of(group) for group in self._leader.param_groups],
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
                num_groups = len(self._leader.param_groups) if load_optimizer_states else None
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
        mark_unusable(self.zero3)
        with distributed.step("loading", name=load_dir):
            self._replicated.load(state, optimizer=load_optimizer_states)
            if load_optimizer_states:
                for group, options in zip(self._leader.param_groups, state["groups"], strict=True):
                    group.update(options)
            if load_lr_scheduler_states and not load_module_only and None not in (self.lr_scheduler, state["schedule"]):
                self.lr_scheduler.load_state_dict(state["schedule"])
        mark_usable(self.zero3)
        return path, client_state

    def consolidated_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """Return the model's full state dict in host memory on rank 0, None on the others. Collective: all ranks."""
        return whole_state_dict(self.module, without_frozen=exclude_frozen_parameters)

    _zero3_consolidated_16bit_state_dict = consolidated_state_dict  # accelerate calls it

    def save_16bit_model(self, *_: Any, **__: Any) -> Any:
        """Raise: the ZeRO-3 engine would write its part only."""
        raise UnsupportedError("save_16bit_model is not supported; call lowmem_load.save_model(engine, folder)")

    def module_state_dict(self, *_: Any, **__: Any) -> Any:
        """Raise: the ZeRO-3 engine would return its part only, with empty tensors."""
        raise UnsupportedError("module_state_dict has empty parameters under ZeRO-3; call consolidated_state_dict()")
