"""lowmem_load: load Hugging Face models straight into DeepSpeed ZeRO-3 partitions."""

from lowmem_load.errors import (
    CheckpointError,
    ConfigError,
    IncompatibleVersionError,
    LoadOrderWarning,
    LowMemLoadError,
    PlanError,
    RankError,
    UnsupportedError,
)
from lowmem_load.load import load_model, load_report, streaming
from lowmem_load.partial.engine import PartialEngine
from lowmem_load.partial.initialize import initialize
from lowmem_load.partial.trainer import partial_zero3
from lowmem_load.pipelines.arguments import DistConfig, ModelArguments
from lowmem_load.pipelines.install import install, uninstall
from lowmem_load.pipelines.model_engine import ModelEngine
from lowmem_load.ranks.process_group import DistributedInterface
from lowmem_load.report import LoadReport

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DistConfig",
    "DistributedInterface",
    "IncompatibleVersionError",
    "LoadOrderWarning",
    "LoadReport",
    "LowMemLoadError",
    "ModelArguments",
    "ModelEngine",
    "PartialEngine",
    "PlanError",
    "RankError",
    "UnsupportedError",
    "initialize",
    "install",
    "load_model",
    "load_report",
    "partial_zero3",
    "streaming",
    "uninstall",
]
