"""Figures of matplotlib, which is an extra."""

from __future__ import annotations

from typing import Any

from lowmem_load.errors import ConfigError


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of so many inches.

    Raises:
        ConfigError: there is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("pictures need matplotlib: pip install 'lowmem-load[plots]'") from error
    return Figure(figsize=(width, height), layout="constrained")
