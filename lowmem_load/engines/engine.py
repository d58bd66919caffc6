"""A ZeRO-3 engine over the chosen modules of a model, and only those, for partial ZeRO-3 (deepspeed 0.18.4 to 0.19.8).

DeepSpeed gets a `Shell` that contains the chosen modules under their own names. Its forward is the full model's.

[Note: one more norm group] The ZeRO-3 optimizer combines the gradient norms of its parameter groups. If one is not
finite, it skips the step and lowers the loss scale. The replicated part joins as one more group, so both parts share
the norm, clipping, overflow and loss scale. Before 0.19.8 the optimizer looks for an fp16 overflow only in its own
gradients, which set a tracker; then the replicated part sets it too.

[Note: the same graph on all ranks] The backward pass gathers the parameters of a ZeRO-3 module only if gradients pass
through it. Through frozen layers they pass only if the input needs a gradient. In partial ZeRO-3 that depends on the
encoders that ran on this rank. So every tensor that enters the partitioned part is made to need a gradient, at
whichever module it enters. Recomputation in the backward pass must treat the same modules alike, so the modules that
were entered are remembered.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import chain, repeat
from typing import Any

import deepspeed
import torch
from torch import nn

from lowmem_load.engines.engine_states import is_plain_zero3
from lowmem_load.engines.hooks import FULL_MODEL
from lowmem_load.engines.parameters import is_partitioned
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.foreign_names import DEEPSPEED, require, require_attributes
from lowmem_load.training_checkpoints.zero_checkpoint import PLACEHOLDER

require(
    DEEPSPEED,
    {
        "deepspeed.runtime.engine:DeepSpeedEngine": (
            *("_configure_basic_optimizer", "backward", "destroy", "fp16_enabled", "get_global_grad_norm"),
            *("gradient_accumulation_steps", "gradient_clipping", "is_gradient_accumulation_boundary"),
            *("optimizer_name", "optimizer_params", "save_checkpoint", "step", "zero_use_cpu_optimizer"),
        ),
        "deepspeed.runtime.lr_schedules": ("VALID_LR_SCHEDULES",),
        "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload": ("get_param_coordinator",),
        "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator": ("reset_step",),
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": ("_get_norm_groups", "loss_scale", "step"),
    },
)

from deepspeed.runtime import lr_schedules  # noqa: E402  the contract gives the better error


class Shell(nn.Module):
    """Stands for the chosen modules of a model, in empty containers that are named as in the model."""

    def __init__(self, model: nn.Module, chosen: Mapping[str, nn.Module], placeholder: nn.Parameter | None) -> None:
        super().__init__()
        self.__dict__[FULL_MODEL] = model  # not a child: the engine must not see its other modules
        for name, module in chosen.items():
            *path, last = name.split(".")
            container: nn.Module = self
            for part in path:
                if part not in container._modules:
                    container.add_module(part, nn.Module())
                container = container.get_submodule(part)
            container.add_module(last, module)
        if placeholder is not None:
            self.register_parameter(PLACEHOLDER, placeholder)
        # No checkpoint has the placeholder: a frozen part may be trained later.
        self.register_state_dict_post_hook(_drop_placeholder)
        self.training = model.training  # of the shell alone: a script may have frozen modules in eval mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the full model's forward."""
        return self.__dict__[FULL_MODEL](*args, **kwargs)


def _drop_placeholder(shell: nn.Module, state_dict: dict[str, Any], *_: Any) -> None:
    state_dict.pop(PLACEHOLDER, None)


def check_engine(engine: Any) -> None:
    """Raise unless an engine is one of plain ZeRO-3 with the attributes that are read here."""
    require_attributes(
        DEEPSPEED, engine, ("basic_optimizer", "client_optimizer", "device", "global_steps", "optimizer")
    )
    if not is_plain_zero3(engine):
        raise UnsupportedError(
            f"partial ZeRO-3 needs DeepSpeed's plain ZeRO-3 optimizer, not {type(engine.optimizer).__name__}"
        )
    require_attributes(DEEPSPEED, engine.optimizer, ("inf_or_nan_tracker", "overflow", "parameter_offload"))


