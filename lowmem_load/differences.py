"""What is known to differ between a model of stock ZeRO-3 and the same model loaded here, by release, as data.

Each entry is a row of docs/compatibility.md that `make compat` has measured. Both ends of its range were, and
tests/unit/test_differences.py fails if an environment inside the range did not show it, or one outside did.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass

from packaging.version import Version


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference from stock.

    Attributes:
        package, first, last: the releases that have it, both ends included.
        models: of tests/compat/compare.py that show it.
        topic: of theirs: "buffers", "saved names".
        concerns: how the name of a parameter or buffer ends without which a model cannot have it.
        text: what it is, in one sentence.
    """

    package: str
    first: str
    last: str
    models: tuple[str, ...]
    topic: str
    concerns: str
    text: str

    def applies_to(self, version: str) -> bool:
        """Return whether a release of the package has it."""
        return Version(self.first) <= Version(Version(version).public) <= Version(self.last)


KNOWN = (
    Difference(
        package="transformers",
        first="5.15.0",
        last="5.22.2",
        models=("Llama", "Qwen2", "Mixtral"),
        topic="buffers",
        concerns="rotary_emb.inv_freq",
        text="stock ZeRO-3 computes rotary_emb.inv_freq in the dtype of the weights, an ordinary load and this one in "
        "float32, so losses may differ from stock's",
    ),
    Difference(
        package="transformers",
        first="5.6.0",
        last="5.23.0",
        models=("BERT",),
        topic="saved names",
        concerns="LayerNorm.weight",
        text="what stock ZeRO-3 loaded may be saved as LayerNorm.gamma and beta, what an ordinary load or this one did "
        "as weight and bias",
    ),
)


def known_differences(names: Iterable[str]) -> list[str]:
    """Return a sentence for each known difference from stock of the installed releases."""
    present = tuple(names)
    return [
        f"{difference.text} ({difference.package} {difference.first} to {difference.last}; docs/compatibility.md)"
        for difference in KNOWN
        if difference.applies_to(importlib.import_module(difference.package).__version__)
        and any(name.endswith(difference.concerns) for name in present)
    ]
