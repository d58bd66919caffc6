"""Figures of matplotlib, which is an extra."""

from __future__ import annotations

import os
from pathlib import Path
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


def check_picture(path: str | os.PathLike[str]) -> None:
    """Refuse a picture that could not be written, before the work that it shows.

    Raises:
        ConfigError: there is no matplotlib, no such folder, or the file's name ends in nothing that it can draw.
    """
    known = new_figure(1, 1).canvas.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in known:
        raise ConfigError(f"{os.fspath(path)}: a picture's name ends in one of .{', .'.join(sorted(known))}")
    if not Path(path).absolute().parent.is_dir() or Path(path).is_dir():
        raise ConfigError(f"{os.fspath(path)}: cannot be written: no such folder, or it is one")


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure in the format that the file's name ends in.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{os.fspath(path)}: cannot be written: {error}") from error
