"""`initialize_partial` of partial ZeRO-3, and `partial_zero3`, inside which `deepspeed.initialize` calls it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from deepspeed import comm
from torch import nn

from lowmem_load.config.ds_config import AUTO, comparable, given_ds_configs
from lowmem_load.config.settings import Partition, Settings, read_settings
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.engines.engine import PartitionedPart, scheduler_class
from lowmem_load.engines.hooks import asked_first, is_shell
from lowmem_load.engines.parameters import full_numel, group_of, is_partitioned
from lowmem_load.engines.zero3_target import check_ties, choose, chosen_parameters, mark, partitioned_modules
from lowmem_load.errors import ConfigError, UnsupportedError, listed
from lowmem_load.foreign_names import INITIALIZE
from lowmem_load.partial.partial_engine import PartialEngine
from lowmem_load.partial.replicated import ReplicatedPart, SplitOptimizer, options_of
from lowmem_load.replaced import replaced
from lowmem_load.text import fingerprint


def initialize_partial(
    model: nn.Module,
    ds_config: Any,
    *,
    partition: Partition | None = None,
    optimizer: torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    lr_scheduler: Any = None,
) -> PartialEngine:
    """Return an engine that trains part of `model` under ZeRO-3 and replicates the rest on every rank.

    Every partitioned module must run equally often and in the same order on all ranks, in every forward. Each rank may
    run or skip the rest, as its batch needs.

    Args:
        model: a model or composite of models. What was loaded into partitions is trained under ZeRO-3; the rest may be
            any `nn.Module`.
        ds_config: as for `load_model`, stage 3. Read only.
        partition: what to partition of a model that was not loaded into partitions. Its parameters are cast to the
            ds_config's precision, as DeepSpeed does; a loaded model keeps its dtypes.
        optimizer: over parameters of `model`, in groups of any learning rates, or a function that makes one from a
            list of parameters. It must not have stepped. Default: the ds_config's "optimizer" section, for both parts.
        lr_scheduler: a scheduler on `optimizer`, or a function that makes one from an optimizer. It steps when the
            engine does. Default: the ds_config's "scheduler" section, for both parts.

    Collective: all ranks.

    Raises:
        ConfigError: an argument or the ds_config cannot be used; nothing, or all, of the model is chosen.
        UnsupportedError: the ds_config has a feature that partial ZeRO-3 does not support.
        RankError: a rank failed, or ranks have different arguments; raised on every rank.

    Example:
        model = load_model("Qwen/Qwen3-8B", ds_config, partition="model.layers.*").train()
        engine = initialize_partial(model, ds_config)
        engine.backward(engine(**batch).loss)
        engine.step()
    """
    distributed = DistributedInterface()
    with distributed.step("preparing partial ZeRO-3") as step:
        settings = _settings(ds_config, model, distributed.world_size)
        config = settings.ds_config
        chosen, is_plain = _chosen(model, partition, distributed.world_size)
        split = _split(model, optimizer, config, chosen_parameters(chosen))
        if config.get("scheduler"):
            scheduler_class(config["scheduler"])
        step.digest = _digest(model, chosen, config, split)
    derive = None if split is None else lambda parameters: split.derive({id(p): p for p in parameters})
    with contextlib.ExitStack() as undo:  # an error on any rank takes the hooks off the model
        with distributed.step("making the ZeRO-3 engine"):
            part = PartitionedPart(model, chosen, config, derive)
            undo.callback(part.destroy)
        with distributed.step("moving the replicated part"):  # before the broadcast, which cannot report a failure
            mark(chosen.values())
            replicated = ReplicatedPart(model, chosen)
            undo.callback(replicated.destroy)
            replicated.move_to(part.engine.device, settings.dtype if is_plain else None)
        with distributed.step("broadcasting the replicated part"):
            replicated.broadcast()
        with distributed.step("making the engine of partial ZeRO-3"):
            if split is None:
                trained = [name for name, p in replicated.parameters.items() if p.requires_grad]
                replicated.train(dict.fromkeys(trained, 0), part.engine.device)
                replicated.optimizer = part.optimizer_over([*replicated.masters.values()]) if trained else None
            else:
                replicated.train(split.groups_of(model), part.engine.device)
                masters = {id(replicated.parameters[name]): master for name, master in replicated.masters.items()}
                replicated.optimizer = split.derive(masters)
            engine = PartialEngine(model, part, replicated, split)
            engine.lr_scheduler = _lr_scheduler(lr_scheduler, config.get("scheduler"), engine.optimizer.leader)
        undo.pop_all()
    return engine


def _lr_scheduler(lr_scheduler: Any, section: Mapping[str, Any] | None, leader: torch.optim.Optimizer) -> Any:
    """Return the lr scheduler, given one, a function that makes one, or a ds_config's section."""
    if lr_scheduler is None and section:
        return scheduler_class(section)(leader, **(section.get("params") or {}))
    if lr_scheduler is None or hasattr(lr_scheduler, "step"):
        return lr_scheduler
    return lr_scheduler(leader)


