"""The digest of models in a plain process; of partitioned ones: `tests/multi_rank/test_integrity.py`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowmem_load import UnsupportedError, model_digest


class Net(nn.Module):
    """Tied weights, a norm with buffers of several dtypes, one buffer that is not saved, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(7, 5)
            self.norm = nn.BatchNorm1d(5)
            self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("positions", torch.arange(4), persistent=False)


def bit(values: torch.Tensor) -> None:
    with torch.no_grad():
        values.view(torch.int32).view(-1)[-1] ^= 1


def test_equal_models_have_equal_digests() -> None:
    digest = model_digest(Net())
    assert digest == model_digest(Net()) and {len(each) for each in digest.values()} == {64}
    of_norm = {f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    assert set(digest) == {"embedding.weight", "scale", *of_norm}, "ties once, and no buffer that is not saved"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda net: bit(net.head.weight), "embedding.weight"),
        (lambda net: bit(net.scale), "scale"),
        (lambda net: bit(net.norm.running_var), "norm.running_var"),
        (lambda net: net.norm.num_batches_tracked.add_(1), "norm.num_batches_tracked"),
        (lambda net: setattr(net, "scale", nn.Parameter(net.scale.detach().view(1))), "scale"),
        (lambda net: setattr(net.norm, "bias", nn.Parameter(net.norm.bias.detach().half())), "norm.bias"),
        (lambda net: setattr(net.head, "weight", nn.Parameter(net.head.weight.detach().clone())), "head.weight"),
    ],
    ids=["a bit", "a bit of a scalar", "a buffer", "a count", "a shape", "a dtype of zeros", "a tie"],
)
def test_a_change_is_found_and_named(change: Callable[[Net], None], name: str) -> None:
    net, before = Net(), model_digest(Net())
    change(net)
    after = model_digest(net)
    differing = {each for each in {*before, *after} if before.get(each) != after.get(each)}
    assert name in differing
    assert len(differing) == (2 if name == "head.weight" else 1), "the tied one loses a name"


def test_what_does_not_count() -> None:
    net = Net()
    net.positions.add_(1)
    net.embedding.weight.requires_grad_(False)
    net.embedding.weight.data = net.embedding.weight.detach().t().contiguous().t()  # other strides, equal values
    assert model_digest(net) == model_digest(Net())


def test_wrappers_are_looked_into() -> None:
    wrapper = nn.Module()
    wrapper.module = Net()
    assert model_digest(wrapper) == model_digest(Net())
    wrapper.own = nn.Parameter(torch.zeros(1))
    assert "module.scale" in model_digest(wrapper)


def test_what_has_no_values_is_refused() -> None:
    net = Net()
    net.scale = nn.Parameter(torch.empty(1, device="meta"))
    with pytest.raises(UnsupportedError, match="scale: is on the meta device"):
        model_digest(net)


def test_a_plain_process_needs_no_deepspeed() -> None:
    script = (
        "import sys, torch, lowmem_load; lowmem_load.model_digest(torch.nn.Linear(2, 3)); "
        "assert 'deepspeed' not in sys.modules and not torch.distributed.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
