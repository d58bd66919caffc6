"""Partial ZeRO-3 for programs that make their engine with `deepspeed.initialize`, as Trainer and accelerate do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lowmem_load.config.ds_config import read_ds_config
from lowmem_load.config.settings import Partition
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.ds.hooks import hooked, is_shell
from lowmem_load.ds.parameters import is_partitioned
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.partial.initialize import initialize
from lowmem_load.partial.replicated import Average
from lowmem_load.targets.partition_choice import chosen_parameters, partitioned_modules

_FOLLOWED = {
    "args",
    "model",
    "optimizer",
    "model_parameters",
    "lr_scheduler",
    "config",
    "config_params",
    "dist_init_required",  # `initialize` uses the process group that is there, and makes one where there is none
}


@contextlib.contextmanager
def partial_zero3(partition: Partition | None = None, *, average: Average = "all") -> Iterator[None]:
    """Inside, `deepspeed.initialize` makes a `PartialEngine` for a partly partitioned model, whoever calls it.

    For example, `with partial_zero3(): trainer.train()`. It uses `model`, `optimizer`, `model_parameters` (parameters,
    or groups of them), `lr_scheduler` and the ds_config, also that of `args`, and refuses any other argument with an
    `UnsupportedError`. A model that is fully partitioned gets DeepSpeed's own engine; so does a model without
    partitions, if no `partition` is given. On exit everything is as it was.

    Args:
        partition: as for `lowmem_load.initialize`: for models that were not loaded with one.
        average: as for `lowmem_load.initialize`.
    """

    def initialize_partly(given: Mapping[str, Any]) -> tuple[Any, Any, Any, Any] | None:
        model = given.get("model")
        if not isinstance(model, nn.Module) or not _is_for_us(model, partition):
            return None
        with DistributedInterface().step("reading the arguments of deepspeed.initialize"):
            ds_config, optimizer = _followed({name: value for name, value in given.items() if value is not None})
        engine = initialize(
            model,
            ds_config,
            partition=partition,
            optimizer=optimizer,
            lr_scheduler=given.get("lr_scheduler"),
            average=average,
        )
        return engine, engine.optimizer, None, engine.lr_scheduler

    with hooked(initialize_partly):
        yield


def _is_for_us(model: nn.Module, partition: Partition | None) -> bool:
    if is_shell(model):  # the call that a partial engine makes
        return False
    chosen = partitioned_modules(model, is_partitioned)
    inside = chosen_parameters(chosen)
    in_part = bool(chosen) and any(id(p) not in inside for p in model.parameters())
    return in_part or bool(partition and not chosen)


# -- what deepspeed.initialize was given -----------------------------------------------------------------------------


def _followed(given: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the ds_config, and the optimizer as `lowmem_load.initialize` takes it.

    Raises:
        ConfigError: arguments contradict each other.
        UnsupportedError: there are arguments that cannot be followed.
    """
    args = given.get("args")
    refused = [name for name in given if name not in _FOLLOWED]
    refused += [f"args.{name}" for name in ("deepscale_config", "device_rank") if getattr(args, name, None) is not None]
    if refused:
        raise UnsupportedError(
            f"partial ZeRO-3 cannot follow {', '.join(refused)} of deepspeed.initialize; leave it out (make a "
            "DataLoader of training_data, for one)"
        )
    configs = [given.get("config"), given.get("config_params"), getattr(args, "deepspeed_config", None)]
    configs = [config for config in configs if config is not None]
    if len(configs) != 1:
        raise ConfigError(f"deepspeed.initialize was given {len(configs)} ds_configs; give one, as config")
    optimizer, parameters = given.get("optimizer"), given.get("model_parameters")
    if parameters is None:
        return configs[0], optimizer
    return _over(_groups(parameters), given["model"], optimizer, configs[0])


def _groups(parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """Return `model_parameters`, which may be a generator, as groups."""
    entries = list(parameters)
    if not entries or not isinstance(entries[0], Mapping):
        entries = [{"params": entries}]
    return [
        {**group, "params": [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])}
        for group in entries
    ]


def _over(groups: list[dict[str, Any]], model: nn.Module, optimizer: Any, ds_config: Any) -> tuple[Any, Any]:
    """Return the ds_config and an optimizer over these groups."""
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    listed = {id(p) for group in groups for p in group["params"]} & trainable
    if isinstance(optimizer, torch.optim.Optimizer):
        if listed != {id(p) for group in optimizer.param_groups for p in group["params"]} & trainable:
            raise ConfigError("model_parameters are not the optimizer's parameters; leave out model_parameters")
        return ds_config, optimizer
    plain = len(groups) == 1 and groups[0].keys() == {"params"}
    if optimizer is not None:
        return ds_config, lambda _: optimizer(groups[0]["params"] if plain else groups)
    if plain and listed == trainable:
        return ds_config, None  # the ds_config's optimizer has these parameters in any case
    config = read_ds_config(ds_config)
    # By default DeepSpeed refuses to step an optimizer of torch in host memory.
    return {"zero_force_ds_cpu_optimizer": False, **config}, _maker(groups, config.get("optimizer"))


def _maker(groups: list[dict[str, Any]], section: Any) -> Callable[[Any], torch.optim.Optimizer] | None:
    """Return a function that makes the optimizer of the ds_config's section over these groups; None without a section.

    The optimizer is torch's: DeepSpeed makes its own inside an engine, which has only part of the groups.
    """
    if not section:
        return None

    def make(_: Any) -> torch.optim.Optimizer:
        name, params = str(section.get("type")), dict(section.get("params") or {})
        if name.lower() in ("adam", "adamw"):
            if not params.pop("torch_adam", False):
                params.setdefault("weight_decay", 0.0)  # DeepSpeed's default; torch's AdamW has another
            params.pop("fp32_optimizer_states", None)
            adam_w_mode = params.pop("adam_w_mode", True)
            name = "AdamW" if name.lower() == "adamw" or adam_w_mode else "Adam"
        cls = getattr(torch.optim, name, None)
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            raise UnsupportedError(
                f"model_parameters with the ds_config's optimizer {name}: torch has no such optimizer; pass an "
                "optimizer over these groups"
            )
        try:
            return cls(groups, **params)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"ds_config optimizer.params or model_parameters: {error}") from error

    return make