def _settings(ds_config: Any, model: nn.Module, world_size: int) -> Settings:
    settings = read_settings(ds_config, world_size=world_size)
    if settings.stage != 3:
        raise ConfigError(f"partial ZeRO-3 needs stage 3, the ds_config has stage {settings.stage}")
    resolved = settings.for_model(getattr(model, "config", None))
    for section in ("optimizer", "scheduler"):
        params = (resolved.ds_config.get(section) or {}).get("params") or {}
        open_keys = [key for key, value in params.items() if value == AUTO]
        if open_keys:
            raise ConfigError(f'ds_config {section}.params: {", ".join(open_keys)} is "auto"; write values')
    return resolved


def _chosen(model: nn.Module, partition: Partition | None, world_size: int) -> tuple[dict[str, nn.Module], bool]:
    """Return the chosen modules, and whether no parameter of the model is partitioned yet."""
    already = partitioned_modules(model, is_partitioned)
    chosen = already if partition is None else choose(model, partition)
    if not chosen:
        raise ConfigError(
            f"{type(model).__name__} was not loaded into partitions; pass partition, such as the name of its language "
            "model, to say what ZeRO-3 partitions"
        )
    if "" in chosen:
        raise ConfigError("all of the model is to be partitioned; that is what deepspeed.initialize does")
    inside = chosen_parameters(chosen)
    stray = [name for name, p in model.named_parameters() if is_partitioned(p) and id(p) not in inside]
    if stray:
        raise ConfigError(f"partition leaves out {listed(stray)}, which is partitioned already; choose it too")
    if any(is_partitioned(p) and comm.get_world_size(group_of(p)) != world_size for p in model.parameters()):
        raise UnsupportedError(
            "the model was loaded with data_parallel_group, but partial ZeRO-3 trains among all ranks; load it without"
        )
    check_ties(model, chosen)
    return chosen, not already


