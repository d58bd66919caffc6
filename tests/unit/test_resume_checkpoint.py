"""zero_checkpoint.py: what a ZeRO checkpoint has in addition to weights, and what is refused."""

import contextlib
import itertools
import math
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lowmem_load.engines.engine_states import HeldParameter
from lowmem_load.errors import CheckpointError, UnsupportedError
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import read_whole
from lowmem_load.planning.expression import Expression, Source
from lowmem_load.planning.nest import plan_copies
from lowmem_load.planning.proof import prove_coverage
from lowmem_load.planning.regions import NOTHING, FlatRange, partition_range
from lowmem_load.resume.load_checkpoint import Wanted, _match
from lowmem_load.training_checkpoints.open_model import open_model
from lowmem_load.training_checkpoints.zero_checkpoint import (
    FP32,
    PLACEHOLDER,
    SavedParameter,
    group_numel,
    open_checkpoint,
    partitioned,
    place_group,
    saved_by,
)
from tests.zero_checkpoint import partitions, save_zero3, sub_groups

VALUES = {"a": torch.randn(9, 2), "b": torch.randn(5)}


class Mine:
    """A user's own class."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mine)

    __hash__ = None  # type: ignore[assignment]


def edited(place: Path, kind: str, edit: Callable[[Any], None]) -> None:
    """Change what the files of one kind hold."""
    for path in sorted(place.glob(f"*{kind}_states.pt")):
        state = torch.load(path, weights_only=False)
        edit(state)
        torch.save(state, path)


def deep() -> Any:
    """Return what has a short pickle, and would take for ever to be spelled or compared."""
    value: Any = 1
    for _ in range(100):
        value = (value, value)
    return value


def test_what_is_no_weight_is_read(tmp_path: Path) -> None:
    state = {"epoch": 3, "rng": torch.arange(7, dtype=torch.uint8), "best": np.float64(0.5), "seen": {1, 2}}
    state |= {"counter": Counter([3, 3]), "bytes": b"\x00\xff", "python": random.getstate(), "array": np.arange(3.0)}
    place = save_zero3(tmp_path, VALUES, world_size=3, client_state=state, moments={"exp_avg": VALUES})
    with Executor() as executor:
        checkpoint = open_checkpoint(str(place), executor, rank=1, world_size=3)
        scheduler, found, _ = checkpoint.python_states((), executor, allow_pickle=False)
        assert scheduler == {"last_batch_iteration": 2}
        assert torch.equal(found["rng"], state["rng"]) and np.array_equal(found["array"], state["array"])
        others = state.keys() - {"rng", "array"}
        assert {key: found[key] for key in others} == {key: state[key] for key in others}
        assert found.keys() >= {"ds_version", "ds_config"} and not found.keys() & {"module", "param_shapes"}
        assert checkpoint.counters == {"skipped_steps": 0, "global_steps": 3, "global_samples": 6}
        assert checkpoint.loss_scaler == ("LossScaler", {"cur_scale": 1.0, "dynamic": False})
        assert checkpoint.param_groups == [{"lr": 1e-3, "params": [0]}]
        assert torch.equal(read_whole(executor, checkpoint.parameters["a"].tensors["exp_avg"].whole), VALUES["a"])
        assert float(checkpoint.parameters["b"].scalars["step"]) == 3.0


def test_parameters_that_the_module_does_not_save_are_said(tmp_path: Path) -> None:
    trained = {**VALUES, "c": torch.randn(3), PLACEHOLDER: torch.zeros(1)}
    place = save_zero3(tmp_path, trained, world_size=2)
    edited(place, "model", lambda state: [state["module"].pop(name) for name in ("c", PLACEHOLDER)])
    with Executor() as executor:
        model = open_model(str(tmp_path), executor)
    assert model.tensors.keys() == VALUES.keys() and model.left_out == ("c",)


WANTED = Wanted(None, strict=True, optimizer=True, scheduler=False, counters=False, allow_pickle=False)


def state_of(tensors: Mapping[str, Any], frozen: Sequence[str] = ()) -> Any:
    """Return what is matched of a `Zero3State` with these parameters."""
    parameters = [
        HeldParameter(name, tuple(tensor.shape), NOTHING, 0, 0, tensor.dtype, tensor)
        for name, tensor in tensors.items()
    ]
    of_frozen = [parameter for parameter in parameters if parameter.name in frozen]
    return SimpleNamespace(parameters=parameters, frozen=of_frozen, optional=(), buffers={}, extra_states={})


@pytest.mark.parametrize(("dtype", "fits"), [(torch.bfloat16, True), (torch.float16, False)])
def test_packed_weights_are_not_cast(tmp_path: Path, dtype: torch.dtype, *, fits: bool) -> None:
    """A QLoRA run that was saved in bf16 and resumes in fp16: its packed bytes lie in tensors of these dtypes."""
    place = save_zero3(tmp_path, VALUES, world_size=2, frozen={"packed": torch.randn(8, 1).bfloat16()})
    tensors: dict[str, Any] = {name: torch.empty(values.shape) for name, values in VALUES.items()}
    tensors["packed"] = nn.Parameter(torch.empty(8, 1, dtype=dtype), requires_grad=False)
    tensors["packed"].quant_state = object()
    engine = state_of(tensors, frozen=["packed"])
    with Executor() as executor, contextlib.ExitStack() as stack:
        checkpoint = open_checkpoint(str(place), executor)
        if not fits:
            stack.enter_context(pytest.raises(UnsupportedError, match=r"packed: was saved as torch\.bfloat16"))
        assert _match(checkpoint, engine, WANTED).keys() == tensors.keys()


def test_extra_states_are_matched_as_by_load_state_dict(tmp_path: Path) -> None:
    place = save_zero3(tmp_path, VALUES, world_size=1)
    edited(place, "model", lambda state: state["module"].update({"a._extra_state": {"calls": 1}}))
    engine = state_of(VALUES)
    with Executor() as executor:
        checkpoint = open_checkpoint(str(place), executor)
        engine.extra_states = {"a._extra_state": nn.Module()}
        _match(checkpoint, engine, WANTED)
        engine.extra_states = {"b._extra_state": nn.Module()}
        _match(checkpoint, engine, replace(WANTED, strict=False))
        with pytest.raises(
            CheckpointError, match=r"missing: b\._extra_state \(1\); not in the engine: a\._extra_state"
        ):
            _match(checkpoint, engine, WANTED)


def test_each_rank_gets_what_it_has_saved(tmp_path: Path) -> None:
    """Of buffers, Python's values and extra states; if others resume, all get those of rank 0."""
    place = save_zero3(tmp_path, VALUES, world_size=2, buffers={"seen": torch.zeros(3)})
    ranks = itertools.count()

    def edit(state: Any) -> None:
        rank = next(ranks)
        state["module"] |= {"seen": torch.full((3,), float(rank)), "_extra_state": {"calls": rank}}

    edited(place, "model", edit)
    for world_size in (2, 3):
        for rank in range(world_size):
            with Executor() as executor:
                checkpoint = open_checkpoint(str(place), executor, rank=rank, world_size=world_size)
                seen = read_whole(executor, checkpoint.replicated["seen"].whole)
                names = ("_extra_state", "absent._extra_state")
                *_, extra = checkpoint.python_states(names, executor, allow_pickle=False)
            of = rank if world_size == 2 else 0
            assert (seen.tolist(), extra) == ([of] * 3, {"_extra_state": {"calls": of}})


