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
    "PlanError",
    "RankError",
    "UnsupportedError",
    "install",
    "load_model",
    "load_report",
    "streaming",
    "uninstall",
]
