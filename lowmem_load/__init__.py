"""lowmem_load: load Hugging Face models straight into DeepSpeed ZeRO-3 partitions."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing's own would import typing, in every process of a job (see integrations/startup_hook.py)
if TYPE_CHECKING:
    from typing import Any

    from lowmem_load.api.load_into import load_into
    from lowmem_load.api.load_model import load_model, load_report
    from lowmem_load.api.plan_model import plan
    from lowmem_load.api.streaming import streaming
    from lowmem_load.distributed.process_group import DistributedInterface
    from lowmem_load.errors import (
        CheckpointError,
        ConfigError,
        IncompatibleVersionError,
        LoadOrderWarning,
        LowMemLoadError,
        NotStreamedWarning,
        RankError,
        UnsupportedError,
    )
    from lowmem_load.integrations.arguments import DistConfig, ModelArguments
    from lowmem_load.integrations.install import install
    from lowmem_load.integrations.model_engine import ModelEngine
    from lowmem_load.partial.initialize import initialize, partial_zero3
    from lowmem_load.pipeline.verify_checkpoint import verify_checkpoint
    from lowmem_load.planning.load_plan import LoadPlan
    from lowmem_load.report import LoadReport
    from lowmem_load.resume.consolidate import consolidate
    from lowmem_load.resume.load_checkpoint import load_checkpoint
    from lowmem_load.saving.model_digest import model_digest
    from lowmem_load.saving.save import save_model

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DistConfig",
    "DistributedInterface",
    "IncompatibleVersionError",
    "LoadOrderWarning",
    "LoadPlan",
    "LoadReport",
    "LowMemLoadError",
    "ModelArguments",
    "ModelEngine",
    "NotStreamedWarning",
    "RankError",
    "UnsupportedError",
    "consolidate",
    "initialize",
    "install",
    "load_checkpoint",
    "load_into",
    "load_model",
    "load_report",
    "model_digest",
    "partial_zero3",
    "plan",
    "save_model",
    "streaming",
    "verify_checkpoint",
]

_HOMES = {
    "errors": (
        *("CheckpointError", "ConfigError", "IncompatibleVersionError", "LoadOrderWarning", "LowMemLoadError"),
        *("NotStreamedWarning", "RankError", "UnsupportedError"),
    ),
    "pipeline.verify_checkpoint": ("verify_checkpoint",),
    "saving.model_digest": ("model_digest",),
    "api.load_into": ("load_into",),
    "api.load_model": ("load_model", "load_report"),
    "api.plan_model": ("plan",),
    "api.streaming": ("streaming",),
    "partial.initialize": ("initialize", "partial_zero3"),
    "integrations.arguments": ("DistConfig", "ModelArguments"),
    "integrations.install": ("install",),
    "integrations.model_engine": ("ModelEngine",),
    "planning.load_plan": ("LoadPlan",),
    "distributed.process_group": ("DistributedInterface",),
    "report": ("LoadReport",),
    "resume.consolidate": ("consolidate",),
    "resume.load_checkpoint": ("load_checkpoint",),
    "saving.save": ("save_model",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import what is asked for: planning needs no DeepSpeed, which takes seconds to import."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
