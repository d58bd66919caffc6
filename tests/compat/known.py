"""The differences from stock that `make compat` is known to find."""

from __future__ import annotations

from typing import NamedTuple

from packaging.version import Version


class Difference(NamedTuple):
    """A difference from stock: a row of tests/compat/RESULTS.md.

    Attributes:
        package, first, last: the releases that have it, both ends included.
        models: of tests/compat/compare.py that show it.
        topic: of theirs: "buffers", "saved names".
        concerns: how the names of such parameters or buffers end.
    """

    package: str
    first: str
    last: str
    models: tuple[str, ...]
    topic: str
    concerns: str

    def applies_to(self, version: str) -> bool:
        """Return whether a release of the package has it."""
        return Version(self.first) <= Version(Version(version).public) <= Version(self.last)


KNOWN = (
    # Stock computes rotary_emb.inv_freq in the dtype of the weights, others in float32.
    Difference(
        package="transformers",
        first="5.15.0",
        last="5.22.2",
        models=("Llama", "Qwen2", "Mixtral"),
        topic="buffers",
        concerns="rotary_emb.inv_freq",
    ),
    # What stock loaded is saved as LayerNorm.gamma and beta, what others loaded as weight and bias.
    Difference(
        package="transformers",
        first="5.6.0",
        last="5.24.0",
        models=("BERT",),
        topic="saved names",
        concerns="LayerNorm.weight",
    ),
)
