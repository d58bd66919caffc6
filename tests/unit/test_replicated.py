"""The replicated part, on one rank: what is reduced, averaged, skipped and stepped; and splitting an optimizer."""

import copy
import dataclasses
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lowmem_load.engines.engine import full_state_dict
from lowmem_load.errors import CheckpointError, ConfigError, UnsupportedError
from lowmem_load.partial.replicated import (
    FORMAT,
    REPLICATED_FILE,
    ReplicatedPart,
    SplitOptimizer,
    load_replicated,
    save_replicated,
)

pytestmark = pytest.mark.usefixtures("lone_process")


def part_of(model: nn.Module) -> ReplicatedPart:
    part = ReplicatedPart(model, {})
    part.train(dict.fromkeys(part.parameters, 0), torch.device("cpu"))
    return part


def two_layers(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}).to(dtype)


def test_a_state_that_does_not_fit_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    other = part_of(two_layers())
    other.optimizer = torch.optim.AdamW(other.masters.values(), lr=0.1)
    state = {**copy.deepcopy(other.state(exclude_frozen=False)), "groups": [{}]}  # from a file they are copies, too
    other.check(state, strict=True, num_groups=1)
    with pytest.raises(ConfigError, match="has 1 parameter groups, this one 2"):
        other.check(state, strict=True, num_groups=2)
    assert not caplog.messages
    del state["whole"]["groups"]  # as lowmem_load 0.3 saved it
    other.check(state, strict=True, num_groups=1)
    assert "its state is loaded by position" in caplog.text
    masters = state["whole"]["masters"]
    state["whole"]["masters"] = dict(reversed(masters.items()))
    with pytest.raises(ConfigError, match="order of the model's parameters has changed"):
        other.check(state, strict=True, num_groups=1)
    state["whole"]["masters"].pop("b.bias")
    with pytest.raises(ConfigError, match=r"other parameters: b\.bias"):
        other.check(state, strict=True, num_groups=1)


class Counting(nn.Linear):
    """Has an extra state."""

    calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_extra_states_are_saved_and_loaded(tmp_path: Path) -> None:
    models = [nn.ModuleDict({"a": Counting(2, 2), "b": Counting(2, 2)}) for _ in range(2)]
    saved, part = (ReplicatedPart(model, {"b": model["b"]}) for model in models)  # b's are in the engine's files
    models[0]["a"].calls, models[0]["b"].calls = 3, 4
    assert list(full_state_dict(models[0], without_frozen=False) or ()) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    save_replicated(str(tmp_path), saved.state(exclude_frozen=False))
    state = load_replicated(str(tmp_path))
    part.check(state, strict=True, num_groups=None)
    part.load(state, optimizer=False)
    assert (models[1]["a"].calls, models[1]["b"].calls) == (3, 0)
    del state["extra states"]  # as lowmem_load 0.3 saved it
    part.check(state, strict=False, num_groups=None)
    part.load(state, optimizer=False)
    with pytest.raises(ConfigError, match=r"other extra states than the model: a\._extra_state"):
        part.check(state, strict=True, num_groups=None)


def test_weights_alone_are_loaded_in_fp32() -> None:
    saved, part = part_of(two_layers(torch.bfloat16)), part_of(two_layers(torch.bfloat16))
    with torch.no_grad():
        for master in saved.masters.values():
            master.add_(1e-5)
    state = copy.deepcopy(saved.state(exclude_frozen=False))
    del state["whole"]["masters"]["b.bias"]  # it was frozen
    part.load(state, optimizer=False)
    exact = [name for name, master in part.masters.items() if torch.equal(master, saved.masters[name])]
    assert exact == ["a.weight", "a.bias", "b.weight"]