def in_blocks(state: Any) -> None:
    """Keep an optimizer's states as bitsandbytes does: 8 bits for each element, and a scale for each block of them."""
    for number, of_group in state["optimizer_state_dict"]["optimizer_state_dict"]["state"].items():
        of_group_of_32_bits = of_group["exp_avg"]
        paged = of_group_of_32_bits.to(torch.uint8)
        paged.is_paged, paged.page_deviceid = True, 0  # attributes of a tensor of a paged optimizer
        of_group.clear()
        blocks = {"state1": paged, "qmap1": torch.linspace(-1, 1, 256), "absmax1": torch.ones(2)}
        if number:
            of_group.update({"step": 3, "state1": of_group_of_32_bits})  # small parameters are not quantized
        else:
            of_group.update({"step": 3, "__bnb_optimizer_quant_state__": blocks})


def test_optimizers_of_8_bits_leave_the_weights_readable(tmp_path: Path) -> None:
    place = save_zero3(tmp_path, VALUES, world_size=2, sub_group_size=9, moments={"exp_avg": VALUES})
    edited(place, "optim", in_blocks)
    with Executor() as executor:
        checkpoint = open_checkpoint(str(place), executor, with_moments=False)
        for name, values in VALUES.items():
            assert torch.equal(read_whole(executor, checkpoint.parameters[name].values.whole), values)
        with pytest.raises(
            UnsupportedError, match=r"__bnb_optimizer_quant_state__ of group 0: .*optimizer_states=False"
        ):
            open_checkpoint(str(place), executor)
        assert open_model(str(tmp_path), executor).tensors.keys() == VALUES.keys()


