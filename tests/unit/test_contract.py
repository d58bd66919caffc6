"""What a package lacks is told in one error."""

import re

import pytest
import torch

from lowmem_load.errors import IncompatibleVersionError
from lowmem_load.foreign_names import Releases, require, require_attributes

SUPPORTED = Releases("torch", oldest="2.0.0", newest="1000.1")


def test_all_that_is_missing_is_in_one_error() -> None:
    with pytest.raises(IncompatibleVersionError) as caught:
        require(
            SUPPORTED,
            {"torch": ("nothing", "nn.nothing", "nn"), "torch.nowhere": ("a", "b"), "torch:Nobody": ("c",)},
        )
    assert str(caught.value) == (
        f"torch {torch.__version__} lacks torch.nothing, torch.nn.nothing, "
        "torch.nowhere (module 'torch' has no attribute 'nowhere'), "
        "torch.Nobody (module 'torch' has no attribute 'Nobody'); "
        "lowmem_load works with torch 2.0.0 to 1000.1: install torch==1000.1"
    )


def test_an_object_is_asked_for_what_only_it_has() -> None:
    module = torch.nn.Linear(1, 1)
    with pytest.raises(
        IncompatibleVersionError, match=rf"^torch {re.escape(torch.__version__)} lacks Linear\.a, Linear\.bias\.b; "
    ):
        require_attributes(SUPPORTED, module, ("weight", "a", "bias.b"))


def test_an_older_release_is_refused_and_the_one_to_install_is_named() -> None:
    with pytest.raises(IncompatibleVersionError) as caught:
        require(Releases("torch", oldest="1000.1", newest="1000.2"), {})
    assert str(caught.value) == (
        f"torch {torch.__version__} is too old: lowmem_load works with torch 1000.1 to 1000.2; "
        "install torch==1000.1 or newer"
    )


def test_a_newer_release_is_warned_of_once_and_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    supported = Releases("torch", oldest="1.0", newest="2.0.1")
    for _ in range(2):
        require(supported, {"torch": ("nn",)})
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"torch {torch.__version__} is newer than what lowmem_load was tested with (torch 1.0 to 2.0.1)"
    )
    caplog.clear()
    monkeypatch.setattr(torch, "__version__", "1000.1+cpu")
    require(SUPPORTED, {})
    assert not caplog.records, "a build of a tested release"
