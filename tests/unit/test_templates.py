"""Expressions as data: of every kind they come back equal, and hostile data is refused."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowmem_load.describe.arguments import Template as Arguments
from lowmem_load.describe.pointwise import Pointwise, pointwise_of
from lowmem_load.errors import CheckpointError
from lowmem_load.formats import templates
from lowmem_load.formats.templates import NotDataError, Teller, Template
from lowmem_load.planning import expression as ex

F32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
MUL = torch.ops.aten.mul.Tensor
NAMED = ex.held(torch.arange(6.0).reshape(2, 3), "a constant")


class Names:
    """Names of one value, and of the operations that have some."""

    def told_function(self, function: Any) -> Any:
        return function.told()

    def told_value(self, value: ex.Held) -> Any:
        return "constant" if value is NAMED else None

    def function(self, told: Any, num_parts: int) -> Any:
        return pointwise_of(told, num_parts)

    def value(self, told: Any) -> ex.Held:
        if told != "constant":
            raise ValueError("no such value")
        return NAMED


def source(number: int, shape: tuple[int, ...] = (2, 3), dtype: torch.dtype = F32) -> ex.Source:
    return ex.Source("file", f"tensor {number}", 100 * number, shape, dtype)


def product(one: ex.Expression, other: ex.Expression) -> ex.Expression:
    call = Pointwise(MUL, Arguments(((torch.empty(0), torch.empty(0)), {})), [(), ()])
    return ex.Elementwise(str(MUL), call, (one, other), one.shape, F32)


def instance() -> ex.Expression:
    """As fp8 is dequantized: two instances of a pattern, in which one slot is there twice."""
    weight, scale = ex.Slot((2, 3), FP8), ex.Slot((2, 1), F32)
    pattern = ex.cast(product(ex.cast(weight, F32), ex.expand(scale, (2, 3))), BF16)
    each = [
        ex.Instance(pattern, (weight, scale), (source(2 * i, (2, 3), FP8), source(2 * i + 1, (2, 1)))) for i in range(2)
    ]
    return ex.concat([ex.reshape(part, (1, 2, 3)) for part in each], 0)


SHARED = source(7)

EXPRESSIONS: dict[str, Callable[[], ex.Expression]] = {
    "source": lambda: source(3, ()),
    "concat": lambda: ex.concat([source(0), source(1, (4, 3)), source(2)], 0),
    "slice": lambda: ex.slice_dim(source(0, (6, 9)), 1, 2, 3, 2),
    "empty slice": lambda: ex.slice_dim(source(0, (6, 9)), 0, 6, 1, 0),
    "expand": lambda: ex.expand(source(0, (1, 3)), (5, 4, 3)),
    "permute": lambda: ex.permute(source(0, (2, 3, 4)), (2, 0, 1)),
    "reshape": lambda: ex.reshape(source(0, (2, 3, 4)), (4, 6)),
    "cast": lambda: ex.cast(ex.cast(source(0), BF16), torch.float64),
    "instance": instance,
    "elementwise": lambda: product(source(0), source(1)),
    "held": lambda: product(source(0), NAMED),
    "twice": lambda: ex.concat([SHARED, ex.cast(SHARED, F32), ex.slice_dim(SHARED, 0, 1, 1, 1)], 0),
}


def number_of(tensor: ex.Source) -> int:
    return tensor.start // 100


def facts(node: ex.Expression, known: dict[int, int]) -> Any:
    """Returns all of an expression as data; a node that is there twice is told once."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = len(known)
    names = [name for name in ("name", "start", "dim", "starts", "steps", "dims", "operation") if hasattr(node, name)]
    fields = [getattr(node, name) for name in names]
    parts = [facts(part, known) for part in ex.children(node)]
    slots = [known[id(slot)] for slot in node.slots] if isinstance(node, ex.Instance) else []
    return type(node).__name__, node.shape, node.dtype, fields, parts, slots


