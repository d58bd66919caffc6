"""What stock ZeRO-3 rounds and a load here does not, rounded, so that losses can be compared to the last bit."""

from __future__ import annotations

import importlib

from torch import nn

from tests.compat.known import KNOWN


def round_as_stock(model: nn.Module) -> None:
    """Casts the buffers that stock casts with the installed releases, if any; see tests/compat/RESULTS.md."""
    ends = tuple(
        difference.concerns.rpartition(".")[2]
        for difference in KNOWN
        if difference.topic == "buffers"
        and difference.applies_to(importlib.import_module(difference.package).__version__)
    )
    for name, buffer in model.named_buffers():
        if ends and name.endswith(ends):
            buffer.data = buffer.data.to(model.dtype)
