"""LLaMA-Factory: its `ModelEngine`, and the load of its v1.

`ModelEngine` turns arguments into a loaded model that is ready for `deepspeed.initialize`. It works in the order of
LLaMA-Factory v1: process group, ds_config, processor, model configuration, model.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import warnings
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from lowmem_load import foreign_names
from lowmem_load.api.load_into import load_into
from lowmem_load.api.load_model import load_model, load_request
from lowmem_load.api.request import Request
from lowmem_load.config.ds_config import Precision
from lowmem_load.config.settings import read_settings
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.dtensor.mesh import fsdp_over_all_ranks
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.hf import active, names
from lowmem_load.hf.load_lock import load_lock
from lowmem_load.hf.remote_names import find_folder
from lowmem_load.integrations.llamafactory_arguments import PRECISIONS, read_arguments
from lowmem_load.pipeline.load import Options
from lowmem_load.replaced import Handlers


class ModelEngine:
    """Loads a model with its processor, ready for `deepspeed.initialize(model=..., config=engine.ds_config)`.

    With `name: fsdp2` the model is sharded by FSDP2 over all ranks instead, layer by layer, and ready to be trained.

    Every rank constructs one. A process may construct several, one after the other. None leaves a DeepSpeed
    configuration visible to transformers, even if it fails.

    Args:
        model_args: `ModelArguments`, a mapping with these names, a YAML file, or another dataclass with these fields.
            A mapping or file may be that of a whole pipeline; see docs/howto/other_frameworks.md.
        dist_config: `DistConfig`, a mapping with these names, or a YAML file; None if model_args has it.
        is_train: True selects train mode and gradient checkpointing, False eval mode.

    Attributes:
        args, dist_config, is_train: the arguments, as dataclasses.
        extra: top-level keys of a pipeline file that are not the engine's.
        distributed: the `DistributedInterface`.
        precision: of the stored parameters and of DeepSpeed; fp32 with fsdp2.
        ds_config: the resolved ds_config. It states bf16.enabled and fp16.enabled, and has "auto" only in optimizer and
            scheduler, whose values the training loop knows. You may add to it. Empty with fsdp2.
        hf_deepspeed_config: the `HfDeepSpeedConfig` that was active while loading. Only the engine keeps it alive.
            transformers sees it inside `deepspeed_visible`. None with fsdp2.
        processor: of AutoProcessor or AutoTokenizer; None if the checkpoint has none.
        model_config: `model.config`.
        model: the model; `lowmem_load.load_report(model)` says how it was loaded.

    Collective: all ranks.

    Raises:
        ConfigError: an argument or the ds_config cannot be used; a freeze pattern matches no parameter.
        CheckpointError: the model or its processor exists but cannot be loaded.
        UnsupportedError: the model cannot be streamed, or cannot checkpoint activations as asked.
        RankError: another rank failed; every rank raises the same error. (Unusable arguments stop only their own rank,
            since there is no process group yet.)
    """

    def __init__(self, model_args: Any, dist_config: Any = None, is_train: bool = True) -> None:
        self.args, self.dist_config, self.extra = read_arguments(model_args, dist_config)
        self.is_train = is_train
        timeout = self.dist_config.timeout
        self.distributed = DistributedInterface(timeout=None if timeout is None else timedelta(seconds=timeout))
        self.hf_deepspeed_config: Any = None
        self.ds_config: dict[str, Any] = {}
        if self.dist_config.name == "fsdp2":
            self._load_sharded()
        else:
            self._load_partitioned()
        self.model_config = self.model.config
        with self.distributed.step("setting up the model", name=str(self.args.model)):
            self._freeze()
            self._set_mode()

    def _load_sharded(self) -> None:
        """Load the model for FSDP2: fp32 masters under a policy of mixed precision, as LLaMA-Factory v1 stores them."""
        config = self.dist_config
        with self.distributed.step("preparing", name=str(self.args.model)):
            name, kwargs = find_folder(str(self.args.model), self._from_pretrained_kwargs())
            if self.args.bf16 or self.args.fp16:
                raise ConfigError("bf16 and fp16 belong to deepspeed; dist_config.mixed_precision says it for fsdp2")
            self.processor = names.load_processor(name, kwargs)
        self.precision = Precision.FP32
        mesh, policy = fsdp_over_all_ranks(
            self.distributed.device.type,
            self.distributed.world_size,
            compute_dtype=PRECISIONS[config.mixed_precision],
            reshard_after_forward=config.reshard_after_forward,
            offload_params=config.offload_params,
            pin_memory=config.pin_memory,
        )
        self.model = load_model(
            name,
            mesh,
            auto_class=self.args.auto_class,
            dtype=torch.float32,
            stream=self.args.stream,
            policy=policy,
            **kwargs,
        )

    def _load_partitioned(self) -> None:
        """Load the model into ZeRO-3 partitions."""
        with self.distributed.step("preparing", name=str(self.args.model)) as step:
            name, kwargs = find_folder(str(self.args.model), self._from_pretrained_kwargs())
            settings = read_settings(
                self.dist_config.config_file,
                world_size=self.distributed.world_size,
                absent="auto",
                trainer_bf16=self.args.bf16,
                trainer_fp16=self.args.fp16,
            )
            step.digest = settings.compared
            self.processor = names.load_processor(name, kwargs)
            settings = settings.for_model(names.model_config(name, kwargs))
        self.precision = settings.precision
        self.ds_config = copy.deepcopy(dict(settings.ds_config))
        request = Request(name, self.args.auto_class, "auto", kwargs)
        # transformers gets a copy: it must not see what the caller adds to ds_config, such as an optimizer.
        with load_lock(), active.deepspeed_config(settings.ds_config) as self.hf_deepspeed_config:
            options = Options(stream=self.args.stream)
            self.model = load_request(lambda: (request, settings), self.distributed, options)

    def deepspeed_visible(self) -> contextlib.AbstractContextManager[Any]:
        """Make transformers see this engine's ds_config inside the block, as it did during the load.

        `from_pretrained` of another model needs it. Does nothing with fsdp2.
        """
        config = self.hf_deepspeed_config
        return contextlib.nullcontext() if config is None else active.deepspeed_config(config)

    def _from_pretrained_kwargs(self) -> dict[str, Any]:
        own = {key: getattr(self.args, key) for key in ("trust_remote_code", "revision", "attn_implementation")}
        return {key: value for key, value in own.items() if value is not None} | dict(self.args.model_kwargs)

    def _freeze(self) -> None:
        # A pattern may name a tied parameter by any of its names.
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        matches = {pattern: fnmatch.filter(parameters, pattern) for pattern in self.args.freeze}
        unmatched = [repr(pattern) for pattern, matching in matches.items() if not matching]
        if unmatched:
            raise ConfigError(
                f"freeze: {', '.join(unmatched)} match(es) none of the model's {len(parameters)} parameters; "
                f"their names look like {', '.join(list(parameters)[:3])}"
            )
        for name in {name for matching in matches.values() for name in matching}:
            parameters[name].requires_grad_(False)

    def _set_mode(self) -> None:
        self.model.train(self.is_train)
        if not self.is_train or self.args.gradient_checkpointing is False:
            return
        try:
            names.enable_checkpointing(self.model, {"use_reentrant": False, **self.args.gradient_checkpointing_kwargs})
        except UnsupportedError as error:
            if self.args.gradient_checkpointing:  # the user asked for it
                raise
            if self.distributed.rank == 0:
                warnings.warn(f"{error}; it trains without", stacklevel=3)


def load_handlers(options: Options) -> Handlers:
    """Return what fills as `load_into` does.

    Source: LLaMA-Factory 0.9.5 `v1/plugins/trainer_plugins/distributed/fsdp2.py`, `FSDP2Engine.materialize_and_load`.
    """

    def load(_: Any, __: Any, model: nn.Module, name: str) -> None:
        report = load_into(model, name)
        if options.on_load is not None:
            options.on_load(report)

    return {foreign_names.LLAMAFACTORY_LOAD: load}