def told(*expressions: ex.Expression) -> tuple[list[Any], list[tuple[int, list[int]]]]:
    teller = Teller(Names(), number_of)
    found = [teller.told(expression) for expression in expressions]
    return json.loads(json.dumps(teller.templates)), found


@pytest.mark.parametrize("kind", EXPRESSIONS)
def test_every_kind_comes_back_equal(kind: str) -> None:
    expression = EXPRESSIONS[kind]()
    (nodes,), ((place, numbers),) = told(expression)
    assert place == 0
    template = Template(nodes, Names())
    assert (template.shape, template.dtype) == (expression.shape, expression.dtype)
    tensors = {leaf.start // 100: leaf for leaf in ex.leaves(expression) if isinstance(leaf, ex.Source)}
    assert template.tensors == [(tensors[number].shape, tensors[number].dtype) for number in numbers]
    made = template.made([tensors[number] for number in numbers])
    assert facts(made, {}) == facts(expression, {})
    assert [(leaf.start // 100) for leaf in ex.leaves(made) if isinstance(leaf, ex.Source)] == list(tensors)


def test_an_operation_that_comes_back_computes_the_same() -> None:
    (nodes,), _ = told(product(source(0), source(1)))
    made: Any = Template(nodes, Names()).made([source(0), source(1)])
    one, other = torch.tensor([2.0, 3.0]), torch.tensor([5.0, -1.0])
    assert torch.equal(made.compute([one, other]), one * other)


def test_expressions_that_differ_in_their_tensors_share_a_template() -> None:
    found, places = told(*(ex.cast(source(number), BF16) for number in range(3)), ex.cast(source(4), torch.float16))
    assert len(found) == 2
    assert places == [(0, [0]), (0, [1]), (0, [2]), (1, [4])]


def test_what_has_no_name_is_not_told() -> None:
    add = Pointwise(torch.ops.aten.add.Tensor, Arguments(((torch.empty(0), torch.empty(0)), {})), [(), ()])
    for expression, reason in (
        (ex.held(torch.ones(2)), "a value in memory"),
        (ex.Elementwise("aten.add.Tensor", add, (source(0), source(1)), (2, 3), F32), "aten.add.Tensor"),
        (ex.Computed("aten.sum", lambda parts: parts[0].sum(), (source(0),), (), F32), "aten.sum"),
        (ex.Pick(source(0), (0, 0), ((0,), (1,)), (3,), F32), "Pick"),
    ):
        with pytest.raises(NotDataError, match=reason):
            told(ex.cast(expression, BF16))


SOURCE = ["Source", "float32", [2, 3]]


@pytest.mark.parametrize(
    "nodes",
    [
        None,
        [],
        {},
        [1],
        [[]],
        ["Slot"],
        [["Nothing"]],
        [[["Slot"], "float32", [2]]],
        [["Source", "no_dtype", [2]]],
        [["Source", "nn", [2]]],
        [["Source", 1, [2]]],
        [["Source", "float32", [-1]]],
        [["Source", "float32", [True]]],
        [["Source", "float32", [2.0]]],
        [["Source", "float32", "23"]],
        [["Source", "float32", [1 << 63]]],
        [["Source", "float32", [1 << 40, 1 << 40]]],
        [["Source", "float32", [1] * 65]],
        [["Source", "float32"]],
        [["Slot", "float32", [2]]],  # outside of a pattern
        [SOURCE, ["Cast", 1, "float32"]],  # itself
        [SOURCE, ["Cast", -1, "float32"]],
        [SOURCE, ["Cast", True, "float32"]],
        [SOURCE, ["Cast", 0, "float33"]],
        [SOURCE, ["Reshape", 0, [2, 4]]],
        [SOURCE, ["Permute", 0, [0, 0]]],
        [SOURCE, ["Permute", 0, [0]]],
        [SOURCE, ["Slice", 0, [0, 0], [1, 1], [3, 3]]],
        [SOURCE, ["Slice", 0, [1, 0], [1, 1], [2, 3]]],
        [SOURCE, ["Slice", 0, [0, 2], [1, 0], [2, 3]], ["Slice", 0, [0, 3], [1, 0], [2, 3]]],
        [SOURCE, ["Slice", 0, [0, 0], [1, 2], [2, 3]]],
        [SOURCE, ["Slice", 0, [0, -1], [1, 1], [2, 3]]],
        [SOURCE, ["Slice", 0, [0], [1], [2]]],
        [SOURCE, ["Slice", 0, [0, 0], [0, 0], [1 << 40, 1 << 40]]],
        [SOURCE, ["Concat", 0]],
        [SOURCE, ["Concat", 2, 0, 0]],
        [SOURCE, ["Concat", -1, 0, 0]],
        [SOURCE, ["Source", "float32", [2, 4]], ["Concat", 0, 0, 1]],
        [SOURCE, ["Source", "bfloat16", [2, 3]], ["Concat", 0, 0, 1]],
        [SOURCE, ["Held", "nothing"]],
        [SOURCE, ["Elementwise", "x", ["aten.mul.Tensor", [], []], "bfloat16", 0, 0]],
        [SOURCE, ["Elementwise", "x", ["aten.mul.Tensor", [], []], "float32", 0]],
        [SOURCE, ["Elementwise", 1, ["aten.mul.Tensor", [], []], "float32", 0, 0]],
        [SOURCE, ["Elementwise", "x", ["os.system", []], "float32", 0]],
        [SOURCE, SOURCE, ["Reshape", 1, [6]], ["Elementwise", "x", ["aten.mul.Tensor", [], 2], "float32", 0, 2]],
        [SOURCE, ["Slot", "float32", [2, 3]], ["Instance", 1, [1], [0, 0]]],
        [SOURCE, ["Slot", "float32", [2, 3]], ["Instance", 1, [], []]],
        [SOURCE, ["Slot", "float32", [2, 4]], ["Instance", 1, [1], [0]]],
        [SOURCE, ["Slot", "bfloat16", [2, 3]], ["Instance", 1, [1], [0]]],
        [SOURCE, ["Slot", "float32", [2, 3]], ["Instance", 1, [0], [0]]],
        [SOURCE, ["Slot", "float32", [2, 3]], ["Instance", 1, [1], [1]]],
        [SOURCE, *(["Cast", place, "float32"] for place in range(templates.MAX_DEPTH))],
    ],
)
def test_malformed_data_is_refused(nodes: Any) -> None:
    with pytest.raises(CheckpointError, match="template is malformed"):
        Template(nodes, Names())


def changed(rng: random.Random, tree: Any) -> Any:
    """Returns JSON with one of its values replaced, taken out or doubled."""
    if isinstance(tree, list) and tree and rng.random() < 0.9:
        place = rng.randrange(len(tree))
        how = rng.random()
        if how < 0.7:
            return [*tree[:place], changed(rng, tree[place]), *tree[place + 1 :]]
        return [*tree[:place], *([] if how < 0.85 else [tree[place]] * 2), *tree[place + 1 :]]
    return rng.choice([None, True, -1, 0, 1, 2, 3, 1 << 70, 0.5, "", "float32", "Cast", "Slot", [], [1], {}, tree])


def test_data_that_was_changed_is_refused_or_means_something() -> None:
    rng = random.Random(0)
    found, _ = told(*(make() for make in EXPRESSIONS.values()))
    num_refused = 0
    for _ in range(3000):
        nodes = changed(rng, copy.deepcopy(rng.choice(found)))
        try:
            template = Template(nodes, Names())
        except CheckpointError:
            num_refused += 1
            continue
        tensors = [source(number, shape, dtype) for number, (shape, dtype) in enumerate(template.tensors)]
        made = template.made(tensors)
        assert (made.shape, made.dtype) == (template.shape, template.dtype)
    assert 1000 < num_refused < 3000
