"""Operations on symbolic tensors describe what torch would compute, and read nothing until asked."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lowmem_load.errors import UnsupportedError
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import read_whole
from lowmem_load.planning import expression as ex
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.reads import ReadLimits
from lowmem_load.planning.regions import FlatRange, partition_range
from lowmem_load.symbolic.initialise import PAGES_NBYTES, UNINITIALISED, Initialiser, SharedValue
from lowmem_load.symbolic.tensor import SymbolicTensor, expression_of, make_uninitialised

aten = torch.ops.aten
X = torch.arange(4 * 6 * 5, dtype=torch.float32).reshape(4, 6, 5)
Y = X + 1000


@pytest.fixture
def pair(tmp_path: Path) -> tuple[SymbolicTensor, SymbolicTensor, Executor]:
    path = tmp_path / "data"
    path.write_bytes(X.numpy().tobytes() + Y.numpy().tobytes())
    reader = Executor()

    def read_now(expression: ex.Expression, reason: str) -> torch.Tensor:
        assert reason
        return read_whole(reader, expression)

    sources = [ex.Source(str(path), name, i * X.nbytes, (4, 6, 5), torch.float32) for i, name in enumerate("xy")]
    x, y = (SymbolicTensor(source, read_now) for source in sources)
    return x, y, reader


DIRECT: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "ellipsis": lambda x, y: x[...],
    "negative index": lambda x, y: x[-1, ..., -2],
    "slices": lambda x, y: x[1:3, ::2, 1:],
    "slice beyond the end": lambda x, y: x[2:99],
    "cat": lambda x, y: torch.cat([x, y], dim=1),
    "cat with a real tensor": lambda x, y: torch.cat([x, torch.ones(1, 6, 5)]),
    "cat of views that are not contiguous": lambda x, y: torch.cat([x.mT, y.mT], dim=1),
    "stack": lambda x, y: torch.stack([x, y], dim=1),
    "stack first": lambda x, y: torch.stack([x, y, x]),
    "stack last": lambda x, y: torch.stack([x, y], dim=-1),
    "stack of views that are not contiguous": lambda x, y: torch.stack([x.mT, y.mT]),
    "chunk": lambda x, y: torch.cat(torch.chunk(x, 2, dim=1)[::-1], dim=1),
    "split sizes": lambda x, y: torch.split(x, [1, 3, 2], dim=1)[2],
    "unbind": lambda x, y: x.unbind(1)[3],
    "narrow": lambda x, y: x.narrow(1, 2, 3),
    "transpose": lambda x, y: x.transpose(0, -1).contiguous(),
    "permute": lambda x, y: x.permute(2, 0, 1),
    "view": lambda x, y: x.view(2, 2, -1),
    "reshape of a transpose": lambda x, y: x.transpose(0, 1).reshape(3, -1),
    "flatten": lambda x, y: x.permute(1, 0, 2).flatten(0, 1),
    "unflatten": lambda x, y: x.unflatten(1, (2, 3)).transpose(1, 2),
    "to": lambda x, y: x.to(torch.bfloat16).float(),
    "to device and dtype": lambda x, y: x.to(device="cpu", dtype=torch.float16),
    "rope": lambda x, y: x.reshape(4, 3, 2, 5).transpose(1, 2).reshape(24, 5),
    "interleave": lambda x, y: torch.stack([x, y], dim=2).flatten(1, 2),
    "_unsafe_view": lambda x, y: aten._unsafe_view.default(x, [24, 5]),
    "_reshape_alias": lambda x, y: aten._reshape_alias.default(x, [4, 30], [30, 1]),
    "squeeze of all": lambda x, y: x[:1, :, :1].squeeze(),
    "squeeze of dims": lambda x, y: x[:1, :, :1].squeeze((0, 2)),
    "pad by nothing": lambda x, y: aten.constant_pad_nd.default(x, [0, 0, 0, 0], 7),
    "expand by a dim": lambda x, y: x.expand(3, -1, -1, -1),
    "transpose of a scalar": lambda x, y: x[0, 0, 1].transpose(0, -1).expand(2, 2),
    "t of a vector": lambda x, y: x[0, 0].t(),
    "slice beyond both ends": lambda x, y: x[-99:99],
    "slice behind the end": lambda x, y: x[7:9],
    "list of indices": lambda x, y: x[:, torch.tensor([2, 0, -1])],
    "cat of dtypes": lambda x, y: torch.cat([x.half(), y.double()], 1),
    "cat with the empty vector": lambda x, y: torch.cat([torch.empty(0), x, y], 1),
    "stack of scalars": lambda x, y: torch.stack([x[0, 0, 1], y[0, 0, 1]]),
    "as_strided": lambda x, y: x.as_strided((3, 2), (7, 3)),
    "as_strided of a slice": lambda x, y: x[1:].as_strided((3, 2), (7, 3), 2),
    "as_strided of a transpose": lambda x, y: x.transpose(0, 2)[2:].as_strided((3, 2), (7, 3), 1)[1:],
    "as_strided of an expand": lambda x, y: x[0, 0].expand(3, 5).as_strided((2, 8), (8, 1), 0),
    "diagonal": lambda x, y: x.diagonal(0, 1, 2),
    "windows side by side": lambda x, y: x.unfold(1, 2, 3),
    "view of a view of a transpose": lambda x, y: x.transpose(0, 2)[1:, ::2].view(4, 3, 2, 2),
}
ELEMENTWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "neg exp": lambda x, y: -torch.exp(x / 100),
    "sum of two": lambda x, y: x + 2 * y.transpose(0, 1).reshape(4, 6, 5),
    "broadcast": lambda x, y: x * y[0, :, :1],
    "expand": lambda x, y: x[:1].expand(4, 6, 5) - y,
    "block scales": lambda x, y: (
        (x.reshape(2, 2, 3, 2, 5) * y[0, :4, 0].reshape(2, 2).unsqueeze(-1).unsqueeze(2).unsqueeze(-1)).half()
    ).reshape(4, 6, 5),
    "promoted": lambda x, y: x.half() * y,
    "with a real tensor": lambda x, y: torch.arange(5) * x,
    "where": lambda x, y: torch.where(x > 50, x, y),
    "as_strided of a result": lambda x, y: (x.transpose(0, 2) * 2).as_strided((3, 2), (7, 3), 1),
    "views of a transposed result": lambda x, y: (x.transpose(0, 2) * 2)[1:, ::2, -1].unsqueeze(1),
}
COMPUTED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "scalar tensor": lambda x, y: x * y[0, 0, 1],
    "flip": lambda x, y: x.flip(0),
    "repeat": lambda x, y: x.repeat(2, 1, 1),
    "pad": lambda x, y: aten.constant_pad_nd.default(x, [0, 1]),
    "two lists of indices": lambda x, y: x[torch.tensor([0, 1]), torch.tensor([0, 1])],
    "matrix of indices": lambda x, y: x[torch.tensor([[0, 1]])],
    "many indices": lambda x, y: x[torch.zeros(65, dtype=torch.int64)],
    "index_select": lambda x, y: x.index_select(1, torch.tensor([5, 0, 3])),
    "sort, second output": lambda x, y: torch.sort(x, dim=1, descending=True)[1],
    "windows that overlap": lambda x, y: x.unfold(1, 3, 1),
    "view of a view as bytes": lambda x, y: x[1:].view(torch.int32)[:, 2],
    "view as bytes": lambda x, y: x.view(torch.int32),
    "flip of an expand": lambda x, y: x[:1].expand(4, 6, 5).flip(1),
    "bmm of an expand": lambda x, y: torch.bmm(x[0].expand(4, 6, 5), y.transpose(1, 2)),
    "view of an expand as bytes": lambda x, y: x[0, :1].expand(4, 1, 5).view(torch.int16),
}


@pytest.mark.parametrize("name", [*DIRECT, *ELEMENTWISE, *COMPUTED])
def test_value_equals_torch(name: str, pair: tuple[SymbolicTensor, SymbolicTensor, Executor]) -> None:
    x, y, reader = pair
    operation = {**DIRECT, **ELEMENTWISE, **COMPUTED}[name]
    result, expected = operation(x, y), operation(X, Y)
    assert isinstance(result, SymbolicTensor)
    assert reader.stats.num_reads == 0
    assert (result.shape, result.dtype, result.stride()) == (expected.shape, expected.dtype, expected.stride())
    assert torch.equal(read_whole(reader, expression_of(result)), expected)
    for world_size in (2, 3, 7):
        for rank in range(world_size):
            span = partition_range(expected.numel(), rank, world_size)
            partition = torch.empty(span.numel, dtype=expected.dtype)
            planner = Planner()
            fill = planner.plan_fill("w", expression_of(result), span)
            reader.fill(fill, partition, planner.values, planner.constants)
            reader.finish()
            assert torch.equal(partition, expected.reshape(-1)[span.start : span.end])
    computed = any(isinstance(leaf, ex.Computed) for leaf in ex.leaves(expression_of(result)))
    assert computed == (name in COMPUTED)


def test_equal_reads_and_answers(pair: tuple[SymbolicTensor, SymbolicTensor, Executor]) -> None:
    x, y, reader = pair
    assert torch.equal(x, x[...])
    assert reader.stats.num_reads == 0, "two names for the same bytes"
    assert not torch.equal(x, y)
    assert torch.equal(x.transpose(0, 1), x.permute(1, 0, 2))
    assert not torch.equal(x, x.half())
    assert torch.equal(x, X)
    close = x * (1 + 2**-13)
    assert torch.equal(x.bfloat16(), close.bfloat16())
    assert torch.equal(x.bfloat16().float(), close.bfloat16().float())
    assert not torch.equal(x.double(), close.double())


def test_a_write_through_a_view_is_seen_by_all(pair: tuple[SymbolicTensor, SymbolicTensor, Executor]) -> None:
    x, y, reader = pair
    view, row = x.detach(), x.transpose(0, 2)[1]
    row.mul_(2)
    view[0, :2].zero_()
    x.view(-1)[7:9].copy_(y.reshape(-1)[7:9])
    x.unbind(0)[3].fill_(5)
    expected = X.clone()
    expected.transpose(0, 2)[1].mul_(2)
    expected[0, :2].zero_()
    expected.view(-1)[7:9].copy_(Y.reshape(-1)[7:9])
    expected[3].fill_(5)
    for symbolic, real in ((x, expected), (view, expected), (row, expected.transpose(0, 2)[1])):
        assert torch.equal(read_whole(reader, expression_of(symbolic)), real)
    assert torch.equal(read_whole(reader, expression_of(y)), Y)
    memory = torch.zeros(6, 5)
    memory.copy_(y[2])
    assert torch.equal(memory, Y[2])


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: torch._foreach_mul_([weight], 2.0),
        lambda weight: torch.add(torch.ones(X.shape), torch.ones(X.shape), out=weight),
    ],
)
def test_writes_of_an_unknown_form_are_refused(
    write: Callable[[torch.Tensor], object], pair: tuple[SymbolicTensor, SymbolicTensor, Executor]
) -> None:
    with pytest.raises(UnsupportedError, match="in a way that lowmem_load does not know"):
        write(pair[0])


def reused_buffer(x: torch.Tensor) -> torch.Tensor:
    rows, buffer = [], torch.empty(x.shape[-1])
    for i in range(x.shape[0]):
        buffer.fill_(i)
        rows.append(x[i] * buffer)
    return torch.stack(rows)


def joined_then_changed(x: torch.Tensor) -> torch.Tensor:
    other = torch.ones_like(x)
    joined = torch.cat([x, other])
    other.zero_()
    return joined


def copied_then_changed(x: torch.Tensor) -> torch.Tensor:
    other, made = torch.ones(x.shape), x.clone()
    made.copy_(other)
    other.zero_()
    return made


def selected_then_changed(x: torch.Tensor) -> torch.Tensor:
    index = torch.arange(x.shape[0]).flip(0)
    chosen = x.index_select(0, index)
    index.zero_()
    return chosen


@pytest.mark.parametrize("code", [reused_buffer, joined_then_changed, copied_then_changed, selected_then_changed])
def test_tensors_that_code_uses_again_count_as_they_were(
    pair: tuple[SymbolicTensor, SymbolicTensor, Executor], code: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x, _, reader = pair
    assert torch.equal(read_whole(reader, expression_of(code(x))), code(X.clone()))


def test_what_draws_random_numbers_is_drawn_once(pair: tuple[SymbolicTensor, SymbolicTensor, Executor]) -> None:
    x, _, reader = pair
    torch.manual_seed(1)
    noisy = torch.bernoulli(x.sigmoid()) + x.clone().normal_()
    torch.manual_seed(1)
    expected = torch.bernoulli(X.sigmoid()) + X.clone().normal_()
    for _ in range(2):
        assert torch.equal(read_whole(reader, expression_of(noisy)), expected)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_product_of_what_must_be_computed_whole(
    pair: tuple[SymbolicTensor, SymbolicTensor, Executor], num_threads: int
) -> None:
    """It is computed once, and not by a thread that then waits for itself."""
    planner, expression, found = Planner(ReadLimits(staging_bytes=16)), expression_of(pair[0].roll(1, 0) * 2.0), []
    fill = planner.plan_fill("w", expression, FlatRange(0, X.numel()))
    with Executor(num_threads=num_threads) as reader:

        def run() -> None:
            whole = torch.empty(X.numel())
            reader.fill(fill, whole, planner.values, planner.constants)
            reader.finish()
            found.append(whole.view(X.shape))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(30)
        assert found, "hangs"
        assert torch.equal(found[0], X.roll(1, 0) * 2.0)
        assert reader.stats.read_bytes == X.nbytes


def initialise(first: torch.Tensor, second: torch.Tensor) -> None:
    """Writes as _init_weights does: random numbers, views, one parameter after the other and back again."""
    with torch.no_grad():
        torch.nn.init.normal_(first, std=0.1)
        torch.nn.init.trunc_normal_(second, std=0.02)
        first[2].zero_()
        first.data.mul_(3)
        second.data[1:, 0].uniform_(-1, 1)
        torch.nn.init.orthogonal_(first)
        second.t().copy_(second.t().flip(0) + first.sum())
        second.data = torch.rand(7, 5) * 2


def test_parameters_are_initialised_as_torch_does_holding_one_at_a_time(
    pair: tuple[SymbolicTensor, SymbolicTensor, Executor],
) -> None:
    shapes = ((6, 5), (7, 5))
    torch.manual_seed(3)
    expected = [torch.nn.Parameter(torch.empty(shape)) for shape in shapes]
    initialise(*expected)
    state = torch.get_rng_state()
    initialiser = Initialiser(pair[0].read_now)
    symbolic = []
    for shape in shapes:
        empty = make_uninitialised(torch.empty(shape, device="meta"), pair[0].read_now)
        empty.initialise_in(initialiser, partition_range(empty.numel(), 1, 3))
        symbolic.append(torch.nn.Parameter(empty))
    torch.manual_seed(3)
    initialise(*symbolic)
    initialiser.release()
    assert torch.equal(torch.get_rng_state(), state), "random numbers are drawn as often as by torch"
    for parameter, real in zip(symbolic, expected, strict=True):
        assert isinstance(parameter, SymbolicTensor)
        kept, span = parameter.initialised, partition_range(real.numel(), 1, 3)
        assert kept is not None
        assert kept.first == span.start
        assert torch.equal(kept.flat, real.detach().reshape(-1)[span.start : span.end])
        assert torch.equal(read_whole(pair[2], expression_of(parameter)), real.detach())
    assert torch.equal(torch.get_rng_state(), state), "reading again draws nothing"


def test_writing_into_a_copy_changes_the_copy_alone(pair: tuple[SymbolicTensor, SymbolicTensor, Executor]) -> None:
    x, y, reader = pair
    copied = x.half()
    assert copied.mul_(2).add_(y) is copied
    assert reader.stats.num_reads == 0
    assert torch.equal(read_whole(reader, expression_of(copied)), X.half().mul_(2).add_(Y))
    assert torch.equal(read_whole(reader, expression_of(x)), X)
    torch.manual_seed(5)
    drawn, then = x.half().bernoulli_(y.sigmoid()), torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(read_whole(reader, expression_of(drawn)), X.half().bernoulli_(Y.sigmoid()))
    assert torch.equal(then, torch.rand(3)), "those after it are those of an ordinary load"
    assert torch.equal(read_whole(reader, expression_of(x)), X)


def test_numbers_drawn_into_a_copy_keep_their_place_in_the_order(
    pair: tuple[SymbolicTensor, SymbolicTensor, Executor],
) -> None:
    """Initialising the copy that weight norm computes must not change what is drawn for the next parameter."""
    x, _, reader = pair
    initialiser = Initialiser(x.read_now)
    missing = make_uninitialised(torch.empty(5, device="meta"), x.read_now)
    for tensor in (x, missing):
        tensor.initialise_in(initialiser, FlatRange(0, tensor.numel()))
    torch.manual_seed(5)
    (x * 2).normal_()
    missing.normal_()
    assert reader.stats.num_reads == 0
    torch.manual_seed(5)
    torch.empty_like(X).normal_()
    assert torch.equal(read_whole(reader, expression_of(missing)), torch.empty(5).normal_())


@pytest.mark.parametrize("index", [4, -5])
def test_an_index_out_of_range_is_an_error_as_of_any_tensor(
    index: int, pair: tuple[SymbolicTensor, SymbolicTensor, Executor]
) -> None:
    x, _, reader = pair
    with pytest.raises(IndexError, match="out of bounds"):
        read_whole(reader, x[[0, index]].expression)


# -- writes into parameters, in order, one of which is whole at a time -------------------------------------------------


def refused(expression: ex.Expression, reason: str) -> torch.Tensor:
    raise AssertionError(f"{reason}: {expression} is read")


def parameter(initialiser: Initialiser, keep: FlatRange, numel: int) -> SharedValue:
    empty = ex.Computed(UNINITIALISED, lambda _: torch.zeros(numel), (), (numel,), torch.float32)
    return SharedValue(empty, initialiser, keep=keep)


def test_what_is_kept_does_not_keep_the_whole() -> None:
    numel = PAGES_NBYTES  # of four bytes each: a block with pages of its own
    initialiser = Initialiser(refused)
    value = parameter(initialiser, FlatRange(3, 5), numel)
    initialiser.write(value, "fill_", lambda whole, _: whole.fill_(7), (), draws=False)
    initialiser.release()
    assert value.initialised is not None
    assert value.initialised.flat.tolist() == [7, 7]
    assert value.initialised.flat.untyped_storage().nbytes() == 2 * 4


def test_a_value_that_is_replaced_forgets_its_writes() -> None:
    initialiser = Initialiser(refused)
    value = parameter(initialiser, FlatRange(0, 20), 20)
    initialiser.write(value, "fill_", lambda whole, _: whole.fill_(1), (), draws=False)
    loaded = ex.hold(torch.ones(20))
    value.replace(loaded)
    assert value.expression is loaded
    assert (value.initialised, value.log, value.before) == (None, [], None)
    initialiser.release()
    assert value.initialised is None  # it was no longer in hand