def test_groups_that_share_a_long_list_are_read_once(tmp_path: Path) -> None:
    place = save_zero3(tmp_path, VALUES, world_size=1)
    shared, group = list(range(9000)), {"params": [0]}
    of_many = [{"shared": shared, **group}, *({"shared": shared, "params": []} for _ in range(9000))]
    for groups, error in ((of_many, None), ([group, *[{"params": []}] * 9000], "two groups .* are one")):
        edited(place, "optim", lambda state, groups=groups: put(state, (*BASE, "param_groups"), groups))
        start = time.process_time()
        with Executor() as executor, contextlib.ExitStack() as stack:
            if error:
                stack.enter_context(pytest.raises(CheckpointError, match=error))
            assert len(open_checkpoint(str(place), executor).param_groups) == 9001
        assert time.process_time() - start < 20


def test_objects_in_the_client_state_need_trust(tmp_path: Path) -> None:
    place = save_zero3(tmp_path, VALUES, world_size=1, client_state={"args": {"mine": Mine()}})
    with Executor() as executor:
        checkpoint = open_checkpoint(str(place), executor)
        with pytest.raises(CheckpointError, match=r"nothing was run: .*Mine.* pass allow_pickle=True"):
            checkpoint.python_states((), executor, allow_pickle=False)
        assert checkpoint.python_states((), executor, allow_pickle=True)[1]["args"] == {"mine": Mine()}


@pytest.mark.parametrize("value", [{1, 2}, {"mine": Mine()}])
def test_the_client_state_is_that_of_the_file_that_was_opened(value: Any, tmp_path: Path) -> None:
    first = save_zero3(tmp_path / "1", VALUES, world_size=1, client_state={"epoch": 1, "value": value})
    other = save_zero3(tmp_path / "2", VALUES, world_size=1, client_state={"epoch": 2, "value": value})
    (name,) = (path.name for path in first.glob("*model_states.pt"))
    allowed = torch.serialization.get_safe_globals()
    with Executor() as executor:
        checkpoint = open_checkpoint(str(first), executor)
        (other / name).replace(first / name)
        assert checkpoint.python_states((), executor, allow_pickle=True)[1]["epoch"] == 1
    assert torch.serialization.get_safe_globals() == allowed


def test_quantized_fragments_without_scales_are_refused(tmp_path: Path) -> None:
    place = save_zero3(tmp_path, VALUES, world_size=2, frozen={"c": torch.ones(4, dtype=torch.int8)})
    with Executor() as executor, pytest.raises(UnsupportedError, match=r"saved as torch\.int8 without the scales"):
        open_checkpoint(str(place), executor)


def test_what_was_on_nvme_is_read_from_the_swapper_s_files(tmp_path: Path) -> None:
    moments = {"exp_avg": {name: value + 1 for name, value in VALUES.items()}}
    place = save_zero3(tmp_path, VALUES, world_size=2, moments=moments, swapped=True)
    with Executor() as executor:
        checkpoint = open_checkpoint(str(place), executor)
        for name, value in VALUES.items():
            saved = checkpoint.parameters[name]
            assert torch.equal(read_whole(executor, saved.values.whole), value)
            assert torch.equal(read_whole(executor, saved.tensors["exp_avg"].whole), value + 1)
            assert float(saved.scalars["step"]) == 3.0


ZERO = ("optimizer_state_dict",)
BASE = (*ZERO, "optimizer_state_dict")
DELETED = object()
SHARED = {"a": 1}