def _digest(
    model: nn.Module,
    chosen: Mapping[str, nn.Module],
    config: Mapping[str, Any],
    split: SplitOptimizer | None,
) -> dict[str, str]:
    """Return what must be equal on all ranks, by topic."""
    groups = [] if split is None else split.optimizer.param_groups
    inside = {id(buffer) for module in chosen.values() for buffer in module.buffers()}
    outside = [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) not in inside]
    number_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
    topics = {
        "partition": list(chosen),
        "parameters": [f"{name} {full_numel(p)} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters()],
        "buffers": [f"{name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in outside],
        "optimizer": [type(split and split.optimizer).__name__, *map(comparable, map(options_of, groups))],
        "optimizer's parameters": [f"{name} {number_of.get(id(p))}" for name, p in model.named_parameters()],
        "ds_config": [comparable(config)],
    }
    return {topic: fingerprint(map(str, lines)) for topic, lines in topics.items()}


def _split(model: nn.Module, optimizer: Any, config: Mapping[str, Any], inside: set[int]) -> SplitOptimizer | None:
    """Check the user's optimizer and return it; None if the ds_config's is used."""
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("no parameter of the model requires a gradient, so there is nothing to train")
    if optimizer is None:
        if not config.get("optimizer"):
            raise ConfigError('no optimizer: write an "optimizer" section in the ds_config, or pass optimizer')
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer([p for p in model.parameters() if p.requires_grad])
    to_train = {id(p) for p in model.parameters() if p.requires_grad}
    trained = to_train & {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not trained:
        raise ConfigError("optimizer has no trainable parameter of this model; make it from model.parameters()")
    if to_train & inside and not trained & inside:
        raise ConfigError(
            "optimizer has no trainable parameter of the partitioned part, though some require a gradient; add them, "
            "or freeze that part with requires_grad_(False)"
        )
    on_host = any(cls.__name__ == "DeepSpeedCPUAdam" for cls in type(optimizer).mro())
    if on_host and to_train - inside and DistributedInterface().device.type != "cpu":
        raise UnsupportedError(
            "DeepSpeedCPUAdam steps parameters in host memory, and the replicated part lives on the device; write an "
            '"optimizer" section in the ds_config: its Adam is then torch\'s for the replicated part'
        )
    return SplitOptimizer(optimizer)


# -- deepspeed.initialize, called by others ---------------------------------------------------------------------------

_TRANSLATED = (
    *("args", "model", "optimizer", "model_parameters", "lr_scheduler", "config", "config_params"),
    "dist_init_required",  # `initialize_partial` uses the process group that is there, else makes one
)


@contextlib.contextmanager
def partial_zero3(partition: Partition | None = None) -> Iterator[None]:
    """Inside, `deepspeed.initialize` makes a `PartialEngine` for a partly partitioned model, whoever calls it.

    For example, `with partial_zero3(): trainer.train()`. It uses `model`, `optimizer`, `model_parameters`,
    `lr_scheduler` and the ds_config, also that of `args`, and refuses any other argument with an `UnsupportedError`.
    Groups of parameters need an optimizer, or a function that makes one. A model that is fully partitioned gets
    DeepSpeed's own engine; so does a model without partitions, if no `partition` is given. On exit
    `deepspeed.initialize` acts as before.

    Args:
        partition: as for `initialize_partial`: for models that were not loaded with one.

    Example:
        model = load_model("Qwen/Qwen3-8B", ds_config, partition="model.layers.*").train()
        with partial_zero3():
            engine, *_ = deepspeed.initialize(model=model, config=ds_config)
    """

    def initialize_partly(arguments: Mapping[str, Any]) -> tuple[Any, Any, Any, Any] | None:
        model = arguments.get("model")
        if not isinstance(model, nn.Module) or not _is_partial(model, partition):
            return None
        with DistributedInterface().step("reading the arguments of deepspeed.initialize"):
            ds_config, optimizer = _translate({key: value for key, value in arguments.items() if value is not None})
        engine = initialize_partial(
            model,
            ds_config,
            partition=partition,
            optimizer=optimizer,
            lr_scheduler=arguments.get("lr_scheduler"),
        )
        return engine, engine.optimizer, None, engine.lr_scheduler

    with replaced({INITIALIZE: asked_first(INITIALIZE, initialize_partly)}, everywhere=True):
        yield


def _is_partial(model: nn.Module, partition: Partition | None) -> bool:
    if is_shell(model):  # the call that a partial engine makes
        return False
    chosen = partitioned_modules(model, is_partitioned)
    inside = chosen_parameters(chosen)
    in_part = bool(chosen) and any(id(p) not in inside for p in model.parameters())
    return in_part or bool(partition and not chosen)


def _translate(arguments: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the ds_config, and the optimizer as `initialize_partial` takes it."""
    args = arguments.get("args")
    refused = [name for name in arguments if name not in _TRANSLATED]
    refused += [f"args.{name}" for name in ("deepscale_config", "device_rank") if getattr(args, name, None) is not None]
    if refused:
        raise UnsupportedError(
            f"partial ZeRO-3 cannot follow {', '.join(refused)} of deepspeed.initialize; leave it out (make a "
            "DataLoader of training_data, for one)"
        )
    configs = given_ds_configs(arguments)
    if len(configs) != 1:
        raise ConfigError(f"deepspeed.initialize was given {len(configs)} ds_configs; give one, as config")
    optimizer, parameters = arguments.get("optimizer"), arguments.get("model_parameters")
    if parameters is None or isinstance(optimizer, torch.optim.Optimizer):  # DeepSpeed ignores them then
        return configs[0], optimizer
    groups = list(parameters)
    if optimizer is not None:
        return configs[0], lambda _: optimizer(groups)
    if not {id(p) for p in arguments["model"].parameters() if p.requires_grad} <= set(map(id, groups)):
        raise UnsupportedError(
            "model_parameters are groups, or not all that require a gradient: partial ZeRO-3 trains all parameters "
            "alike by the ds_config's optimizer; pass an optimizer over these groups instead"
        )
    return configs[0], None
