"""lowmem_load: load Hugging Face models straight into DeepSpeed ZeRO-3 partitions and FSDP2 shards."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing's own would import typing, in every process of a job (see integrations/startup_hook.py)
if TYPE_CHECKING:  # "as" makes a name public for type checkers
    from typing import Any

    __version__: str

    from lowmem_load.errors import CheckpointError as CheckpointError
    from lowmem_load.errors import ConfigError as ConfigError
    from lowmem_load.errors import FallbackWarning as FallbackWarning
    from lowmem_load.errors import LoadOrderWarning as LoadOrderWarning
    from lowmem_load.errors import LowMemLoadError as LowMemLoadError
    from lowmem_load.errors import RankError as RankError
    from lowmem_load.errors import UnsupportedError as UnsupportedError
    from lowmem_load.integrations.install import install as install
    from lowmem_load.load.lazy import lazy as lazy
    from lowmem_load.load.load_into import load_into as load_into
    from lowmem_load.load.load_model import get_load_report as get_load_report
    from lowmem_load.load.load_model import load_model as load_model
    from lowmem_load.load.load_model import plan as plan
    from lowmem_load.load.report import LoadReport as LoadReport
    from lowmem_load.models.model_folder import local_folder as local_folder
    from lowmem_load.partial.partial_engine import initialize_partial as initialize_partial
    from lowmem_load.partial.partial_engine import partial_zero3 as partial_zero3
    from lowmem_load.resume.consolidate import consolidate as consolidate
    from lowmem_load.resume.load_checkpoint import load_checkpoint as load_checkpoint
    from lowmem_load.weights_out.changes import Change as Change
    from lowmem_load.weights_out.changes import apply_changes as apply_changes
    from lowmem_load.weights_out.iter_weights import WeightSource as WeightSource
    from lowmem_load.weights_out.iter_weights import iter_weights as iter_weights
    from lowmem_load.weights_out.iter_weights import push_weights as push_weights
    from lowmem_load.weights_out.save import save_model as save_model

_HOMES = {
    "errors": (
        *("CheckpointError", "ConfigError", "LoadOrderWarning", "LowMemLoadError"),
        *("FallbackWarning", "RankError", "UnsupportedError"),
    ),
    "load.load_into": ("load_into",),
    "load.load_model": ("get_load_report", "load_model", "plan"),
    "load.lazy": ("lazy",),
    "partial.partial_engine": ("initialize_partial", "partial_zero3"),
    "integrations.install": ("install",),
    "models.model_folder": ("local_folder",),
    "load.report": ("LoadReport",),
    "resume.consolidate": ("consolidate",),
    "resume.load_checkpoint": ("load_checkpoint",),
    "weights_out.changes": ("Change", "apply_changes"),
    "weights_out.iter_weights": ("WeightSource", "iter_weights", "push_weights"),
    "weights_out.save": ("save_model",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:
    __all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    """Import what is asked for: planning needs no DeepSpeed, which takes seconds to import."""
    if name == "__version__":
        from importlib.metadata import version

        return version("lowmem-load")
    if name not in _HOME_OF:
        return import_module(f"{__name__}.renamed").old_name(name)
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