def put(state: Any, path: Sequence[Any], value: Any) -> None:
    """Put a value at a path of a tree, or remove what is there."""
    for key in path[:-1]:
        state = state[key]
    if value is DELETED:
        del state[path[-1]]
    else:
        state[path[-1]] = value


@pytest.mark.parametrize(
    ("kind", "path", "value", "error", "text"),
    [
        ("optim", (*ZERO, "partition_count"), deep(), CheckpointError, "by a tuple ranks"),
        ("optim", (*ZERO, "fp32_flat_groups", 0), torch.empty(0), CheckpointError, "expected 9 elements"),
        ("optim", (*ZERO, "fp32_flat_groups", 1), torch.zeros(2), CheckpointError, "expected 3 elements"),
        ("optim", (*ZERO, "fp32_flat_groups", 1), DELETED, CheckpointError, "1 flat groups, its model states name 2"),
        ("optim", (*ZERO, "optimizer_state_dict"), [{}], CheckpointError, "no 'optimizer_state_dict' in it"),
        ("optim", (*ZERO, "ds_zero_partition_groups"), [{}], UnsupportedError, "AutoEP"),
        ("optim", (*BASE, "state", 1, "exp_avg"), DELETED, CheckpointError, "other states than exp_avg, fp32"),
        ("optim", (*BASE, "state", 1, "step"), deep(), CheckpointError, "'step' of the optimizer is not"),
        ("optim", (*BASE, "state", 1, "fp32"), torch.zeros(3), UnsupportedError, "group 1 has the key 'fp32'"),
        ("optim", (*BASE, "state", 1, 5), torch.zeros(3), UnsupportedError, "or a number as a key"),
        ("optim", (*BASE, "param_groups"), [{"params": [0] * 9000}] * 9000, CheckpointError, "2 flat groups once"),
        ("optim", (*BASE, "state"), {0: SHARED, 1: SHARED}, CheckpointError, "have one state"),
        ("model", ("param_shapes",), [{"a": torch.Size([9, 2])}] * 2, CheckpointError, "two of its groups are one"),
        ("model", ("frozen_param_shapes", "a"), torch.Size([4]), CheckpointError, "has a in two groups of parameters"),
        ("optim", (*BASE, "param_groups"), {"params": 3}, CheckpointError, "no 'param_groups' in it"),
        ("optim", (*BASE, "state", 1), [1], CheckpointError, "no 1 in it"),
        ("model", ("shared_params",), {"c": ["a"]}, CheckpointError, "'shared_params' are malformed"),
        # of rank 1 alone
        ("rank_1*optim", (*BASE, "state", 0, "step"), torch.tensor(4.0), CheckpointError, "has made other steps"),
        ("rank_1*model", ("global_steps",), 4, CheckpointError, "saved at step 4, .* at 3"),
        # a parameter is read in one piece, so elements of two dtypes would be taken for those of one
        ("rank_1*optim", (*ZERO, "fp32_flat_groups", 0), torch.zeros(9).half(), CheckpointError, "on other ranks"),
        ("rank_1*model", ("frozen_param_fragments", "c"), torch.zeros(2).half(), CheckpointError, "fragment of c is"),
    ],
)
def test_what_does_not_fit_together(
    kind: str, path: Sequence[Any], value: Any, error: type[Exception], text: str, tmp_path: Path
) -> None:
    frozen = {"c": torch.randn(4)}
    place = save_zero3(tmp_path, VALUES, world_size=2, sub_group_size=9, moments={"exp_avg": VALUES}, frozen=frozen)
    edited(place, kind, lambda state: put(state, path, value))
    with Executor() as executor, pytest.raises(error, match=text):
        open_checkpoint(str(place), executor)


def dated(place: Path, seconds: Mapping[str, float]) -> None:
    """Give files the times at which they were written."""
    for pattern, when in seconds.items():
        for path in place.glob(pattern):
            os.utime(path, (when, when))


