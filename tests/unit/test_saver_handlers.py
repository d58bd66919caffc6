"""Saves of scripts that are handed to a handler: which ones, with what, and what may be done with a placeholder."""

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

from lowmem_load.errors import UnsupportedError
from lowmem_load.foreign_names import GET_STATE_DICT, MODEL_SAVE
from lowmem_load.integrations import deepspeed
from lowmem_load.integrations.deepspeed import NOTED_SAVES, LookedIntoError, NotGathered, is_saved_by_itself
from lowmem_load.models.saver import default_shard_size
from lowmem_load.replaced import holding, replaced
from tests import builders


@pytest.fixture
def model(checkpoints: Path) -> PreTrainedModel:
    return LlamaForCausalLM.from_pretrained(builders.tiny_llama(checkpoints))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is noted, and what is checked, of the saves inside."""
    things: list[Any] = []
    monkeypatch.setattr(deepspeed, "refuse_empty", things.append)
    with replaced({MODEL_SAVE: deepspeed.HANDLERS[MODEL_SAVE]}), holding(NOTED_SAVES, things):
        yield things


def test_a_save_of_a_placeholder_is_handed_on_and_writes_nothing(
    model: PreTrainedModel, seen: list[Any], tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "a", state_dict=NotGathered(), is_main_process=False, max_shard_size="1MB")
    model.save_pretrained(tmp_path / "b", state_dict=NotGathered())
    sizes = {"a": "1MB", "b": default_shard_size()}
    assert seen == [(model, str(tmp_path / name), {"max_shard_size": size}) for name, size in sizes.items()]
    assert not (tmp_path / "a").exists()


def test_a_save_without_a_state_is_checked_where_it_writes(
    model: PreTrainedModel, seen: list[Any], tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "a")
    assert seen == [model] and (tmp_path / "a" / "model.safetensors").is_file()
    model.save_pretrained(tmp_path / "a", state_dict=model.state_dict())
    assert seen == [model]


LOOKS: list[Callable[[Any], Any]] = [
    *(len, list, dict, bool, reversed, copy.copy, copy.deepcopy),
    pickle.dumps,
    OrderedDict,
]
LOOKS += [lambda state: state == {}, lambda state: state != {}, lambda state: {**state}, lambda state: "a" in state]
LOOKS += [lambda state: state["a"], lambda state: state.get("a"), lambda state: state.fromkeys("a")]
LOOKS += [nn.Linear(1, 1).load_state_dict, save, lambda state: torch.save(state, io.BytesIO())]
CHANGES: list[Callable[[Any], Any]] = [
    *(lambda state: state.__setitem__("a", 1), lambda state: state.__delitem__("a"), lambda state: state | {"a": 1}),
    *(lambda state: {"a": 1} | state, lambda state: state.__ior__({"a": 1}), lambda state: state.update(a=1)),
    *(lambda state: state.setdefault("a", 1), lambda state: state.pop("a", None), lambda state: state.popitem()),
    *(lambda state: state.clear(), {}.update),
]


@pytest.mark.parametrize("use", [*LOOKS, *CHANGES])
def test_a_placeholder_is_neither_read_nor_changed(use: Callable[[Any], Any]) -> None:
    state = NotGathered()
    with pytest.raises(LookedIntoError, match="or changes it, and lowmem_load does not gather them"):
        use(state)
    assert dict.__len__(state) == 0


def test_whole_models_give_their_state(model: PreTrainedModel) -> None:
    with replaced({GET_STATE_DICT: deepspeed.HANDLERS[GET_STATE_DICT]}):
        assert Accelerator(cpu=True).get_state_dict(model=model).keys() == model.state_dict().keys()


def test_trainer_writes_the_state_of_other_models_itself(model: PreTrainedModel) -> None:
    assert is_saved_by_itself(model)
    assert not is_saved_by_itself(nn.Linear(1, 1))


def test_a_placeholder_is_not_saved_in_the_older_format(
    model: PreTrainedModel, seen: list[Any], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match="safe_serialization=False: the weights are not gathered"):
        model.save_pretrained(tmp_path, state_dict=NotGathered(), safe_serialization=False)
    assert seen == []