def test_steps_are_in_fp32_whatever_the_default_dtype_is() -> None:
    layers = two_layers()
    before = layers["a"].weight.detach().clone()
    torch.set_default_dtype(torch.bfloat16)
    try:
        part = part_of(layers)
    finally:
        torch.set_default_dtype(torch.float32)
    part.optimizer = torch.optim.SGD(part.masters.values(), lr=1.0)
    layers["a"](torch.full((1, 3), 1.0001)).sum().backward()
    part.reduce()
    part.step(1.0)
    assert torch.equal(layers["a"].weight, before - 1.0001)


def test_dtypes_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"a\.weight \(torch\.float64\)"):
        part_of(two_layers(torch.float64))


def test_an_optimizer_is_split_and_its_groups_stay_the_ones_that_count() -> None:
    model = two_layers()
    a, b = model["a"], model["b"]
    groups = [
        {"params": [a.weight], "lr": 1.0},
        {"params": [b.weight, a.bias], "lr": 2.0, "weight_decay": 0.3},
        {"params": [b.bias], "lr": 3.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=9.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # replaces optimizer.step
    split = SplitOptimizer(optimizer)
    first = split.derive({id(a.weight): a.weight, id(a.bias): a.bias})
    second = split.derive({id(b.weight): b.weight, id(b.bias): b.bias})
    assert first is not None and second is not None and type(first) is torch.optim.AdamW
    assert [(group["lr"], group["weight_decay"]) for group in first.param_groups] == [(1.0, 0.01), (2.0, 0.3)]
    assert [group["params"] for group in second.param_groups] == [[b.weight], [b.bias]]
    optimizer.step()
    scheduler.step()
    split.sync()
    assert [group["lr"] for group in second.param_groups] == [1.0, 1.5]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = b.weight.detach().clone()
    first.step()
    assert torch.equal(b.weight, before) and first.state.keys() == {a.weight, a.bias}
    assert not optimizer.state and not second.state
    assert split.derive({0: a.weight}) is None


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters())
    model["a"](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(UnsupportedError, match="has state already"):
        SplitOptimizer(optimizer)


# -- the file with the replicated part ---------------------------------------------------------------------------------


@dataclasses.dataclass
class OwnState:
    step: int


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "tag"
    weight = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    of_numpy = {"lrs": [np.float64(0.5), np.float32(0.25)], "pair": (np.int64(3), {np.int64(7): np.bool_(True)})}
    of_numpy |= {"name": np.str_("cosine"), "seen": defaultdict(int, {3: 1}), "milestones": Counter([30, 80])}
    save_replicated(str(folder), {"module": {"w": weight}, "steps": [1, None], **of_numpy})
    state = load_replicated(str(folder))
    assert torch.equal(state.pop("module")["w"], weight)
    assert state == {"format": FORMAT, "steps": [1, None], **of_numpy}
    assert type(state["milestones"]) is Counter
    assert [file.name for file in folder.iterdir()] == [REPLICATED_FILE]


def test_a_state_that_could_not_be_loaded_leaves_the_file_before_as_it_was(tmp_path: Path) -> None:
    save_replicated(str(tmp_path), {"step": 1})
    with pytest.raises(CheckpointError, match=rf"(?s){REPLICATED_FILE}: cannot be written .*OwnState"):
        save_replicated(str(tmp_path), {"step": OwnState(2)})
    assert load_replicated(str(tmp_path))["step"] == 1
    assert [file.name for file in tmp_path.iterdir()] == [REPLICATED_FILE]


def test_a_file_that_is_damaged_or_of_another_format_is_refused(tmp_path: Path) -> None:
    save_replicated(str(tmp_path), {"w": torch.ones(300)})
    path = tmp_path / REPLICATED_FILE
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(CheckpointError, match=f"{REPLICATED_FILE}: ends at byte 500 without a zip directory"):
        load_replicated(str(tmp_path))
    torch.save({"format": FORMAT + 1}, path)
    with pytest.raises(CheckpointError, match=f"{REPLICATED_FILE}: is not of format {FORMAT}"):
        load_replicated(str(tmp_path))
