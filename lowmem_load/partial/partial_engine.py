"""Partial ZeRO-3, for models of which a rank does not run all parts in every step: `initialize_partial` and its engine.

ZeRO-3's collectives would not match across ranks there. Here they cover only what all ranks run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from deepspeed import comm
from torch import nn

from lowmem_load.config.ds_config import AUTO, comparable, given_ds_configs
from lowmem_load.config.settings import Partition, Settings, read_settings
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.engines.engine import PartitionedPart, full_state_dict, scheduler_maker
from lowmem_load.engines.engine_states import unusable_until_filled
from lowmem_load.engines.hooks import asked_first, is_shell
from lowmem_load.engines.parameters import full_numel, group_of, is_partitioned
from lowmem_load.engines.zero3_target import check_ties, choose, chosen_parameters, mark, partitioned_modules
from lowmem_load.errors import ConfigError, UnsupportedError, listed
from lowmem_load.files.stand_ins import origin
from lowmem_load.foreign_names import INITIALIZE
from lowmem_load.partial.replicated import (
    PartialOptimizer,
    ReplicatedPart,
    SplitOptimizer,
    load_replicated,
    options_of,
    save_replicated,
)
from lowmem_load.renamed import renamed_keywords
from lowmem_load.replaced import replaced
from lowmem_load.resume.load_checkpoint import load_checkpoint
from lowmem_load.text import fingerprint
from lowmem_load.training_checkpoints.zero_checkpoint import STEPS, find_folder
from lowmem_load.weights_out.folder import refuse_url
from lowmem_load.weights_out.rank_shards import Wrapper


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
        from_config = scheduler_maker(config["scheduler"]) if config.get("scheduler") else None
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
            scheduler: Any = from_config if lr_scheduler is None else lr_scheduler
            is_made = scheduler is None or hasattr(scheduler, "step")
            engine.lr_scheduler = scheduler if is_made else scheduler(engine.optimizer.leader)
        undo.pop_all()
    return engine


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
    model: nn.Module, chosen: Mapping[str, nn.Module], config: Mapping[str, Any], split: SplitOptimizer | None
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


# -- the engine --------------------------------------------------------------------------------------------------------


class PartialEngine(Wrapper):
    """Trains as a `DeepSpeedEngine` does: call it, `backward(loss)`, `step()`. Made by `initialize_partial`.

    Other attributes (`train_batch_size()`, `global_steps`, `get_global_grad_norm()`, ...) are those of the ZeRO-3
    engine of the partitioned part, whose counters are valid for both parts, or else of the model.

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
        own: Any = self.zero3  # which would pass on those of its part of the model
        return getattr(own if name in vars(own) or hasattr(type(own), name) else self.module, name)

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
        load_dir = origin(os.fspath(load_dir))
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
            model, ds_config, partition=partition, optimizer=optimizer, lr_scheduler=arguments.get("lr_scheduler")
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