class PartitionedPart:
    """The chosen modules of a model under a DeepSpeed ZeRO-3 engine, which has no lr scheduler. Collective.

    `chosen` has topmost modules by name, not the model itself. They are partitioned now if they are not yet.
    `make_optimizer` makes the optimizer from their trainable parameters; None for the ds_config's.
    """

    def __init__(
        self,
        model: nn.Module,
        chosen: Mapping[str, nn.Module],
        ds_config: Mapping[str, Any],
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer | None] | None,
    ) -> None:
        _refuse(ds_config)
        config = {key: value for key, value in ds_config.items() if key != "scheduler"}
        # Before 0.19.6 the engine removes settings from the ds_config.
        self._optimizer_params = copy.deepcopy((config.get("optimizer") or {}).get("params") or {})
        trainable = [p for module in chosen.values() for p in module.parameters() if p.requires_grad]
        self.frozen = not trainable
        placeholder = None
        optimizer: torch.optim.Optimizer | None = None
        if self.frozen:
            first = next(p for module in chosen.values() for p in module.parameters() if p.is_floating_point())
            placeholder = nn.Parameter(torch.zeros(1, dtype=first.dtype, device=first.device))
            config["zero_force_ds_cpu_optimizer"] = False  # the ds_config's optimizer is the replicated part's
            optimizer = torch.optim.AdamW([placeholder], lr=0.0, weight_decay=0.0)
        elif make_optimizer is not None:
            optimizer = make_optimizer(list(dict.fromkeys(trainable)))
        self._shell = Shell(model, chosen, placeholder)
        self._hooks: list[Any] = []
        self.engine, *_ = deepspeed.initialize(model=self._shell, optimizer=optimizer, config=config)
        try:
            self._take_over(model, chosen)
        except BaseException:
            self.destroy()
            raise

    def _take_over(self, model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
        """Check the engine that DeepSpeed has made, and hook into it and into the model."""
        check_engine(self.engine)
        zero = self.engine.optimizer
        if getattr(zero, "torch_autocast_gradscaler", None) is not None:
            raise UnsupportedError("partial ZeRO-3: torch_autocast in float16 is not supported; use bfloat16 or fp16")
        if self.frozen:
            self.engine.client_optimizer = None  # so that optimizer_name() is the ds_config's, for the replicated part
        self.optimizer: torch.optim.Optimizer = self.engine.basic_optimizer  # has the learning rates of the step
        self._replicated_norm = 0.0
        self._own_norm_groups = zero._get_norm_groups
        zero._get_norm_groups = self._norm_groups  # of this optimizer alone
        self._anchor = torch.zeros((), device=self.engine.device, requires_grad=True)
        self._inside, self._depth = False, 0
        self._entered = set(entry_modules(chosen))
        self._hooks.append(model.register_forward_pre_hook(self._enter_model))
        for module in dict.fromkeys(module for top in chosen.values() for module in top.modules()):
            self._hooks.append(module.register_forward_pre_hook(self._enter_chosen, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._leave_chosen, always_call=True))

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the full model's forward through the engine. Collective."""
        self._inside, self._depth = True, 0
        try:
            return self.engine(*args, **kwargs)
        finally:
            self._inside = False

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> Any:
        """Run the engine's backward. Collective, also where `loss` depends on no trainable parameter."""
        return self.engine.backward(with_gradient(self._anchor, loss), **kwargs)

    def is_boundary(self) -> bool:
        """Return whether the next `step` updates parameters."""
        managed = getattr(self.engine, "managed_gradient_accumulation", None)  # since deepspeed 0.19.4
        return bool(self.engine.is_gradient_accumulation_boundary() or (managed is not None and not managed()))

    def step(self, replicated_norm: float) -> float | None:
        """Step at a boundary, given the norm of the replicated part's gradients, times the loss scale. Collective.

        Returns the factor that unscales and clips these gradients; None if the step is skipped.
        """
        self._replicated_norm = replicated_norm
        if self.engine.fp16_enabled() and not math.isfinite(replicated_norm):
            self.engine.optimizer.inf_or_nan_tracker.fill_(True)
        self.engine.step()
        if self.engine.optimizer.overflow:
            return None
        # The arithmetic of stage3.py's unscale_and_clip_grads, so that both parts are clipped alike. If the loss scale
        # has just grown, it takes the new one.
        limit, scale = self.engine.gradient_clipping(), float(self.engine.optimizer.loss_scale)
        clip = (float(self.engine.get_global_grad_norm()) + 1e-6) / limit if limit > 0 else 1.0
        return 1.0 / (scale * max(clip, 1.0))

    def optimizer_over(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the ds_config's optimizer over parameters outside of the engine, which live on its device.

        Where offload_optimizer asks for DeepSpeed's CPU Adam, which steps parameters in host memory, it is torch's.
        """
        name, params = str(self.engine.optimizer_name()).lower(), copy.deepcopy(self._optimizer_params)
        if self.engine.zero_use_cpu_optimizer() and name in ("adam", "adamw"):
            decoupled = name == "adamw" or params.get("adam_w_mode", True)
            kept = {key: params[key] for key in ("lr", "betas", "eps", "weight_decay") if key in params}
            return (torch.optim.AdamW if decoupled else torch.optim.Adam)(parameters, **kept)
        if params:
            self.engine.optimizer_params().update(params)
        return self.engine._configure_basic_optimizer(parameters)

    def _norm_groups(self) -> list[torch.Tensor]:
        """See [Note: one more norm group]."""
        norm = torch.tensor(self._replicated_norm, dtype=torch.float32, device=self.engine.device)
        return [*self._own_norm_groups(), norm]

    def destroy(self) -> None:
        """Remove all hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self.engine.destroy()

    def _enter_model(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # Evaluation calls the model itself, not the engine, which resets this at the start of a forward.
        if not self._inside:
            self.engine.optimizer.parameter_offload.get_param_coordinator().reset_step()

    def _enter_chosen(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See [Note: the same graph on all ranks]."""
        self._depth += 1
        if self._inside and self._depth == 1:
            self._entered.add(module)
        # Outside of a forward it is recomputation, which may start at any depth.
        if not torch.is_grad_enabled() or (self._inside and self._depth > 1) or module not in self._entered:
            return None
        return arguments_with_gradient(self._anchor, module, args, kwargs)

    def _leave_chosen(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._depth -= 1


def full_state_dict(model: nn.Module, *, without_frozen: bool) -> dict[str, torch.Tensor] | None:
    """Return the tensors of a model's full state dict in host memory on rank 0, None on the others. Collective."""
    rank = deepspeed.comm.get_rank()
    full: dict[int, torch.Tensor] = {}  # by identity: a tied parameter has several names
    state = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)  # and not an extra state
        and (value.requires_grad or not (without_frozen and isinstance(value, nn.Parameter)))
    }
    for value in state.values():
        if id(value) not in full:
            with deepspeed.zero.GatheredParameters([value], enabled=is_partitioned(value)):
                full[id(value)] = value.detach().to("cpu", copy=True) if rank == 0 else torch.empty(0)
    return {name: full[id(value)] for name, value in state.items()} if rank == 0 else None


def _refuse(ds_config: Mapping[str, Any]) -> None:
    def section(name: str) -> Mapping[str, Any]:
        return ds_config.get(name) or {}

    stage3 = section("zero_optimization")
    offload = stage3.get("offload_optimizer") or {}
    refused = {
        "sequence_parallel_size": ds_config.get("sequence_parallel_size", 1) > 1,
        "tensor_parallel": section("tensor_parallel").get("autotp_size", 0) > 1,
        "expert_parallel": section("expert_parallel").get("enabled"),
        "checkpoint.use_node_local_storage": section("checkpoint").get("use_node_local_storage"),
        "zero_optimization.zenflow": stage3.get("zenflow"),
        "zero_optimization.offload_optimizer.super_offload": offload.get("super_offload"),
        "hybrid_engine": section("hybrid_engine").get("enabled"),
        "optimizer.type Muon": str(section("optimizer").get("type")).lower() == "muon",
    }
    if names := [name for name, is_set in refused.items() if is_set]:
        raise UnsupportedError(f"partial ZeRO-3 does not support {', '.join(names)}; remove it from the ds_config")


def scheduler_maker(section: Mapping[str, Any]) -> Callable[[torch.optim.Optimizer], Any]:
    """Return what makes the lr scheduler of a ds_config's "scheduler" section, DeepSpeed's or torch's."""
    # Source: deepspeed 0.19.8 runtime/engine.py, _scheduler_from_config.
    name = section.get("type")
    owner = lr_schedules if name in lr_schedules.VALID_LR_SCHEDULES else torch.optim.lr_scheduler
    scheduler: Callable[..., Any] | None = getattr(owner, str(name), None)
    if scheduler is None:
        raise ConfigError(f"ds_config scheduler.type: {name!r} is not an lr scheduler of DeepSpeed or torch")
    return functools.partial(scheduler, **(section.get("params") or {}))


# -- what enters the partitioned part --------------------------------------------------------------------------------


class _NeedsGradient(torch.autograd.Function):
    """Returns a copy of a tensor that needs a gradient, as `anchor` does, and drops the gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:  # noqa: ARG004
        return None, None


def arguments_with_gradient(
    anchor: torch.Tensor, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a module's forward with tensors that need a gradient."""
    names: list[str] = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    with contextlib.suppress(TypeError, ValueError):  # not written in Python
        names = [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in positional]
    named = zip(args, chain(names, repeat("")), strict=False)
    return tuple(with_gradient(anchor, value, name) for value, name in named), with_gradient(anchor, kwargs)


def with_gradient(anchor: torch.Tensor, value: Any, name: str = "") -> Any:
    """Return `value` with every floating-point tensor in it made to need a gradient.

    `name` is that of the argument. Masks and positions stay as they are: they depend on no parameter, and attention
    kernels want them without a gradient.
    """
    if "mask" in name or "position" in name:
        return value
    if isinstance(value, torch.Tensor):
        lacks = value.is_floating_point() and not value.requires_grad
        return _NeedsGradient.apply(anchor, value) if lacks else value
    if isinstance(value, MutableMapping):  # a copy keeps its class: ModelOutput, BatchFeature
        mapping = copy.copy(value)
        for key, item in value.items():
            mapping[key] = with_gradient(anchor, item, str(key))
        return mapping
    if type(value) in (list, tuple):
        return type(value)(with_gradient(anchor, item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **with_gradient(anchor, {key: getattr(value, key) for key in names}))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return value._replace(**with_gradient(anchor, value._asdict()))
    return value


def entry_modules(chosen: Mapping[str, nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules through which tensors enter the chosen part: the items of containers, which run no forward."""
    for module in chosen.values():
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield from entry_modules(dict(module.named_children()))
        else:
            yield module
