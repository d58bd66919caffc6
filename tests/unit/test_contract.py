"""What a package lacks is told in one error."""

from __future__ import annotations

import re

import pytest
import torch

from lowmem_load.contract import require, require_attributes
from lowmem_load.errors import IncompatibleVersionError

SUPPORTED = "torch >=1000,<1001"


def test_what_is_there_is_accepted() -> None:
    require(SUPPORTED, {"torch": ("nn.Module.forward",), "torch:Tensor": ("shape",)}, arguments={"torch:save": ("f",)})
    require_attributes(SUPPORTED, torch.ones(1), ("shape", "data.shape"))


def test_all_that_is_missing_is_in_one_error() -> None:
    with pytest.raises(IncompatibleVersionError) as caught:
        require(
            SUPPORTED,
            {"torch": ("nothing", "nn.nothing", "nn"), "torch.nowhere": ("a", "b"), "torch:Nobody": ("c",)},
            arguments={"torch:save": ("f", "g")},
        )
    assert str(caught.value) == (
        f"torch {torch.__version__} lacks torch.nothing, torch.nn.nothing, "
        "torch.nowhere (No module named 'torch.nowhere'), "
        "torch.Nobody (module 'torch' has no attribute 'Nobody'), torch.save(g); "
        "lowmem_load was written for torch >=1000,<1001"
    )


def test_an_object_is_asked_for_what_only_it_has() -> None:
    module = torch.nn.Linear(1, 1)
    with pytest.raises(
        IncompatibleVersionError, match=rf"^torch {re.escape(torch.__version__)} lacks Linear\.a, Linear\.bias\.b; "
    ):
        require_attributes(SUPPORTED, module, ("weight", "a", "bias.b"))
