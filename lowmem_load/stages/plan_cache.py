"""Where loads keep what describing a model came to, for those to come: what the environment says of it."""

from __future__ import annotations

import os

PLAN_CACHE = "LOWMEM_LOAD_PLAN_CACHE"
"""Variable of the environment: a folder."""


def plan_cache_folder() -> str | None:
    """Return the absolute path of the folder; None where nothing is kept."""
    folder = os.environ.get(PLAN_CACHE)
    return os.path.abspath(os.path.expanduser(folder)) if folder else None
