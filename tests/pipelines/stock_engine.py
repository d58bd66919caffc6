"""What `ModelEngine` would be without lowmem_load, so that the same script of `examples/` can be compared."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import HfDeepSpeedConfig

from lowmem_load.config.ds_config import precision_of, read_ds_config
from lowmem_load.config.settings import hidden_size_of, resolve_auto
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.integrations.llamafactory import read_arguments
from lowmem_load.models.model_class import enable_checkpointing, model_config


class StockEngine:
    """The attributes of `ModelEngine` that the trainer uses; the model is loaded by transformers' ZeRO-3 path."""

    def __init__(self, config: dict[str, Any]) -> None:
        args, dist_config, self.extra = read_arguments(config)
        ds_config = read_ds_config(dist_config.config_file)
        self.ds_config = resolve_auto(
            ds_config,
            world_size=DistributedInterface().world_size,
            hidden_size=hidden_size_of(model_config(str(args.model), {})),
            dtype=precision_of(ds_config, absent="auto", trainer_bf16=args.bf16, trainer_fp16=args.fp16),
        )
        self.hf_deepspeed_config = HfDeepSpeedConfig(self.ds_config)
        self.processor = AutoTokenizer.from_pretrained(args.model)
        self.model = AutoModelForCausalLM.from_pretrained(args.model, attn_implementation=args.attn_implementation)
        self.model.train()
        if args.gradient_checkpointing:
            enable_checkpointing(self.model, {"use_reentrant": False})
