"""Operations on symbolic tensors describe what torch would compute, and read nothing until asked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lowmem_load import expression as ex
from lowmem_load.errors import UnsupportedError
from lowmem_load.reader import Reader
from lowmem_load.symbolic import SymbolicTensor, expression_of

X = torch.arange(4 * 6 * 5, dtype=torch.float32).reshape(4, 6, 5)
Y = X + 1000


@pytest.fixture
def pair(tmp_path: Path) -> tuple[SymbolicTensor, SymbolicTensor, Reader]:
    path = tmp_path / "data"
    path.write_bytes(X.numpy().tobytes() + Y.numpy().tobytes())
    reader = Reader()
    sources = [ex.Source(str(path), name, i * X.nbytes, (4, 6, 5), torch.float32) for i, name in enumerate("xy")]
    x, y = (SymbolicTensor(source, reader.read_whole) for source in sources)
    return x, y, reader


STREAMED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "ellipsis": lambda x, y: x[...],
    "index": lambda x, y: x[1],
    "negative index": lambda x, y: x[-1, ..., -2],
    "slices": lambda x, y: x[1:3, ::2, 1:],
    "slice beyond the end": lambda x, y: x[2:99],
    "negative slice": lambda x, y: x[-3:-1],
    "none index": lambda x, y: x[:, None, 2],
    "cat": lambda x, y: torch.cat([x, y], dim=1),
    "cat negative dim": lambda x, y: torch.cat((x, y), dim=-1),
    "cat with a real tensor": lambda x, y: torch.cat([x, torch.ones(1, 6, 5)]),
    "stack": lambda x, y: torch.stack([x, y], dim=1),
    "chunk": lambda x, y: torch.cat(torch.chunk(x, 2, dim=1)[::-1], dim=1),
    "uneven chunk": lambda x, y: torch.chunk(x, 3, dim=0)[1],
    "split": lambda x, y: torch.split(x, 4, dim=1)[1],
    "split sizes": lambda x, y: torch.split(x, [1, 3, 2], dim=1)[2],
    "unbind": lambda x, y: x.unbind(1)[3],
    "narrow": lambda x, y: x.narrow(1, 2, 3),
    "transpose": lambda x, y: x.transpose(0, -1).contiguous(),
    "T": lambda x, y: x[0].T,
    "permute": lambda x, y: x.permute(2, 0, 1),
    "movedim": lambda x, y: x.movedim(0, 2),
    "view": lambda x, y: x.view(2, 2, -1),
    "reshape of a transpose": lambda x, y: x.transpose(0, 1).reshape(3, -1),
    "flatten": lambda x, y: x.permute(1, 0, 2).flatten(0, 1),
    "unflatten": lambda x, y: x.unflatten(1, (2, 3)).transpose(1, 2),
    "squeeze": lambda x, y: x[:1].squeeze(0).unsqueeze(-1),
    "to": lambda x, y: x.to(torch.bfloat16).float(),
    "to device and dtype": lambda x, y: x.to(device="cpu", dtype=torch.float16),
    "half and clone": lambda x, y: x.half().clone().detach(),
    "rope": lambda x, y: x.reshape(4, 3, 2, 5).transpose(1, 2).reshape(24, 5),
    "interleave": lambda x, y: torch.stack([x, y], dim=2).flatten(1, 2),
}
COMPUTED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "neg exp": lambda x, y: -torch.exp(x / 100),
    "sum of two": lambda x, y: x + 2 * y.transpose(0, 1).reshape(4, 6, 5),
    "flip": lambda x, y: x.flip(0),
    "repeat": lambda x, y: x.repeat(2, 1, 1),
    "index_select": lambda x, y: x.index_select(1, torch.tensor([5, 0, 3])),
    "sort, second output": lambda x, y: torch.sort(x, dim=1, descending=True)[1],
    "view as bytes": lambda x, y: x.view(torch.int32),
    "as_strided": lambda x, y: x.as_strided((3, 2), (7, 3)),
}


@pytest.mark.parametrize("name", [*STREAMED, *COMPUTED])
def test_value_equals_torch(name: str, pair: tuple[SymbolicTensor, SymbolicTensor, Reader]) -> None:
    x, y, reader = pair
    operation = {**STREAMED, **COMPUTED}[name]
    result, expected = operation(x, y), operation(X, Y)
    assert isinstance(result, SymbolicTensor)
    assert reader.stats.num_reads == 0
    assert (result.shape, result.dtype, result.stride()) == (expected.shape, expected.dtype, expected.stride())
    assert torch.equal(reader.read_whole(expression_of(result)), expected)
    computed = any(isinstance(leaf, ex.Computed) for leaf in ex.leaves(expression_of(result)))
    assert computed == (name in COMPUTED)


def test_equal_reads_and_answers(pair: tuple[SymbolicTensor, SymbolicTensor, Reader]) -> None:
    x, y, reader = pair
    assert torch.equal(x, x[...])
    assert reader.stats.num_reads == 0, "two names for the same bytes"
    assert not torch.equal(x, y)
    assert torch.equal(x.transpose(0, 1), x.permute(1, 0, 2))
    assert not torch.equal(x, x.half())
    assert torch.equal(x, X)


def test_an_answer_now_reads_now(pair: tuple[SymbolicTensor, SymbolicTensor, Reader]) -> None:
    x, _, reader = pair
    assert x[1, 2, 3].item() == X[1, 2, 3].item()
    assert reader.stats.read_bytes == 4


def test_writing_into_a_streamed_weight_is_refused(pair: tuple[SymbolicTensor, SymbolicTensor, Reader]) -> None:
    copied = pair[0].clone()
    view = copied[1]
    for written in (pair[0], pair[0][1], pair[0].detach(), copied, view):
        with pytest.raises(UnsupportedError, match="writes into a weight"):
            written.mul_(2)
    with pytest.raises(UnsupportedError, match="writes into a weight"):
        X.clone().copy_(pair[0])


def test_writing_into_a_copy_changes_the_copy_alone(pair: tuple[SymbolicTensor, SymbolicTensor, Reader]) -> None:
    x, y, reader = pair
    copied = x.half()
    assert copied.mul_(2).add_(y) is copied
    assert reader.stats.num_reads == 0
    assert torch.equal(reader.read_whole(expression_of(copied)), X.half().mul_(2).add_(Y))
    assert torch.equal(reader.read_whole(expression_of(x)), X)
    x.half().normal_()
    assert torch.equal(reader.read_whole(expression_of(x)), X)


def test_it_can_be_a_parameter(pair: tuple[SymbolicTensor, SymbolicTensor, Reader]) -> None:
    x, _, reader = pair
    parameter = torch.nn.Parameter(x[0])
    assert isinstance(parameter, torch.nn.Parameter)
    assert isinstance(parameter, SymbolicTensor)
    assert parameter.requires_grad
    module = torch.nn.Linear(5, 6, device="meta")
    module.weight = parameter
    assert module.weight is parameter
    assert torch.equal(reader.read_whole(expression_of(module.state_dict()["weight"])), X[0])
    assert copy.deepcopy(module).weight.shape == (6, 5)
