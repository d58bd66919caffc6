"""The variable that switches lowmem_load on. `startup_hook.py` imports this in every process, so it imports nothing."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # typing's own would import typing
if TYPE_CHECKING:
    from typing import Any

SWITCH = "LOWMEM_LOAD_INSTALL"
"""The variable: OFF, ON, or STRICT and NO_DOWNLOAD with a comma, for `install(strict=True, download=False)`."""

OFF, ON, STRICT, NO_DOWNLOAD, STREAM = "0", "1", "strict", "no-download", "stream"  # the last as in 0.3


def keywords_of_run() -> dict[str, Any]:
    """Return the keywords of `install` that the variable gives."""
    text = os.environ.get(SWITCH) or OFF
    known = {ON: {}, STRICT: {"strict": True}, NO_DOWNLOAD: {"download": False}, STREAM: {"stream": True}}
    keywords: dict[str, Any] = {}
    for word in text.split(",") if text != OFF else ():
        if word not in known:
            from lowmem_load.errors import LowMemLoadError

            raise LowMemLoadError(
                f"{SWITCH} is {text!r}; expected {ON}, {STRICT}, {NO_DOWNLOAD}, or {OFF} to leave lowmem_load off"
            )
        keywords |= known[word]
    return keywords