@pytest.mark.parametrize(
    "seconds",
    [
        # over the same tag, a save that was killed after its first phase; or in it; or in the second one
        {"*optim_states.pt": 1000, "*model_states.pt": 2000},
        {"*model_states.pt": 1000, "*optim_states.pt": 1100, "*rank_1*model_states.pt": 2000},
        {"*model_states.pt": 2000, "*rank_0*optim_states.pt": 2050, "*rank_1*optim_states.pt": 1100},
        {"*states.pt": 1000, "*rank_1*optim_states.pt": 1100},
    ],
)
def test_files_of_two_saves_are_told_apart_by_their_times(seconds: Mapping[str, float], tmp_path: Path) -> None:
    place = save_zero3(tmp_path, VALUES, world_size=2, moments={"momentum_buffer": VALUES})
    dated(place, seconds)
    with Executor() as executor, pytest.raises(CheckpointError, match="a save over an earlier one did not end"):
        open_checkpoint(str(place), executor)


def test_the_swapper_s_files_of_an_earlier_save_are_refused(tmp_path: Path) -> None:
    """DeepSpeed does not replace them: a save over the same tag fails once it has written all others."""
    place = save_zero3(tmp_path, VALUES, world_size=2, moments={"exp_avg": VALUES}, swapped=True)
    now = time.time()
    dated(place, {"*model_states.pt": now + 1000, "*optim_states.pt": now + 1001})
    with Executor() as executor, pytest.raises(CheckpointError, match=r"model_states\.pt: was written .* exp_avg-0"):
        open_checkpoint(str(place), executor)


@pytest.mark.parametrize(
    "seconds",
    [
        {"*model_states.pt": 1000, "*optim_states.pt": 5000},  # the phases
        {"*optim_states.pt": 1000, "*model_states.pt": 1005},  # copied in the order of their names, without times
        {"*model_states.pt": 1000, "*optim_states.pt": 1001, "*/*/*.swp": 10},  # copies keep the times of the last step
    ],
)
def test_the_times_of_one_save(seconds: Mapping[str, float], tmp_path: Path) -> None:
    place = save_zero3(tmp_path, VALUES, world_size=2, moments={"exp_avg": VALUES}, swapped=True)
    dated(place, seconds)
    with Executor() as executor:
        open_checkpoint(str(place), executor)


