"""What stock ZeRO-3 rounds and a load here does not, rounded, so that losses can be compared to the last bit."""

from __future__ import annotations

import transformers
from packaging.version import Version
from torch import nn

ROUNDS_ROTARY = Version("5.15.0") <= Version(Version(transformers.__version__).public) <= Version("5.22.2")
"""Whether stock computes rotary_emb.inv_freq in the dtype of the weights, with this transformers; others in float32."""


def round_as_stock(model: nn.Module) -> None:
    """Casts the buffers that stock casts with the installed releases, if any; see tests/compat/RESULTS.md."""
    for name, buffer in model.named_buffers():
        if ROUNDS_ROTARY and name.endswith("inv_freq"):
            buffer.data = buffer.data.to(model.dtype)
