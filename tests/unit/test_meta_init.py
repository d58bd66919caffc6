"""While a model is built on meta, torch's initialisations are skipped there, and only there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowmem_load.hf.meta_init import INITIALISATIONS, skipped_on_meta


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the initialisations that torch itself has done."""
    called: list[str] = []

    def noting(name: str, ordinary: Callable[..., object]) -> Callable[..., object]:
        def initialise(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
            called.append(name)
            return ordinary(tensor, *args, **kwargs)

        return initialise

    for name in INITIALISATIONS:
        monkeypatch.setattr(nn.init, name, noting(name, getattr(nn.init, name)))
    return called


def test_layers_on_meta_are_built_without_initialising_their_weights(calls: list[str]) -> None:
    state = torch.get_rng_state()
    with skipped_on_meta(), torch.device("meta"):
        layers = [nn.Linear(3, 2, bias=False), nn.Conv2d(1, 1, 3, bias=False), nn.Embedding(3, 2)]
    assert calls == []
    assert all(layer.weight.is_meta and isinstance(layer.weight, nn.Parameter) for layer in layers)
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_with_memory_are_initialised_as_ever(calls: list[str]) -> None:
    torch.manual_seed(0)
    with skipped_on_meta():
        inside = [nn.Linear(3, 2).weight, nn.Embedding(3, 2).weight]
    torch.manual_seed(0)
    outside = [nn.Linear(3, 2).weight, nn.Embedding(3, 2).weight]
    assert all(map(torch.equal, inside, outside))
    assert calls == ["kaiming_uniform_", "uniform_", "normal_"] * 2


def test_what_torch_refuses_is_refused_on_meta() -> None:
    with skipped_on_meta(), pytest.raises(ValueError, match=r"[Ff]an"):
        nn.init.kaiming_uniform_(torch.empty(3, device="meta"))


def test_a_subclass_on_meta_is_initialised(calls: list[str]) -> None:
    class Subclass(torch.Tensor):
        pass

    with skipped_on_meta():
        nn.init.uniform_(torch.empty(2, 2, device="meta").as_subclass(Subclass))
    assert set(calls) == {"uniform_"}


def test_torch_is_as_before_afterwards() -> None:
    before = [getattr(nn.init, name) for name in INITIALISATIONS]
    with skipped_on_meta():
        assert nn.init.normal_ is not before[-1]
    assert [getattr(nn.init, name) for name in INITIALISATIONS] == before