@pytest.mark.parametrize(("skipped", "is_said"), [(0, True), (2, False)])
def test_an_optimizer_that_has_made_other_steps_is_said(
    skipped: int, is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = save_zero3(tmp_path, VALUES, world_size=1, steps=3)
    edited(place, "model", lambda state: state.update(global_steps=5, skipped_steps=skipped))
    with Executor() as executor:
        open_checkpoint(str(place), executor)
    assert ("counts 5 steps, of which 0 were skipped, and its optimizer has made 3" in caplog.text) is is_said


def without(pattern: str) -> Callable[[Path], Any]:
    return lambda place: [path.unlink() for path in place.glob(pattern)]


def rename_tensor(state: Any) -> None:
    state["optimizer_state_dict"]["fp32_flat_groups"][0].ds_id = "../../a"


def cut_off(place: Path) -> None:
    path = place / "offloaded_tensors" / "rank01" / "exp_avg-0.tensor.swp"
    path.write_bytes(path.read_bytes()[:40])


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (without("*optim*"), CheckpointError, "has no optimizer states of ZeRO-3.* name the one that it was made of"),
        (lambda at: (at / "mp_rank_01_model_states.pt").touch(), UnsupportedError, "mp_rank_01_.*: is of tensor"),
        (cut_off, CheckpointError, r"exp_avg-0.* has 40 bytes, 48 are expected, with exp_avg of group 0 of an"),
        (without("*/rank01/0.*"), CheckpointError, r"rank01.0\.tensor\.swp: is missing, with flat group 0 of an"),
        (lambda at: edited(at, "optim", rename_tensor), CheckpointError, r"was on nvme as '\.\./\.\./a'"),
    ],
)
def test_files_that_do_not_fit_together(
    spoil: Callable[[Path], Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    place = save_zero3(tmp_path, VALUES, world_size=2, moments={"exp_avg": VALUES}, swapped=True)
    spoil(place)
    with Executor() as executor, pytest.raises(error, match=text):
        open_checkpoint(str(place), executor)


@pytest.mark.parametrize("linked", ["0.tensor.swp", "."])
def test_links_to_files_of_others_are_no_elements(linked: str, tmp_path: Path) -> None:
    place = save_zero3(tmp_path / "saved", {"a": torch.zeros(64)}, world_size=1, swapped=True)
    (path,) = place.glob("*/rank00/*.swp")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / path.name).write_bytes(b"key " * 600)
    for of_save in (path, *([path.parent] if linked == "." else [])):
        shutil.rmtree(of_save) if of_save.is_dir() else of_save.unlink()
    to_private = tmp_path / "private" / ("" if linked == "." else path.name)
    (path.parent if linked == "." else path).symlink_to(to_private)
    with Executor() as executor, pytest.raises(CheckpointError, match="is a link to a file outside of its folder"):
        open_checkpoint(str(place), executor)


def test_any_file_says_how_many_ranks_have_saved(tmp_path: Path) -> None:
    assert saved_by(tmp_path / "nowhere", None) is None and saved_by(tmp_path, "global_step3") is None
    place = save_zero3(tmp_path, VALUES, world_size=3)
    assert saved_by(tmp_path, None) == saved_by(tmp_path, "global_step3") == 3
    for path in place.glob("zero_pp_rank_[01]_*"):
        path.unlink()  # they are on another node
    assert saved_by(tmp_path, None) == 3
    next(place.glob("zero_pp_rank_2_*")).write_bytes(b"PK")
    assert saved_by(tmp_path, None) is None


# -- any range of any parameter is found in the files of any number of ranks -------------------------------------------


SHAPES = {"a": (5, 7), "b": (1,), "scalar": (), "c": (13,), "d": (4, 3, 2), "e": (2,), "f": (64,)}
HEADER = 16
"""Bytes before the tensors in each file."""


def evaluated(expression: Expression, elements: FlatRange, files: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what the copies of some elements of an expression take of the files."""
    made = torch.full((elements.numel,), math.nan)
    copies = list(plan_copies(expression, elements))
    prove_coverage("a part", [copy.nest for copy in copies], elements.numel)
    for copy in copies:
        assert isinstance(copy.leaf, Source) and copy.nest.is_run
        first = (copy.leaf.start - HEADER) // 4 + copy.nest.source
        made[copy.nest.destination : copy.nest.destination + copy.nest.numel] = files[copy.leaf.path][
            first : first + copy.nest.numel
        ]
    return made


@pytest.mark.parametrize("sub_group_size", [1, 20, 1000])
@pytest.mark.parametrize("saved_by", range(1, 9))
def test_partitions_of_any_world_are_found(saved_by: int, sub_group_size: int) -> None:
    torch.manual_seed(saved_by)
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    shapes = {name: value.shape for name, value in values.items()}
    groups = sub_groups(shapes, saved_by, sub_group_size)
    files: dict[str, torch.Tensor] = {}
    flats: list[list[Source]] = []
    for rank in range(saved_by):
        pieces = [[partitions(values[name], saved_by)[rank] for name in group] for group in groups]
        files[f"r{rank}"] = torch.cat([piece for group in pieces for piece in group])
        start, mine = HEADER, []
        for group in pieces:
            mine.append(Source(f"r{rank}", "flat", start, (sum(map(len, group)),), torch.float32))
            start += 4 * mine[-1].shape[0]
        assert [source.shape[0] for source in mine] == [group_numel(group, saved_by) for group in groups]
        flats.append(mine)
    found: dict[str, SavedParameter] = {}
    for number, group in enumerate(groups):
        found |= place_group(number, group, {FP32: [mine[number] for mine in flats]}, {"step": number})
    assert list(found) == list(SHAPES)
    for name, value in values.items():
        saved = found[name]
        assert saved.values.shape == SHAPES[name] and name in groups[saved.scalars["step"]]
        for world_size in range(1, 10):
            for rank in range(world_size):
                wanted = partition_range(saved.values.numel, rank, world_size)
                part = evaluated(*saved.values.part(wanted), files)
                assert torch.equal(part, value.reshape(-1)[wanted.start : wanted.end])


def test_a_fragment_may_be_empty() -> None:
    source = Source("f", "empty", 0, (0,), torch.float32)
    saved = partitioned((0, 4), [source])
    assert saved.numel == 0
    assert evaluated(*saved.part(FlatRange(0, 0)), {}).numel() == 0
