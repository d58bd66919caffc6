"""lowmem_load: load Hugging Face models straight into DeepSpeed ZeRO-3 partitions."""

from .arguments import DistConfig, ModelArguments
from .distributed import DistributedInterface
from .engine import ModelEngine
from .errors import (
    CheckpointError,
    ConfigError,
    IncompatibleVersionError,
    LoadOrderWarning,
    LowMemLoadError,
    PlanError,
    RankError,
    UnsupportedError,
)
from .install import install, uninstall
from .load import load_model, load_report, streaming
from .partial_engine import PartialEngine
from .partial_initialize import initialize
from .partial_trainer import partial_zero3
from .report import LoadReport

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
