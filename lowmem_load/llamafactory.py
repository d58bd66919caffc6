"""Pipelines in the style of LLaMA-Factory v1: see docs/howto/other_frameworks.md."""

from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.integrations.llamafactory import DistConfig, ModelArguments, ModelEngine

__all__ = ["DistConfig", "DistributedInterface", "ModelArguments", "ModelEngine"]
